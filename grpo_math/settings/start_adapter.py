"""The adapter that a run trains further (``adapter``): its folder, its settings under their names, its hash.

generation/models.py loads its weights.
"""

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, as_config_error
from grpo_math.system.reading import home, is_folder, near, read_json, reading

CONFIG = "adapter_config.json"
WHAT = "give the folder of a LoRA adapter, or owner/name[@revision] on the Hub"
FILES = (CONFIG, "adapter_model.safetensors")
ALL_LINEAR = ["all-linear"]
# Fields of a recipe -> peft's names.
FIELDS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
}


def adapter_folder(name: str, files: Sequence[str] = (CONFIG,)) -> Path:
    """Return the folder of an adapter. ``files``: those that are downloaded from the Hub.

    Raises `ConfigError`.
    """
    folder = home(name)
    if not folder.is_dir():
        # ``runs/sft`` may be a path or a Hub id: it is a path if ``runs`` is a folder here.
        if is_folder(name) or (folder.parent.is_dir() and "/" in name):
            raise ConfigError("adapter", name, "is not a folder", near(folder) or WHAT)
        # huggingface_hub reads the variable when it is imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from huggingface_hub import hf_hub_download

        repo, _, revision = name.partition("@")
        with as_config_error("adapter", name, "is neither a folder here nor on the Hub", WHAT):
            for file in files:
                folder = Path(hf_hub_download(repo, file, revision=revision or None, etag_timeout=5)).parent
    if not (folder / CONFIG).exists():
        # Several adapters of a model, the checkpoints of a run, or its adapter/.
        inside = sorted(str(home(name) / path.parent.name) for path in folder.glob(f"*/{CONFIG}"))
        raise ConfigError("adapter", name, f"has no {CONFIG}", f"give one of {', '.join(inside)}" if inside else WHAT)
    return folder


def adapter_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the adapter that a recipe names; {} if it names none.

    Raises `ConfigError` for an adapter that is not a LoRA, and for a recipe that contradicts it. A recipe may have its
    own dropout, which is no part of the adapter, and all-linear, which the adapter's modules replace.
    """
    if not (name := settings.get("adapter")):
        return {}
    with reading(file := adapter_folder(name) / CONFIG):
        config = dict(read_json(file))
        fields: dict[str, Any] = {"use_peft": True, **{field: config.get(key) for field, key in FIELDS.items()}}
        modules = fields["lora_target_modules"] or []
        if isinstance(modules, str):
            modules = [modules]
        elif len(modules) == 1:
            # TRL takes a list of one name as an expression for a module's whole path.
            modules = [rf"(.*\.)?{modules[0]}"]
        fields["lora_target_modules"] = sorted(modules)
    if (kind := "DORA" if config.get("use_dora") else config.get("peft_type")) != "LORA":
        raise ConfigError("adapter", name, f"is of the kind {kind}", "give a LoRA, or merge it into its base")
    fields["lora_dropout"] = settings.get("lora_dropout", fields["lora_dropout"])
    given = {field: value for field, value in settings.items() if value != ALL_LINEAR}
    others = {field: value for field, value in fields.items() if _plain(given.get(field, value)) != _plain(value)}
    if others:
        words = ", ".join(f"{field}: {value}" for field, value in others.items())
        raise ConfigError("adapter", name, f"has {words} in its configuration", f"leave out {', '.join(others)}")
    return {field: value for field, value in fields.items() if value not in (None, [])}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value or None


def recorded_adapter(name: str) -> str:
    """Return the absolute path of a folder, or a Hub id with its commit. A run records it."""
    folder = adapter_folder(name)
    return os.path.abspath(folder) if home(name).is_dir() else f"{name.partition('@')[0]}@{folder.name}"


def adapter_identity(name: str) -> str:
    """Return what has to be equal when a run is resumed: the hash of a folder's files, or a Hub id with its commit."""
    if not home(name).is_dir():
        return recorded_adapter(name)
    content = sha256()
    for path in sorted(adapter_folder(name).glob("adapter_*")):
        content.update(path.read_bytes())
    return f"sha256:{content.hexdigest()[:12]}"
