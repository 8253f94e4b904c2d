"""A fixed sample of mutants: the quick tests of a package notice most of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mutants.py")


@pytest.mark.full
@pytest.mark.parametrize("package", ["grading", "problems", "rewards"])
def test_the_quick_tests_catch_8_of_12_mutants(package):
    command = [sys.executable, str(PROGRAM), package, "--n", "12", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    (caught,) = re.findall(r"(\d+) of 12 mutants caught", done.stdout) or [done.stderr]
    assert int(caught) >= 8, done.stdout
