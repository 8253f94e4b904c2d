"""Checks of the model, in its folder or on the Hub, and of its adapter.

Does not load weights or a tokenizer. A request to the Hub waits a few seconds at most.
"""

import re
from collections.abc import Sequence

from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, one_of
from grpo_math.generation.models import config_file
from grpo_math.planner.model import wanted_modules
from grpo_math.reading import read_json


def model(setup: Setup) -> None:
    """The model is a folder with a config.json, or is on the Hub or in its cache."""
    read_json(config_file(setup.settings["model_name_or_path"], setup.settings["model_revision"]))


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

    >>> check_targets(["layers.0.q_proj"], ["q_proj", "key"], ["q_proj"])
    Traceback (most recent call last):
    grpo_math.errors.ConfigError: lora_target_modules='key' matches no linear map of a layer: use all-linear, or q_proj
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
