"""Check a run before it starts: the findings of `grpo-math doctor`, one after another.

preflight.py has the checks, in their order. After an error, those that need a sound run are left out.

Loads no weights, and writes nothing.
"""

import os
from collections.abc import Iterator, Sequence

from grpo_math.checks.check_services import cache_only
from grpo_math.checks.preflight import preflight
from grpo_math.checks.setup import Setup, as_finding
from grpo_math.errors import Finding, UserError
from grpo_math.settings import accelerate, recipe


def doctor(argv: Sequence[str], accelerate_config: str | None = None) -> Iterator[Finding]:
    """Yield the findings of ``--config RECIPE --FIELD VALUE ...``. Raises `UserError` if the file is not a recipe."""
    read = recipe.read(argv)
    launch = accelerate.accelerate_config(accelerate_config) if accelerate_config else {}
    # On a CPU the accelerate config states the processes. Without a config, a launcher has set WORLD_SIZE.
    processes = int(launch.get("num_processes", os.environ.get("WORLD_SIZE", 1)))
    setup = Setup(
        read, processes, launch, started="WORLD_SIZE" in os.environ or int(launch.get("num_machines") or 1) > 1
    )
    for note in read.notes:
        yield as_finding(UserError(note), "settings", "warning")
    for line in read.replaced:
        yield Finding("info", line, check="settings")
    for problem in read.problems:
        yield as_finding(problem, "settings")
    s = read.settings
    heldout = [entry.get("data") for entry in s.heldout or () if isinstance(entry, dict)]
    if note := cache_only([s.dataset, s.eval_dataset, *heldout], s.model_name_or_path):
        yield Finding("info", note, check="hub")
    yield from preflight(setup, failed=bool(read.problems))


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line of the text output.

    >>> summary([Finding("warning", "dropout", "lora_dropout: 0.0", "adapter")])
    'ok: no error, 1 warning'
    """
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning")}
    counted = ", ".join(f"{n or 'no'} {level}{'s' * (n > 1)}" for level, n in counts.items())
    return f"{'not ok' if counts['error'] else 'ok'}: {counted}"
