"""What is wrong with a run and what to do about it, as findings: of the doctor before a run, of the diagnosis after it.

>>> finding = Finding("warning", "truncation", "completions are cut: 31%", "max_completion_length: 512")
>>> finding.line()
'warning: completions are cut: 31%. Remedy: max_completion_length: 512 (truncation)'

Does not import torch, and does not change a run.
"""

from typing import NamedTuple

LEVELS = ("error", "warning", "info")  # learns nothing or gets worse; learns less than it could; normal, explained


class Finding(NamedTuple):
    """``message``: symptom, figures and cause. ``remedy`` ends in a line for the recipe, and is empty if there is
    nothing to change."""

    level: str
    check: str
    message: str
    remedy: str

    def line(self) -> str:
        """The finding as a line for a terminal."""
        remedy = f". Remedy: {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.message}{remedy} ({self.check})"
