"""Two results files of the same problems -> the paired difference, the problems that changed, and a table.

A row is right if its category is ``correct``: the answer is right and in the format. Results over different problems
or templates are refused, since their difference would say nothing about the training.

Does not evaluate or grade: it reads what `evaluate` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import UserError
from grpo_math.metrics import CATEGORIES
from grpo_math.stats import PairedDifference, paired_bootstrap

Results = dict[str, Any]

ANSWER_RIGHT = ("correct", "correct_answer_bad_format")


class ResultsError(UserError, ValueError):
    """Results files that cannot be read, or that cannot be compared with each other."""


class Change(NamedTuple):
    """A problem whose verdict differs between two runs."""

    id: Any
    problem: str
    gold: str
    before: str
    after: str


def read_results(path: str | Path) -> Results:
    """A results file of `evaluate`, checked as far as the report relies on it; `ResultsError` in one line."""
    path = Path(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror}): give a results file of `evaluate`") from None
    except ValueError:
        raise ResultsError(f"{path}: is not JSON: it is half written or damaged, evaluate again") from None
    if not isinstance(results, dict) or results.get("schema") != 1:
        raise ResultsError(f"{path}: is not a results file of schema 1: evaluate again with this version")
    rows = results.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ResultsError(f"{path}: rows is empty: there is nothing to report, evaluate again")
    seen = set()
    for number, row in enumerate(rows, start=1):
        for name, kind in (("id", (str, int)), ("completion", str), ("category", str)):
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise ResultsError(f"{path}: row {number} has no {name}: it is damaged, evaluate again")
        if (key := str(row["id"])) in seen:
            raise ResultsError(f"{path}: row {number} repeats the id {key!r}: ids must be unique to be paired")
        seen.add(key)
    return results


def compare(before: Results, after: Results) -> PairedDifference:
    """The paired difference in accuracy; `ResultsError` unless both ran the same problems with the same template."""
    return paired_bootstrap(*_scores(before, after, ("correct",)))


def changed(before: Results, after: Results, limit: int | None = 3, lost: bool = False) -> list[Change]:
    """The first ``limit`` problems that went from wrong to right, or with ``lost`` from right to wrong."""
    return [
        Change(old["id"], _string(new.get("problem")), _string(new.get("gold")), old["completion"], new["completion"])
        for old, new in pairs(before, after)
        if (old["category"] == "correct", new["category"] == "correct") == (lost, not lost)
    ][:limit]


def terminal_table(before: Results, after: Results, paired: PairedDifference | None = None) -> str:
    """The table that ends a run: before, after, and the difference with its 95% paired interval."""
    paired = paired or compare(before, after)
    lines = [["", "before", "after", "difference", "95% paired interval"]]
    for name, right, difference in (
        ("accuracy", ("correct",), paired),
        ("answer right, any format", ANSWER_RIGHT, paired_bootstrap(*_scores(before, after, ANSWER_RIGHT))),
    ):
        shares = [f"{share(results, right):.1%}" for results in (before, after)]
        interval = f"[{100 * difference.lo:+.1f}, {100 * difference.hi:+.1f}]"
        lines.append([name, *shares, f"{100 * difference.difference:+.1f} points", interval])
    for category in categories_of(before, after):
        old, new = (count(results, category) for results in (before, after))
        lines.append([CATEGORIES.get(category, category), str(old), str(new), f"{new - old:+d}", ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([*table, f"{paired.n} problems: {paired.gained} went from wrong to right, {paired.lost} back"])


def terminal_changes(changes: Iterable[Change]) -> str:
    """Changed problems with both completions as text that is safe to print: no control character gets through."""
    blocks = []
    for change in changes:
        parts = (("before", change.before), ("after", change.after))
        texts = [f"  {name:>6} | " + _printable(text.strip()).replace("\n", "\n         | ") for name, text in parts]
        blocks.append("\n".join([f"{_printable(change.problem)}  (gold: {_printable(change.gold)})", *texts]))
    return "\n\n".join(blocks)


def pairs(before: Results, after: Results) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    if before.get("template") != after.get("template"):
        names = f"before {before.get('template')!r}, after {after.get('template')!r}"
        raise ResultsError(f"template differs ({names}): evaluate both with the same template to compare them")
    old = {str(row["id"]): row for row in before["rows"]}
    new = {str(row["id"]): row for row in after["rows"]}
    if alone := sorted(old.keys() ^ new.keys()):
        counts = f"before {len(old)}, after {len(new)}, in one only {len(alone)}, such as {alone[0]!r}"
        raise ResultsError(
            f"the problems differ ({counts}): evaluate both on the same data, n and seed to compare them"
        )
    for key, row in old.items():
        for name in ("problem", "gold"):
            if row.get(name) != new[key].get(name):
                raise ResultsError(f"{name} of {key!r} differs: evaluate both on the same data to compare them")
    return [(row, new[key]) for key, row in old.items()]


def _scores(before: Results, after: Results, right: Sequence[str]) -> tuple[list[int], list[int]]:
    both = pairs(before, after)
    return [int(old["category"] in right) for old, _ in both], [int(new["category"] in right) for _, new in both]


def count(results: Results, *categories: str) -> int:
    return sum(row["category"] in categories for row in results["rows"])


def share(results: Results, categories: Sequence[str] = ("correct",)) -> float:
    return count(results, *categories) / len(results["rows"])


def categories_of(*several: Results | None) -> list[str]:
    """The known categories in their order, then any other that occurs."""
    found = {str(row["category"]) for results in several if results for row in results["rows"]}
    return [*CATEGORIES, *sorted(found - CATEGORIES.keys())]


def _printable(text: str) -> str:
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _string(value: object) -> str:
    return "" if value is None else str(value)
