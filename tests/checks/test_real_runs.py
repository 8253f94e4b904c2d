"""Histories of real runs of SmolLM2-135M, bad and healthy, and the findings about each.

Each file of cases/real_runs has a first line (run, what was done to the demo's recipe, settings, findings with the step
at which each is found first), and the history with the metrics that the checks read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_math.checks.diagnosis import diagnose
from grpo_math.run import metrics

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests/cases/real_runs").glob("*.jsonl"))
EVERY = 10  # steps between two diagnoses, as in training


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return head, lines


def findings_by_step(lines: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, int]:
    """Return the first step of each warning and error."""
    first_steps: dict[str, int] = {}
    last = int(lines[-1][metrics.STEP])
    for step in [*range(EVERY, last, EVERY), last]:
        for finding in diagnose([line for line in lines if line[metrics.STEP] <= step], config):
            if finding.level != "info":
                first_steps.setdefault(finding.check, step)
    return first_steps


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_run_gives_exactly_its_findings(path):
    head, lines = read(path)
    assert findings_by_step(lines, head["settings"]) == head["findings"]
