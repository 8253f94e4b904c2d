"""Real runs of SmolLM2-135M, bad and healthy (tests/benchmarks/bad_runs.py made them), and what is said of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bad_runs import CASES, RUNS, findings_by_step, judge, read_case

FILES = sorted(CASES.glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_run_gives_exactly_its_findings(path):
    head, lines = read_case(path)
    found = findings_by_step(lines, head["settings"])
    assert found == head["findings"]
    assert judge(head["run"], set(found)) == "right"


def test_the_saved_runs_are_those_of_the_program():
    assert {path.stem for path in FILES} == set(RUNS)
    bad = [name for name, run in RUNS.items() if run.expected]
    assert len(bad) >= 10
    assert len(RUNS) - len(bad) >= 5
    for path in FILES:
        head, _ = read_case(path)
        assert (head["run"], head["what"]) == (path.stem, RUNS[path.stem].what)
