"""Which grader gave a verdict: a number that changes when a verdict changes, and not when only the code does.

`VERDICTS` is a hash of the verdicts on tests/cases and of the answer formats. tests/grading/test_version.py computes it
and fails where it differs: then raise `GRADER`, so that results of before are no longer compared with those of now.
Before there were versions, results held a hash of the grader's source, 12 hexadecimal digits: it is read as version 1.

Does not grade.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

GRADER = 11
VERDICTS = "cca676f1efca"
MATH_VERIFY = ("0.9.0",)  # the versions with which the verdicts are these; add one with which the test passes
KEY = "grader_hash"  # its name in results and in journals


@cache
def version() -> int | str:
    """`GRADER`; with a Math-Verify that nobody has tried, a grader of its own.

    >>> version() == GRADER
    True
    """
    installed = metadata.version("math-verify")
    return GRADER if installed in MATH_VERIFY else f"{GRADER} with math-verify {installed}"


def as_now(about: Mapping[str, Any]) -> dict[str, Any]:
    """What results or a journal say of themselves, with a hash of before as version 1.

    >>> as_now({"seed": 0, "grader_hash": "3e177c0a2511"}), as_now({"seed": 0}), as_now({"grader_hash": 2})
    ({'seed': 0, 'grader_hash': 1}, {'seed': 0}, {'grader_hash': 2})
    """
    old = re.fullmatch("[0-9a-f]{12}", str(about.get(KEY))) is not None
    return {**about, KEY: 1} if old else dict(about)
