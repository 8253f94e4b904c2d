"""Checks of the model, in its folder or on the Hub, and of its adapter.

Does not load weights or a tokenizer. A request to the Hub waits a few seconds at most.
"""

import os
import re
from collections.abc import Sequence

from grpo_math.checks.services import SECONDS, offline
from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, one_of
from grpo_math.generation.models import model_path, refuse_missing_folder
from grpo_math.planner.model import wanted_modules
from grpo_math.reading import is_folder


def model(setup: Setup) -> None:
    """The model is a folder with a config.json, or is on the Hub or in its cache."""
    name = model_path(setup.settings["model_name_or_path"])
    refuse_missing_folder("model_name_or_path", name)
    if is_folder(name):
        _ = setup.model_config  # raises for a config.json that is missing or cannot be read
    else:
        _check_hub(name, setup.settings["model_revision"])


def _check_hub(name: str, revision: str) -> None:
    """Check that the Hub, or its cache, has the model's config.json."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json", revision=revision, etag_timeout=SECONDS)
    # The Hub's client raises a dozen kinds of errors for a wrong name or a broken network.
    except Exception as error:
        why = "HF_HUB_OFFLINE is set" if offline() else type(error).__name__
        reason = f"is neither a folder here nor in the Hub's cache, and did not come from the Hub ({why})"
        remedy = "give a folder, a Hub id, or 'embedded'; hf auth login for a private model"
        raise ConfigError("model_name_or_path", name, reason, remedy) from None


def adapter(setup: Setup) -> None:
    """The adapter's modules exist."""
    s = setup.settings
    if not s["use_peft"]:
        return
    linears = list(dict.fromkeys(path.rpartition(".")[2] for path in setup.shape.paths))
    modules = s["lora_target_modules"] or []
    one_name = "is one name, which TRL takes as an expression for a module's whole path"
    alone = len(modules) == 1 and modules[0] in linears
    setup.refuse("lora_target_modules", alone, one_name, f'write ".*{"".join(modules)}"')
    check_targets(setup.shape.paths, wanted_modules(s), linears)
    for name in s["lora_modules_to_save"] or []:
        one_of("lora_modules_to_save", name, ("embed_tokens", "lm_head", "norm", *linears))


def check_targets(paths: Sequence[str], modules: Sequence[str] | str | None, linears: Sequence[str]) -> None:
    """Raise `ConfigError` for one of ``lora_target_modules`` that matches none of these ``paths`` of linear maps.

    PEFT raises only if no name matches: a misspelt name among others would leave its maps untrained.
    """
    if modules == "all-linear":
        return
    names = [modules] if isinstance(modules, str) else modules or []
    for name in names:
        # PEFT matches a text as an expression for the whole path, and a name in a list with the end of the path.
        expression = name if isinstance(modules, str) else rf"(.*\.)?{re.escape(name)}"
        if not any(re.fullmatch(expression, path) for path in paths):
            remedy = f"use all-linear, or {', '.join(linears)}"
            raise ConfigError("lora_target_modules", name, "matches no linear map of a layer", remedy)
