"""Two results files of the same problems -> the paired difference, the problems that changed, and a table of both.

A row is right if its answer is, in any form; with ``right=IN_FORMAT``, only if it is also in the format. Problems are
paired: the score of a problem with several samples is their mean. Results over different problems, prompts, graders or
sampling settings (`SAME`) are refused, because their difference does not measure the training.

`evaluate` writes the results, and report/ draws the page.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_math.errors import UserError
from grpo_math.evaluation.stats import PairedDifference, mcnemar, paired_bootstrap
from grpo_math.evaluation.suite import aligned, in_points
from grpo_math.run.metrics import ACCURACY, ACCURACY_IN_FORMAT, CATEGORIES, IN_FORMAT, RIGHT
from grpo_math.system.reading import read_json

Results = dict[str, Any]
Row = dict[str, Any]

FORMAT = 1  # of a results file

COMPARED_FIELDS = ("model", "adapter", ACCURACY, "ci95", ACCURACY_IN_FORMAT, "categories")  # in a comparison

# The settings that two results must share, besides the problems, and the remedy if they differ.
SAME = {
    "answer_format": "evaluate both with the same answer format to compare them",
    "backend": "vLLM and transformers round differently, evaluate both with one of them",
    "prompt_hash": "the template's text or the tokenizer's chat template is another, evaluate both with the same",
    "grader": "the verdicts of two graders may differ, evaluate both with one version of grpo_math",
    "samples": "evaluate both with as many samples to compare them",
    "temperature": "evaluate both at the same temperature to compare them",
    "max_new_tokens": "evaluate both with the same limit to compare them",
    "tools": "evaluate both with the same tools and limits to compare them",
}


class ResultsError(UserError, ValueError):
    """Results files that cannot be read, or that cannot be compared with each other."""


def read_results(path: str | Path) -> Results:
    """Return the results in a file that `evaluate` wrote; ``results`` is the file's path. Raises `UserError`."""
    results = read_json(path)
    if not isinstance(results, dict) or results.get("format") != FORMAT or not results.get("rows"):
        raise ResultsError(f"{path}: is not a results file of format {FORMAT}: run the evaluation again")
    # Files of 0.2 call the answer format "template".
    return {"answer_format": results.get("template"), **results, "results": str(path)}


def compare(before: Results, after: Results, right: Sequence[str] = RIGHT) -> PairedDifference:
    """Return the paired difference in accuracy. Raises `ResultsError` unless `SAME` and the problems are equal."""
    both = by_problem(before, after)
    return paired_bootstrap([_score(old, right) for old, _ in both], [_score(new, right) for _, new in both])


def changed(before: Results, after: Results, limit: int | None = 3, lost: bool = False) -> list[dict[str, Any]]:
    """Return the first ``limit`` problems that went from wrong to right, or with ``lost`` from right to wrong.

    With several samples, these are the problems that are right more often, each with a completion that was wrong before
    and one that is right after. With ``lost`` it is the reverse.
    """
    changes = []
    for old, new in by_problem(before, after):
        if (_score(new) - _score(old)) * (-1 if lost else 1) > 0:
            # Both exist: if the share of right answers rose, one was wrong before and one is right after.
            was = next(row for row in old if (row["category"] in RIGHT) == lost)
            now = next(row for row in new if (row["category"] in RIGHT) != lost)
            problem = {name: now[name] for name in ("id", "problem", "gold")}
            changes.append({**problem, "before": was["completion"], "after": now["completion"]})
    return changes[:limit]


def comparison(before: Results, after: Results, examples: int | None = 3) -> dict[str, Any]:
    """Return all metrics of a comparison, for ``--json``.

    With one sample per problem, ``p`` is McNemar's exact test. With several samples it is the sign test: the same test
    on the problems whose share of right answers rose or fell.
    """
    paired = compare(before, after)
    several = any(row.get("sample", 0) for row in before["rows"])
    in_format = compare(before, after, IN_FORMAT)
    return {
        "n": paired.n,
        "before": {name: before.get(name) for name in COMPARED_FIELDS},
        "after": {name: after.get(name) for name in COMPARED_FIELDS},
        "difference": paired.difference,
        "ci95": [paired.lo, paired.hi],
        "difference_in_format": in_format.difference,
        "ci95_in_format": [in_format.lo, in_format.hi],
        "gained": paired.gained,
        "lost": paired.lost,
        "test": "sign" if several else "mcnemar",
        "p": mcnemar(paired.gained, paired.lost),
        "improvements": changed(before, after, examples),
        "regressions": changed(before, after, examples, lost=True),
    }


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
        lines.append([label, f"{before[name]:.1%}", f"{after[name]:.1%}", *in_points(comparison, suffix)])
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


def by_problem(before: Results, after: Results) -> list[tuple[list[Row], list[Row]]]:
    """Return the rows of each problem, before and after, in the same order of samples.

    Raises `ResultsError` that names what differs.
    """
    requests = before.get("request") or {}, after.get("request") or {}
    # An older file has no request, or lacks a field of it.
    shared = [name for name in requests[0] if name in requests[1] and name not in SAME]
    remedies = dict.fromkeys(shared, "evaluate both with the same settings to compare them")
    # The request comes first: its system prompt says more than the hash of the prompts.
    for name, remedy in {**remedies, **SAME}.items():
        pair = requests if name in remedies else (before, after)
        was, now = (results.get(name) for results in pair)
        if was != now:
            field = f"request.{name}" if name in remedies else name
            raise ResultsError(f"{field} differs (before {was!r}, after {now!r}): {remedy}")
    old, new = ({(str(row["id"]), row.get("sample")): row for row in results["rows"]} for results in (before, after))
    texts = [{(*key, row.get("problem"), row.get("gold")) for key, row in rows.items()} for rows in (old, new)]
    if alone := sorted(texts[0] ^ texts[1], key=str):
        counts = f"before {len(old)}, after {len(new)}, in one only {len(alone)}, such as {alone[0][0]!r}"
        raise ResultsError(
            f"the problems differ ({counts}): evaluate both on the same data, n and seed to compare them"
        )
    problems: dict[str, tuple[list[Row], list[Row]]] = {}
    for key, row in old.items():
        both = problems.setdefault(key[0], ([], []))
        both[0].append(row)
        both[1].append(new[key])
    return list(problems.values())


def _score(rows: Sequence[Row], right: Sequence[str] = RIGHT) -> float:
    return fmean(row["category"] in right for row in rows)
