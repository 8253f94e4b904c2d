"""Two results files of the same problems -> the paired difference, and the problems that changed.

A row is right if its answer is, in whatever form; with ``right=IN_FORMAT``, only if it is also in the format. Problems
are what is paired: of several samples a problem has its mean. Results over different problems, prompts, graders or
sampling settings (`SAME`) are refused, since their difference would say nothing about the training.

Does not evaluate, and does not draw: it reads what `evaluate` wrote, and report/ shows it.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from grpo_math.errors import UserError
from grpo_math.evaluation.figures import as_now
from grpo_math.evaluation.stats import PairedDifference, mcnemar, paired_bootstrap, wilson_of_means
from grpo_math.grading import version
from grpo_math.reading import Unreadable, read_json
from grpo_math.run.metrics import CATEGORIES, IN_FORMAT, RIGHT

Results = dict[str, Any]
Row = dict[str, Any]

# What two results must have in common beside the problems, and what to do where they do not.
SAME = {
    "template": "evaluate both with the same template to compare them",
    "prompt_hash": "the template's text or the tokenizer's chat template is another, evaluate both with the same",
    version.KEY: "the verdicts of two graders may differ, grade the kept answers anew and compare what that writes: {}",
    "samples": "evaluate both with as many samples to compare them",
    "temperature": "evaluate both at the same temperature to compare them",
    "max_new_tokens": "evaluate both with the same limit to compare them",
    "tools": "evaluate both with the same tools and limits to compare them",
}

OPTIONAL: dict[str, tuple[type, ...]] = {
    "sample": (int, type(None)),
    "tokens": (int, type(None)),
    "problem": (str, list, type(None)),
    **dict.fromkeys(("gold", "answer"), (str, int, float, type(None))),
    "verdict": (str, type(None)),
}

OF_FILE: dict[str, tuple[type, ...]] = {
    "template": (str,),
    "samples": (int,),
    "temperature": (int, float),
    "max_new_tokens": (int,),
    "versions": (dict,),
    **dict.fromkeys(("model", "adapter"), (str,)),
}


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
    """A results file of `evaluate`, checked as far as the report relies on it; `ResultsError` in one line.

    As in what `evaluate` returns, ``results`` is the file's own path. The figures are those of `figures.as_now`.
    """
    path = Path(path)
    try:
        results = read_json(path)
    except Unreadable as error:
        damaged, other = "it is half written or damaged, evaluate again", "give a results file of `evaluate`"
        raise ResultsError(f"{path}: {error}: {damaged if path.is_file() else other}") from None
    if not isinstance(results, dict) or results.get("schema") != 1:
        raise ResultsError(f"{path}: is not a results file of schema 1: evaluate again with this version")
    rows = results.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ResultsError(f"{path}: rows is empty: there is nothing to report, evaluate again")
    for name, kinds in OF_FILE.items():
        if not isinstance(results.get(name), (*kinds, type(None))):
            raise ResultsError(f"{path}: {name} is no such thing: it is damaged, evaluate again")
    seen = set()
    for number, row in enumerate(rows, start=1):
        for name, kind in (("id", (str, int)), ("completion", str), ("category", str)):
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise ResultsError(f"{path}: row {number} has no {name}: it is damaged, evaluate again")
        for name, kinds in OPTIONAL.items():
            if not isinstance(row.get(name), kinds):
                raise ResultsError(f"{path}: row {number} has a {name} that is none: it is damaged, evaluate again")
        key = (str(row["id"]), row.get("sample", 0))
        if key in seen:
            raise ResultsError(f"{path}: row {number} repeats the id {key[0]!r}: ids must be unique to be paired")
        seen.add(key)
    return {**as_now(results), "results": str(path)}


def compare(before: Results, after: Results, right: Sequence[str] = RIGHT) -> PairedDifference:
    """The paired difference in accuracy; `ResultsError` unless both have `SAME` and the problems in common."""
    both = _by_problem(before, after)
    return paired_bootstrap([_score(old, right) for old, _ in both], [_score(new, right) for _, new in both])


def changed(before: Results, after: Results, limit: int | None = 3, lost: bool = False) -> list[Change]:
    """The first ``limit`` problems that went from wrong to right, or with ``lost`` from right to wrong.

    Of several samples: the problems that are right more often, with a completion that was wrong before and one that is
    right after; with ``lost`` the other way round.
    """
    changes = []
    for old, new in _by_problem(before, after):
        if (_score(new) - _score(old)) * (-1 if lost else 1) > 0:
            was = next(row for row in old if (row["category"] in RIGHT) == lost)
            now = next(row for row in new if (row["category"] in RIGHT) != lost)
            text = (_string(now.get("problem")), _string(now.get("gold")))
            changes.append(Change(was["id"], *text, was["completion"], now["completion"]))
    return changes[:limit]


def comparison(before: Results, after: Results, examples: int = 3) -> dict[str, Any]:
    """All figures of a comparison, for ``--json``.

    ``p`` is McNemar's exact test, with one sample a problem; with several, the same test on the problems whose share
    of right answers rose or fell, which is the sign test.
    """
    paired = compare(before, after)
    several = any(row.get("sample", 0) for row in before["rows"])
    in_format = compare(before, after, IN_FORMAT)
    return {
        "n": paired.n,
        "before": _side(before, 0, before, after),
        "after": _side(after, 1, before, after),
        "difference": paired.difference,
        "ci95": [paired.lo, paired.hi],
        "difference_in_format": in_format.difference,
        "ci95_in_format": [in_format.lo, in_format.hi],
        "gained": paired.gained,
        "lost": paired.lost,
        "test": "sign" if several else "mcnemar",
        "p": mcnemar(paired.gained, paired.lost),
        "improvements": [change._asdict() for change in changed(before, after, examples)],
        "regressions": [change._asdict() for change in changed(before, after, examples, lost=True)],
    }


def _side(results: Results, which: int, before: Results, after: Results) -> dict[str, Any]:
    flags = [[row["category"] in RIGHT for row in pair[which]] for pair in _by_problem(before, after)]
    return {
        "model": results.get("model"),
        "adapter": results.get("adapter"),
        "accuracy": share(results),
        "ci95": list(wilson_of_means(flags)),
        "accuracy_in_format": share(results, IN_FORMAT),
        "categories": {name: count(results, name) for name in categories_of(before, after)},
    }


def pairs(before: Results, after: Results) -> list[tuple[Row, Row]]:
    """The rows of the same problem and sample; `ResultsError` names what the two results do not have in common."""
    was, now = version.as_now(before), version.as_now(after)
    for name, remedy in SAME.items():
        if was.get(name) != now.get(name):
            remedy = remedy.format(" && ".join(_regrading(results) for results in (before, after) if _is_old(results)))
            raise ResultsError(f"{name} differs (before {was.get(name)!r}, after {now.get(name)!r}): {remedy}")
    old, new = ({(str(row["id"]), row.get("sample", 0)): row for row in results["rows"]} for results in (before, after))
    if alone := sorted(old.keys() ^ new.keys(), key=str):
        counts = f"before {len(old)}, after {len(new)}, in one only {len(alone)}, such as {alone[0][0]!r}"
        raise ResultsError(
            f"the problems differ ({counts}): evaluate both on the same data, n and seed to compare them"
        )
    for key, row in old.items():
        for name in ("problem", "gold"):
            if row.get(name) != new[key].get(name):
                raise ResultsError(f"{name} of {key[0]!r} differs: evaluate both on the same data to compare them")
    return [(row, new[key]) for key, row in old.items()]


def _is_old(results: Results) -> bool:
    return version.as_now(results).get(version.KEY) != version.version()


def _regrading(results: Results) -> str:
    """The line that grades them anew."""
    return f"grpo-math evaluate --regrade {shlex.quote(str(results.get('results', 'RESULTS')))}"


def _by_problem(before: Results, after: Results) -> list[tuple[list[Row], list[Row]]]:
    problems: dict[str, tuple[list[Row], list[Row]]] = {}
    for old, new in pairs(before, after):
        both = problems.setdefault(str(old["id"]), ([], []))
        both[0].append(old)
        both[1].append(new)
    return list(problems.values())


def _score(rows: Sequence[Row], right: Sequence[str] = RIGHT) -> float:
    return fmean(row["category"] in right for row in rows)


def count(results: Results, *categories: str) -> int:
    return sum(row["category"] in categories for row in results["rows"])


def share(results: Results, categories: Sequence[str] = RIGHT) -> float:
    return count(results, *categories) / len(results["rows"])


def categories_of(*several: Results | None) -> list[str]:
    """The known categories in their order, then any other that occurs."""
    found = {str(row["category"]) for results in several if results for row in results["rows"]}
    return [*CATEGORIES, *sorted(found - CATEGORIES.keys())]


def _string(value: object) -> str:
    return "" if value is None else str(value)
