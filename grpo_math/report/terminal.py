"""Print the comparison of two results: the table, and problems gained and lost with both completions.

Does not compare: evaluation/compare.py does.
"""

import shutil
import textwrap
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from grpo_math.errors import escaped
from grpo_math.run.metrics import CATEGORIES

SHOWN_LINES = 12  # of each completion of an example
EXAMPLES = 3


def text_of(comparison: Mapping[str, Any], width: int | None = None) -> str:
    """Return a `comparison` for the terminal: the table, then problems gained and lost with both completions."""
    blocks = [terminal_table(comparison)]
    width = width or min(160, shutil.get_terminal_size((100, 24)).columns)
    for name, total in (("improvements", "gained"), ("regressions", "lost")):
        changes = comparison[name][:EXAMPLES]
        blocks += [f"{name} ({len(changes)} of {comparison[total]})"] if changes else []
        blocks += [terminal_change(change, width) for change in changes]
    return "\n\n".join(blocks)


def terminal_table(comparison: Mapping[str, Any]) -> str:
    """Return the table that ends a run: before, after, and the difference with its 95% paired interval."""
    lines = table(comparison)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([*text, moved(comparison)])


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


def terminal_change(change: Mapping[str, Any], width: int) -> str:
    """Return a problem with both completions side by side, cut at `SHOWN_LINES` lines."""
    column = (width - 7) // 2
    sides = [_wrapped(name, change[name], column) for name in ("before", "after")]
    lines = [f"  {old:<{column}} | {new}".rstrip() for old, new in zip_longest(*sides, fillvalue="")]
    return "\n".join([escaped(f"{change['problem']}  (gold: {change['gold']})", keep="\n"), *lines])


def _wrapped(name: str, text: str, width: int) -> list[str]:
    text = escaped(text.strip(), keep="\n")
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, width) or [""]]
    left_out = len(lines) - SHOWN_LINES
    if left_out > 1:  # the answer is at the end
        lines[: left_out + 1] = [f"... {left_out + 1} lines"]
    return [name, *lines]
