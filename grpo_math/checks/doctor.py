"""`grpo-math doctor`: everything that can be known of a run before it starts, as findings, each as soon as it is known.

First what needs no torch (checks/), then the settings as training parses them, then the tokenizer; with ``deep`` also
the model, on a few problems. A later stage is left out where an earlier one has found an error.

Does not train, and writes nothing.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_math.checks import Finding
from grpo_math.checks.preflight import CHECKS, WITH_TOKENIZER, finding_of, preflight
from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, UserError
from grpo_math.settings import accelerate, recipe
from grpo_math.settings.shipped import accelerate_file


def doctor(argv: Sequence[str], *, deep: bool = False, accelerate_config: str | None = None) -> Iterator[Finding]:
    """The findings of ``--config RECIPE --FIELD VALUE ...``. Raises `UserError` for a file that is no recipe."""
    read = recipe.read(argv)
    accelerate.environment()
    launch = recipe.read_recipe(accelerate_file(accelerate_config)) if accelerate_config else None
    if launch is not None:
        accelerate.accelerate_config(str(accelerate_config), launch)
    processes = int((launch or {}).get("num_processes", os.environ.get("WORLD_SIZE", 1)))
    setup = Setup(read.values, read.given, processes, launch)
    failed = bool(read.problems)
    for problem in read.problems:
        yield finding_of(problem, "settings")
    refused = {problem.field for problem in read.problems if isinstance(problem, ConfigError)}
    for finding in preflight(setup, [name for name in CHECKS if name not in refused], failed):
        failed |= finding.level == "error"
        yield finding
    if not failed:
        yield from _as_training(read, setup, deep)


def _as_training(read: recipe.Recipe, setup: Setup, deep: bool) -> Iterator[Finding]:
    """What the classes of TRL refuse, then the tokenizer, then the model."""
    from grpo_math.generation.models import check_weights, load_tokenizer, model_path
    from grpo_math.settings.conflicts import check
    from grpo_math.settings.parser import Parser

    checked = "settings"
    try:
        settings = Parser().parse(read)
        check(settings.arguments, settings.config, Path(str(settings.config.output_dir)))
        checked = "model"
        path = model_path(settings.model.model_name_or_path)
        setup.tokenizer = load_tokenizer(path, settings.model.model_revision)
        check_weights(path)
    except UserError as error:
        yield finding_of(error, checked)
        return
    for finding in preflight(setup, WITH_TOKENIZER):
        yield finding
        deep = deep and finding.level != "error"
    if deep:
        from transformers.utils.logging import disable_progress_bar

        from grpo_math.checks.deep import deep_checks

        disable_progress_bar()
        yield from deep_checks(setup, settings.config, settings.model)


def answer(findings: Sequence[Finding]) -> dict[str, Any]:
    """What `grpo-math doctor --json` prints.

    >>> answer([Finding("warning", "adapter", "dropout", "lora_dropout: 0.0", {})])["ok"]
    True
    """
    shown = [{name: getattr(finding, name) for name in ("level", "check", "message", "remedy")} for finding in findings]
    return {"ok": not any(finding.level == "error" for finding in findings), "findings": shown}


def summary(findings: Sequence[Finding]) -> str:
    """
    >>> summary([Finding("warning", "adapter", "dropout", "lora_dropout: 0.0", {})])
    'ok: no error, 1 warning'
    """
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning")}
    found = ", ".join(f"{n or 'no'} {level}{'s' * (n > 1)}" for level, n in counts.items())
    return f"{'not ok' if counts['error'] else 'ok'}: {found}"
