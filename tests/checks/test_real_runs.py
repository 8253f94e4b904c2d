"""Real runs of SmolLM2-135M, bad and healthy (tests/benchmarks/bad_runs.py made them), and what is said of each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from grpo_math.run import metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bad_runs import CASES, READ_METRICS, READ_SETTINGS, ROOT, RUNS, findings_by_step, judge, read_case

FILES = sorted(CASES.glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_run_gives_exactly_its_findings(path):
    head, lines = read_case(path)
    found = findings_by_step(lines, head["settings"])
    assert found == head["findings"]
    assert judge(head["run"], set(found)) == "right"


def test_the_saved_runs_are_those_of_the_program():
    assert FILES
    for path in FILES:
        head, _ = read_case(path)
        assert (head["run"], head["what"]) == (path.stem, RUNS[path.stem].what)
        assert head["settings"]["learning_rate"] == RUNS[path.stem].settings.get("learning_rate", 5e-4)


def test_what_the_checks_read_is_saved():
    """A saved run has lost nothing that a check would have seen: all names in symptoms.py and series.py are kept."""
    source = "".join(
        (ROOT / "grpo_math/checks" / f"{name}.py").read_text(encoding="utf-8") for name in ("symptoms", "series")
    )
    read = {getattr(metrics, name) for name in set(re.findall(r"metrics\.([A-Z_]+)", source))}
    of_tools = {name for name in read if name.startswith("tools/")}
    assert read - READ_METRICS == {metrics.SAMPLER_DIFFERENCE, *of_tools}  # no vLLM and no tools in these runs
    assert set(re.findall(r"run\.get\(\s*\"(\w+)\"", source)) <= set(READ_SETTINGS)
