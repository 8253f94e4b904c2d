"""Findings: what is wrong with a run, and what to do about it. The doctor runs before a run, the diagnosis after it.

>>> finding = Finding("warning", "completions are cut: 31%", "max_completion_length: 512", "truncation")
>>> finding.line()
'warning: completions are cut: 31%. Remedy: max_completion_length: 512 (truncation)'

Imports no torch.
"""

from typing import NamedTuple

# error: the run learns nothing or gets worse. warning: it learns less than possible. info: normal, explained.
LEVELS = ("error", "warning", "info")


class Finding(NamedTuple):
    """A problem of a run. ``message`` contains symptom, numbers and cause. ``remedy`` ends in a line for the recipe;
    it is empty if there is nothing to change. ``check`` names the check, as preflight.py or diagnosis.py adds it."""

    level: str
    message: str
    remedy: str = ""
    check: str = ""

    def line(self) -> str:
        """Return the finding as a line for a terminal."""
        remedy = f". Remedy: {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.message}{remedy} ({self.check})"
