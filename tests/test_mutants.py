"""A fixed sample of mutants: the quick tests notice most of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mutants.py")
PACKAGES = ("algorithm", "packing", "generation", "evaluation", "trainer", "grading", "problems", "rewards")


@pytest.mark.full
def test_the_quick_tests_catch_6_of_8_mutants():
    command = [sys.executable, str(PROGRAM), *PACKAGES, "--n", "1", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    caught = re.findall(r"(\d+) of 1 mutants caught", done.stdout)
    assert len(caught) == len(PACKAGES), done.stdout + done.stderr
    assert sum(map(int, caught)) >= 6, done.stdout
