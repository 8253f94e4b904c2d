"""`grpo-math doctor`: everything that can be known of a run before it starts, as findings, each as soon as it is known.

First what needs no torch (checks/), then the settings as training parses them, then the tokenizer; with ``deep`` also
the model, on a few problems. A later stage is left out where an earlier one has found an error.

Does not train, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_math.checks.finding import Finding
from grpo_math.checks.preflight import CHECKS, WITH_TOKENIZER, finding_of, preflight
from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, UserError
from grpo_math.settings import recipe
from grpo_math.settings.accelerate import accelerate_config as check_accelerate
from grpo_math.settings.accelerate import environment


def doctor(argv: Sequence[str], *, deep: bool = False, accelerate_config: str | None = None) -> Iterator[Finding]:
    """The findings of ``--config RECIPE --FIELD VALUE ...``. Raises `UserError` for a file that is no recipe."""
    read = recipe.read(argv)
    environment()
    accelerate = recipe.read_recipe(accelerate_config) if accelerate_config else None
    if accelerate is not None:
        check_accelerate(str(accelerate_config), accelerate)
    processes = int((accelerate or {}).get("num_processes", os.environ.get("WORLD_SIZE", 1)))
    setup = Setup(read.values, read.given, processes, accelerate)
    failed = bool(read.problems)
    for problem in read.problems:
        yield finding_of(problem, "settings")
    refused = {problem.field for problem in read.problems if isinstance(problem, ConfigError)}
    for finding in preflight(setup, [name for name in CHECKS if name not in refused], failed):
        failed |= finding.level == "error"
        yield finding
    if not failed:
        yield from _as_training(argv, setup, deep)


def _as_training(argv: Sequence[str], setup: Setup, deep: bool) -> Iterator[Finding]:
    """What the classes of TRL refuse, then the tokenizer, then the model."""
    from grpo_math.generation.models import check_weights, load_tokenizer, model_path
    from grpo_math.settings.conflicts import check
    from grpo_math.settings.parser import Parser

    try:
        train_args, config, model_args = Parser().parse(list(argv))
        check(train_args, config, Path(str(config.output_dir)))
    except UserError as error:
        yield finding_of(error, "settings")
        return
    try:
        path = model_path(model_args.model_name_or_path)
        setup.tokenizer = load_tokenizer(path, model_args.model_revision)
        check_weights(path)
    except UserError as error:
        yield finding_of(error, "model")
        return
    for finding in preflight(setup, WITH_TOKENIZER):
        yield finding
        deep = deep and finding.level != "error"
    if deep:
        from transformers.utils.logging import disable_progress_bar

        from grpo_math.checks.deep import deep_checks

        disable_progress_bar()
        yield from deep_checks(setup, config, model_args)


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
    errors, warnings = (sum(finding.level == level for finding in findings) for level in ("error", "warning"))
    found = (
        f"{errors or 'no'} error{'' if errors < 2 else 's'}, {warnings or 'no'} warning{'' if warnings < 2 else 's'}"
    )
    return f"{'not ok' if errors else 'ok'}: {found}"
