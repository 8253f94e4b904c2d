"""Print the comparison of two results as a table.

Does not compare: evaluation/compare.py does.
"""

from collections.abc import Mapping
from typing import Any

from grpo_math.evaluation.suite import aligned
from grpo_math.run.metrics import CATEGORIES


def terminal_table(comparison: Mapping[str, Any]) -> str:
    """Return the table that ends a run: before, after, and the difference with its 95% paired interval."""
    return f"{aligned(table(comparison))}\n{moved(comparison)}"


def table(comparison: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of `terminal_table`, the header first."""
    before, after = comparison["before"], comparison["after"]
    lines = [["", "before", "after", "difference", "95% paired interval"]]
    for label, name, suffix in (
        ("accuracy", "accuracy", ""),
        ("accuracy in format", "accuracy_in_format", "_in_format"),
    ):
        low, high = comparison[f"ci95{suffix}"]
        difference = f"{100 * comparison[f'difference{suffix}']:+.1f} points"
        interval = f"[{100 * low:+.1f}, {100 * high:+.1f}]"
        lines.append([label, f"{before[name]:.1%}", f"{after[name]:.1%}", difference, interval])
    for category, old in before["categories"].items():
        new = after["categories"][category]
        if old or new:
            lines.append([CATEGORIES.get(category, category), str(old), str(new), f"{new - old:+d}", ""])
    return lines


def moved(comparison: Mapping[str, Any]) -> str:
    """Return a sentence with the numbers of problems gained and lost, and the significance test."""
    several = comparison["test"] == "sign"
    words = "are correct more often, {} less often" if several else "went from wrong to correct, {} back"
    test = f"{'sign test' if several else 'McNemar, exact'}: p = {comparison['p']:.2g}"
    return f"{comparison['n']} problems: {comparison['gained']} {words.format(comparison['lost'])} ({test})"
