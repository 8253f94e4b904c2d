"""The comparison of two results on the terminal: the table, and problems gained and lost with both completions.

Does not compare: evaluation/compare.py does.
"""

import shutil
import textwrap
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from grpo_math.evaluation.compare import Change, Results, categories_of, compare, count, share
from grpo_math.evaluation.stats import PairedDifference, mcnemar
from grpo_math.run.metrics import CATEGORIES, IN_FORMAT, RIGHT

SHOWN_LINES = 12  # of each completion of an example


def text_of(before: Results, after: Results, answer: dict[str, Any]) -> str:
    """A `comparison` on the terminal: the table, then problems gained and lost with both completions."""
    blocks = [terminal_table(before, after)]
    for name, total in (("improvements", "gained"), ("regressions", "lost")):
        if answer[name]:
            blocks.append(f"{name} ({len(answer[name])} of {answer[total]})")
            blocks.append(terminal_changes(Change(**change) for change in answer[name]))
    return "\n\n".join(blocks)


def terminal_table(before: Results, after: Results, paired: PairedDifference | None = None) -> str:
    """The table that ends a run: before, after, and the difference with its 95% paired interval."""
    paired = paired or compare(before, after)
    lines = table(before, after, paired)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([*text, moved(before, paired)])


def table(before: Results, after: Results, paired: PairedDifference) -> list[list[str]]:
    """The rows of that table, the head first."""
    lines = [["", "before", "after", "difference", "95% paired interval"]]
    for name, right, difference in (
        ("accuracy", RIGHT, paired),
        ("accuracy in format", IN_FORMAT, compare(before, after, IN_FORMAT)),
    ):
        shares = [f"{share(results, right):.1%}" for results in (before, after)]
        interval = f"[{100 * difference.lo:+.1f}, {100 * difference.hi:+.1f}]"
        lines.append([name, *shares, f"{100 * difference.difference:+.1f} points", interval])
    for category in categories_of(before, after):
        old, new = (count(results, category) for results in (before, after))
        lines.append([CATEGORIES.get(category, category), str(old), str(new), f"{new - old:+d}", ""])
    return lines


def moved(before: Results, paired: PairedDifference) -> str:
    """How many problems rose and fell, with the test of it, as one sentence."""
    several = any(row.get("sample", 0) for row in before["rows"])
    words = "are right more often, {} less often" if several else "went from wrong to right, {} back"
    test = f"{'sign test' if several else 'McNemar, exact'}: p = {mcnemar(paired.gained, paired.lost):.2g}"
    return f"{paired.n} problems: {paired.gained} {words.format(paired.lost)} ({test})"


def terminal_changes(changes: Iterable[Change], width: int | None = None) -> str:
    """Changed problems, the completions before and after side by side, cut at `SHOWN_LINES` lines.

    As text that is safe to print: no control character gets through.
    """
    column = ((width or min(160, shutil.get_terminal_size((100, 24)).columns)) - 7) // 2
    blocks = []
    for change in changes:
        sides = [_wrapped(name, text, column) for name, text in (("before", change.before), ("after", change.after))]
        lines = [f"  {old:<{column}} | {new}".rstrip() for old, new in zip_longest(*sides, fillvalue="")]
        blocks.append("\n".join([f"{_printable(change.problem)}  (gold: {_printable(change.gold)})", *lines]))
    return "\n\n".join(blocks)


def _wrapped(name: str, text: str, width: int) -> list[str]:
    lines = [part for line in _printable(text.strip()).split("\n") for part in textwrap.wrap(line, width) or [""]]
    left_out = len(lines) - SHOWN_LINES
    if left_out > 1:  # the end holds the answer
        lines[: left_out + 1] = [f"... {left_out + 1} lines"]
    return [name, *lines]


def _printable(text: str) -> str:
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
