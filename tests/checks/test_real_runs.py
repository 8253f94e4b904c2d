"""Histories of real runs of SmolLM2-135M, bad and healthy, and the findings about each.

Each file of cases/real_runs has a first line (run, what was done to the demo's recipe, settings, findings with the step
at which each is found first), and the history with the metrics that the checks read.
"""

from __future__ import annotations

import json
import re
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


def test_every_bad_run_has_a_finding_and_no_healthy_run_has_one():
    heads = [read(path)[0] for path in FILES]
    assert len(heads) >= 19
    assert {head["run"] for head in heads if not head["findings"]} == {
        head["run"] for head in heads if head["run"].startswith("healthy")
    }


def test_what_the_checks_read_is_saved():
    """The saved runs have each metric and setting that symptoms.py and series.py name, except of vLLM and tools."""
    texts = [(ROOT / f"grpo_math/checks/{name}.py").read_text(encoding="utf-8") for name in ("symptoms", "series")]
    source = "".join(texts)
    read_metrics = {getattr(metrics, name) for name in set(re.findall(r"metrics\.([A-Z_]+)", source))}
    saved = [read(path) for path in FILES]
    missing = read_metrics - {key for _, lines in saved for line in lines for key in line}
    # Accuracy in the format is younger than these runs.
    of_vllm = {metrics.SAMPLER_DIFFERENCE, metrics.LOGP_SUM_SPREAD, metrics.LENGTH_MAX}
    not_logged = {*of_vllm, metrics.HELDOUT_IN_FORMAT}
    assert {name for name in missing if not name.startswith("tools/")} <= not_logged
    read_settings = set(re.findall(r"run\.get\(\s*\"(\w+)\"", source))
    assert {name for name in read_settings if not name.startswith("vllm_")} <= {
        key for head, _ in saved for key in head["settings"]
    }
