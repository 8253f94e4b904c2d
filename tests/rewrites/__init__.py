r"""A farm: golds of GSM8K and MATH rewritten in ways that keep their value and in ways that do not.

What a policy learns to write if it is paid for it. tests/grading/test_farm.py holds the grader to it, and
tests/benchmarks/farm.py prints its rates.

Does not import the grader.
"""

from .frames import Rewritten, rewritings
from .golds import Gold, drawn, read

__all__ = ["Gold", "Rewritten", "drawn", "read", "rewritings"]
