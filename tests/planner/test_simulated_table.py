"""tests/benchmarks/plans.md: its plans are those of today. The simulations take minutes each, and are not repeated."""

from contextlib import suppress

import pytest
from benchmarks.simulate import FAMILIES, planned, recipe_of
from launching import ROOT

from grpo_math.planner.settings import NotPlanned
from grpo_math.system.machine import GB

TABLE = ROOT / "tests/benchmarks/plans.md"
LINES = [line for line in TABLE.read_text().splitlines() if line.startswith("| ") and " plan |" not in line]


def test_the_plans_of_recipes_are_those_of_the_table(tmp_path, monkeypatch):
    """`python tests/benchmarks/simulate.py --only NAME` makes rows anew. Only models with shipped measurements are
    compared: another one takes ten seconds."""
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    compared = 0
    for name, kind, *cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in LINES):
        if name not in FAMILIES:
            with suppress(NotPlanned):
                plans = planned(recipe_of(name, kind, str(tmp_path)), offline=True)
                written = [float(cell.split()[0]) for cell in cells[1::2] if cell]
                assert written == [pytest.approx(size / GB, abs=0.006) for size in plans.values()], (name, kind)
                compared += 1
    assert compared >= 6
