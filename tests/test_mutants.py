"""A fixed sample of mutants: the quick tests of a package notice at least half of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mutants.py")


@pytest.mark.full
def test_the_quick_tests_catch_at_least_half_of_a_sample():
    command = [sys.executable, str(PROGRAM), "rewards", "--n", "8", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(r"(\d+) of 8 mutants caught", done.stdout)
    assert counts is not None
    assert int(counts[1]) >= 4, done.stdout
