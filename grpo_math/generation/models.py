"""A model's name -> weights and tokenizer: a local folder, a Hub id, or ``embedded``.

Does not run remote code: ``trust_remote_code`` is always False.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, first_line
from grpo_math.generation.embedded import embedded_model
from grpo_math.reading import home, read_json


def model_path(name: str | None) -> str:
    """Return what `from_pretrained` understands: the folder of the embedded model, or the name itself."""
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", "give a folder, a Hub id, or 'embedded'")
    return str(embedded_model()) if name == "embedded" else name


def base_of_adapter(folder: str | Path) -> str | None:
    """The base that an adapter's configuration names; None for a folder that holds no adapter."""
    try:
        file = Path(folder) / "adapter_config.json"
        return str(read_json(file)["base_model_name_or_path"]) if os.path.lexists(file) else None
    except (ValueError, TypeError, KeyError):
        reason = "has an adapter_config.json that names no base"
        raise ConfigError("adapter", str(folder), reason, "get the adapter's files again") from None


def load_tokenizer(path: str, revision: str = "main") -> Any:
    """The tokenizer with padding on the left, as generation needs; pad falls back to the end-of-text token."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoTokenizer

    try:
        # A family that transformers does not know. Left out, trust_remote_code would be asked for on the terminal.
        AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(
            path, padding_side="left", truncation_side="left", revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        why = first_line(error)
        if isinstance(error, StrictDataclassError):  # the first line names transformers' own function alone
            why = f"config.json: {error.__cause__ or error}"
        if "instantiate the backend tokenizer" in why:  # a list of what was tried follows
            why = "there is no tokenizer.json"
        reason = f"has no configuration or tokenizer that can be loaded ({why})"
        raise ConfigError("model_name_or_path", path, reason, "give a model's folder, or a Hub id") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_weights(path: str) -> None:
    """Check that a folder holds the weights that its config.json asks for. Their headers are read, and no weight is.

    transformers makes up weights that are missing at random, with no more than a warning.
    """
    import transformers
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils import logging

    def refuse(reason: str, remedy: str = "get the model's files again") -> ConfigError:
        return ConfigError("model_name_or_path", path, reason, remedy)

    folder = home(path)
    if not folder.is_dir():
        return
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("is an encoder with a decoder, which GRPO does not train", "give a decoder-only model")
    if stored := getattr(config, "quantization_config", None):
        try:
            AutoHfQuantizer.from_config(stored, pre_quantized=True)
        except (ImportError, ValueError, TypeError) as error:
            raise refuse(f"is quantised, and cannot be read ({first_line(error)})", "give one that is not") from None
        return
    named = (config.architectures or ["AutoModelForCausalLM"])[0]
    if (kind := getattr(transformers, named, None)) is None:
        raise refuse(f"names {named} in its config.json, which transformers does not have", "check the file")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        how = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
        with _without_zero3():
            _, found = kind.from_pretrained(folder, trust_remote_code=False, **how)
    except Exception as error:  # each class refuses an impossible number in its own way
        raise refuse(
            f"has files that {named} refuses ({first_line(error)})", "check config.json and the weights"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    for weight, shape, expected in sorted(found["mismatched_keys"]):
        raise refuse(f"has {weight} of {list(shape)}, where its config.json says {list(expected)}")
    for weight in sorted(found["missing_keys"]):
        raise refuse(f"lacks weights that its config.json asks for, such as {weight}")


@contextmanager
def _without_zero3() -> Iterator[None]:
    """Load as without ZeRO-3, under which `from_pretrained` splits weights among processes and takes no device map."""
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


@contextmanager
def weights_of(path: str, own: Mapping[str, Any]) -> Iterator[None]:
    """Where weights are loaded: what cannot be loaded is one line. ``own``: the recipe's ``model_init_kwargs``."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        mismatched = "mismatched_sizes" in str(error)
        if getattr(error, "errno", None) is not None or (isinstance(error, RuntimeError) and not mismatched):
            raise  # not transformers' own: a full disk, say
        why = "their shapes are not those of config.json" if mismatched else first_line(error)
        remedy = "give a model's folder, or a Hub id" if isinstance(error, OSError) else "get the model's files again"
        raise ConfigError("model_name_or_path", path, f"has no weights that can be loaded ({why})", remedy) from None
    except TypeError as error:
        name = next((name for name in own if repr(name) in str(error)), None)
        if name is None or "unexpected keyword" not in str(error):
            raise
        raise ConfigError("model_init_kwargs", name, "is not an argument of this model", "leave it out") from None


def gpu_has_bfloat16() -> bool:
    """Return True if the accelerator computes in bfloat16. transformers also counts cards that emulate it (T4, V100,
    RTX 20xx), where autocast makes float32 slower and less exact."""
    import torch
    from transformers.utils import is_torch_bf16_gpu_available

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available()


def fast_dtype(use_cpu: bool = False) -> str:
    """``bfloat16`` on an accelerator that has it and on CPUs with bfloat16 instructions, else ``float32``.

    On a CPU without them bfloat16 is slower than float32; one with AVX512-BF16 or AMX is faster in it.
    """
    if not use_cpu:
        import torch

        if torch.cuda.is_available():
            return "bfloat16" if gpu_has_bfloat16() else "float32"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
