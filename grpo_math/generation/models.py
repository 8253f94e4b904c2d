"""Find the weights and the tokenizer of a model by name: a local folder, a Hub id, or ``embedded``.

Does not run remote code: ``trust_remote_code`` is always False.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from logging import NullHandler
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

from grpo_math.errors import ConfigError, UserError, as_config_error, first_line, nearest_name
from grpo_math.generation.embedded import embedded_model
from grpo_math.run.bar import transformers_bars
from grpo_math.system.reading import home, is_folder, near, read_json, reading
from grpo_math.system.replaced import replaced

# RoPEs that choose their frequencies by the largest position of a pass.
LENGTH_DEPENDENT = {"dynamic", "longrope"}

WITHOUT_HUB = "grpo-math plan needs only a folder with config.json, and nothing for the models of plan --list_models"


def model_path(name: str | None) -> str:
    """Return a name for `from_pretrained`: the folder of the embedded model, or the name itself."""
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", "give a folder, a Hub id, or 'embedded'")
    return str(embedded_model()) if name == "embedded" else name


def absolute_path(name: str) -> str:
    """Return the absolute path of a folder, or a Hub id. A run records it for commands in other folders."""
    return os.path.abspath(home(name)) if home(name).is_dir() else name


def refuse_missing_folder(field: str, name: str) -> None:
    """Raise `ConfigError` for a path that does not exist, so that it is not looked up on the Hub.

    ``runs/demo`` may be a path or a Hub id: it is a path if ``runs`` is a folder here.
    """
    path = home(name)
    in_folder = is_folder(name) or ("/" in name and path.parent.is_dir())
    misspelt = name != "embedded" and nearest_name(name, ["embedded"], cutoff=0.8)
    if (in_folder or misspelt) and not path.exists():
        remedy = "did you mean 'embedded'?" if misspelt else near(path) or "give a folder, a Hub id, or 'embedded'"
        raise ConfigError(field, name, "is not a folder", remedy)


def _remedy(path: str, otherwise: str) -> str:
    """Return the remedy for a folder that is not a model, by the file that it contains."""
    remedies = {
        "config.yaml": "it is a run: evaluate it with --run, or merge it with grpo-math export RUN --merge DIR",
        "adapter_config.json": "it is an adapter: give its base, and this folder as adapter; or merge both",
    }
    return next((remedy for name, remedy in remedies.items() if (home(path) / name).exists()), otherwise)


def config_file(name: str | None, revision: str = "main", offline: bool = False) -> Path:
    """Return the path of a model's config.json: in its folder, in the Hub's cache, or downloaded.

    Raises `ConfigError`. Waits a few seconds for the Hub at most, and not at all if ``offline``.
    """
    path = model_path(name)
    refuse_missing_folder("model_name_or_path", path)
    if is_folder(path):
        file = home(path) / "config.json"
        if not file.exists():
            raise ConfigError(
                "model_name_or_path", name, "has no config.json", _remedy(path, "give the folder of a model")
            )
        return file
    # huggingface_hub reads the variable when it is imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(path, "config.json", revision=revision, etag_timeout=5, local_files_only=offline))
    # The Hub's client raises a dozen kinds of errors, for a bad name and for a broken network.
    except Exception as error:
        cause = error.__cause__ or error
        reason = (
            f"is neither a folder here nor in the Hub's cache, and did not come from the Hub ({type(cause).__name__})"
        )
        remedy = "give a folder, a Hub id, or 'embedded'; "
        # A token helps only if the Hub has answered.
        remedy += "hf auth login for a private model" if isinstance(cause, HfHubHTTPError) else WITHOUT_HUB
        raise ConfigError("model_name_or_path", name, reason, remedy) from None


def adapter_base(folder: str | Path) -> str | None:
    """Return the base model in an adapter's configuration, or None if the folder has no adapter."""
    file = Path(folder) / "adapter_config.json"
    # A link to a missing file is a damaged adapter, and not a folder without one.
    if not os.path.lexists(file):
        return None
    with reading(file):
        return str(read_json(file)["base_model_name_or_path"])


def loading(path: str, files: str, field: str = "model_name_or_path") -> AbstractContextManager[None]:
    """Turn any exception about a model's files into one line. transformers, tokenizers, safetensors and the Hub raise
    different exceptions."""
    remedy = _remedy(path, "give a model's folder, or a Hub id")
    return as_config_error(field, path, f"has no {files} that can be loaded", remedy)


def load_tokenizer(path: str, revision: str = "main") -> Any:
    """Load the tokenizer with padding on the left, as generation needs. Pad falls back to the end-of-text token."""
    from transformers import AutoConfig, AutoTokenizer

    with loading(path, "configuration or tokenizer"):
        # Fails for a family that transformers does not know. Without this call, the tokenizer would ask for
        # trust_remote_code on the terminal.
        AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(
            path, padding_side="left", truncation_side="left", revision=revision, trust_remote_code=False
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_or_own(tokenizer: Any, model: Any) -> Any:
    """Return the tokenizer that a script gives, or load that of its model, which may be a name."""
    if tokenizer is not None:
        return tokenizer
    return load_tokenizer(model if isinstance(model, str) else model.config._name_or_path)


# Adapters of peft that change a token by that token alone, by peft_type. The others add tokens, choose among experts by
# the row, or draw noise.
TOKENWISE = (
    *("ADALORA", "ADAMSS", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA"),
    *("HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA"),
    *("ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
)
# Settings of LoRA that make its effect depend on the row: it begins at certain tokens (aLoRA), or draws noise.
ROWWISE_SETTINGS = ("alora_invocation_tokens", "monteclora_config")


def rowwise_adapter(model: Any) -> str | None:
    """Return the peft_type of an adapter whose effect on a token depends on the rest of its row or batch, or None.

    Such a model excludes packing, prompts that are computed once for a group, and batches that drop finished rows.
    """
    for adapter in getattr(model, "peft_config", {}).values():
        kind = getattr(adapter.peft_type, "value", str(adapter.peft_type))
        if kind not in TOKENWISE:
            return kind
        if settings := [name for name in ROWWISE_SETTINGS if getattr(adapter, name, None)]:
            return f"{kind} with {settings[0]}"
    return None


def context_length(config: Any, engine: Any = None) -> int | None:
    """Return the largest number of tokens of a prompt with its completion; None if the model's config has no limit.

    ``engine``: TRL's `VLLMGeneration`, whose limit may be lower than the model's.
    """
    if engine is not None and engine.mode == "colocate":
        return int(engine.llm.llm_engine.model_config.max_model_len)
    # Models with vision have it in the config of their text model, and a model with states may have none.
    window = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(filter(None, (window, getattr(engine, "context", None))), default=None)


def longest_width(config: Any) -> int | None:
    """Return the padded width from which a pass has other frequencies than a narrower one, or None.

    TRL pads a rollout to one width, so a RoPE that depends on the longest row has the same frequencies in all its
    passes. Below this width, rows may be packed or dropped: all have the frequencies of short rows.

    >>> from types import SimpleNamespace as Config
    >>> rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    >>> longest_width(Config(get_text_config=lambda: Config(rope_parameters=rope, max_position_embeddings=131072)))
    4096
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Some models have parameters for each kind of layer.
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    return min(
        (
            part.get("original_max_position_embeddings") or text.max_position_embeddings
            for part in parts
            if part.get("rope_type") in LENGTH_DEPENDENT
        ),
        default=None,
    )


def auto_class(architectures: Iterable[str] | None) -> str:
    """Return the class of transformers that loads a model as TRL does in training, by its config's ``architectures``.

    For some families with vision (Qwen3.5), AutoModelForCausalLM loads only the text model, whose layers have other
    names than an adapter of the whole model.

    >>> auto_class(["Qwen3_5ForConditionalGeneration"]), auto_class(["Qwen3ForCausalLM"])
    ('AutoModelForImageTextToText', 'AutoModelForCausalLM')
    """
    has_vision = any(name.endswith("ForConditionalGeneration") for name in architectures or ())
    return "AutoModelForImageTextToText" if has_vision else "AutoModelForCausalLM"


def load_base(path: str, **options: Any) -> Any:
    """Return the weights of a model, without running code of its repository."""
    import transformers

    revision = options.get("revision", "main")
    config = transformers.AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    kind = getattr(transformers, auto_class(config.architectures))
    with transformers_bars(1):
        return kind.from_pretrained(path, trust_remote_code=False, **options)


def load_adapter(weights: Any, adapter: str, model: str, **options: Any) -> Any:
    """Return the weights of ``model`` with an adapter. ``options``: of peft."""
    from peft import PeftModel

    with loading(adapter, f"weights for {model}", "adapter"), catch_warnings():
        # peft only warns, and leaves the layers as they are.
        filterwarnings("error", "Found missing adapter keys")
        return PeftModel.from_pretrained(weights, adapter, **options)


def check_weights(path: str) -> None:
    """Check that a folder has the weights that its config.json asks for. Only their headers are read.

    transformers initialises missing weights at random, and only warns.
    """
    import transformers
    from transformers.integrations import deepspeed

    folder = home(path)
    if not folder.is_dir():
        return
    with loading(path, "configuration or weights"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # The quantiser changes shapes.
        if getattr(config, "quantization_config", None):
            return
        # Tensors on the meta device have a shape and no data. Mismatches are listed, not raised, and named below.
        options = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
        with (
            # ZeRO-3 would split the weights among processes, and rejects a device map.
            replaced(deepspeed, _hf_deepspeed_config_weak_ref=None),
            # No bar, and no table of what is missing: the line below names it.
            replaced(transformers.logging, _tqdm_active=False),
            replaced(transformers.logging.get_logger(), handlers=[NullHandler()]),
        ):
            _, info = load_base(str(folder), **options)
    reasons = [
        f"has {name} of {list(shape)}, where its config.json says {list(expected)}"
        for name, shape, expected in info["mismatched_keys"]
    ]
    reasons += [f"lacks weights that its config.json asks for, such as {name}" for name in info["missing_keys"]]
    if reasons:
        raise ConfigError("model_name_or_path", path, min(reasons), "get the model's files again")


# Digits, which tokenizers of one family split alike, and words.
SAMPLE = "Let x = 12 + 345. Then \\boxed{357} is the answer."


def check_reference(name: str, tokenizer: Any) -> None:
    """Raise `ConfigError` unless a reference model has this tokenizer, a weight for each of its tokens, and its files.

    Loads no weights.
    """
    from transformers import AutoConfig

    refuse_missing_folder("reference_model", name)
    path = model_path(name)
    try:
        other = load_tokenizer(path)
        check_weights(path)
    except ConfigError as error:
        raise ConfigError("reference_model", name, error.reason, error.remedy) from None
    tokens = tokenizer.get_vocab()
    is_same = tokens == other.get_vocab() and tokenizer(SAMPLE)["input_ids"] == other(SAMPLE)["input_ids"]
    size = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config().vocab_size
    if not is_same or size <= max(tokens.values()):
        lacks = f"has {size} tokens, fewer than the tokenizer" if is_same else "has another tokenizer than the model"
        remedy = "give a model of the same family, because the log-probs of the same tokens are compared"
        raise ConfigError("reference_model", name, lacks, remedy)


@contextmanager
def explain_weight_errors(path: str, init_kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn an exception about weights on the Hub, or about ``init_kwargs``, into one line.

    ``init_kwargs``: the recipe's ``model_init_kwargs``.
    """
    try:
        yield
    except OSError as error:
        # Not raised by transformers: a full disk, for example.
        if error.errno is not None:
            raise
        reason = f"has no weights that can be loaded ({first_line(error)})"
        raise ConfigError("model_name_or_path", path, reason, "give a model's folder, or a Hub id") from None
    except TypeError as error:
        # Python has no attribute for the argument's name: only the message contains it, in quotes.
        name = next((name for name in init_kwargs if repr(name) in str(error)), None)
        if name is None or "unexpected keyword" not in str(error):
            raise
        raise ConfigError("model_init_kwargs", name, "is not an argument of this model", "leave it out") from None


def refuse_expert_dropout(message: str, model: str) -> None:
    """Raise `UserError` if peft's ``message`` refuses dropout, because it adapts stacked experts as one parameter."""
    if "ParamWrapper does not work with lora_dropout" in message:
        raise UserError(f"lora_dropout above 0 does not work with the stacked experts of {model}: set it to 0.0")
