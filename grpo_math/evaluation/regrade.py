"""Kept answers -> new results: the completions of a results file graded anew, by the grader of now and without a model.

What an earlier grader said stays in its file; the new results stand beside it under the grader's version, so that they
compare with others of that version.

Does not generate. `regrade` overwrites nothing; `renew` keeps what it replaces.
"""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation.compare import ResultsError, read_results
from grpo_math.evaluation.figures import Record, Results, category, summary
from grpo_math.evaluation.scoring import as_published
from grpo_math.grading import Grade, grade_batch, version
from grpo_math.grading.pool import Progress
from grpo_math.run.files import refuse_unwritable, write_json
from grpo_math.run.machine import versions


def regrade(path: str | Path, progress: Progress | None = None) -> Results:
    """The results of ``path`` with verdicts and figures of the grader of now, written to `regraded_file`.

    All else is as it was: completions, settings, hashes. ``regraded`` names the file and its grader, and counts the
    verdicts that changed. `ConfigError` where this grader has graded them already.
    """
    was = read_results(path)
    target = regraded_file(path, version.version())
    _refuse(path, target, _grader_of(was))
    results = _anew(path, was, progress)
    write_json(target, results)
    return {**results, "results": str(target)}


def renew(path: Path) -> None:
    """The same in place, where another grader than that of now graded ``path``: what it said is kept beside it first.

    For the evaluation before training of a run that goes on under a newer grader.
    """
    was = read_results(path)
    if (before := _grader_of(was)) != version.version():
        results = _anew(path, was)
        shutil.copyfile(path, regraded_file(path, before))
        write_json(path, results)


def _anew(path: str | Path, was: Results, progress: Progress | None = None) -> Results:
    """The results ``was`` with verdicts and figures of the grader of now."""
    records, samples = was["rows"], was.get("samples", 1)
    _check(path, records, samples)
    grades = grade_batch(
        [record["gold"] for record in records],
        [record["completion"] for record in records],
        answer_format=was.get("template"),
        progress=progress,
    )
    grades = [as_published(grade, record["gold"], record) for grade, record in zip(grades, records, strict=True)]
    rows = [_record(record, grade) for record, grade in zip(records, grades, strict=True)]
    pairs = [(record.get("verdict"), row["verdict"]) for record, row in zip(records, rows, strict=True)]
    changed = Counter(f"{old} -> {new}" for old, new in pairs if old != new)
    results = {
        **was,
        version.KEY: version.version(),
        **summary(rows, samples),
        "versions": {**was.get("versions", {}), "math-verify": versions()["math-verify"]},
        "regraded": {"from": Path(path).name, version.KEY: _grader_of(was), "changed": dict(sorted(changed.items()))},
        "rows": rows,
    }
    del results["results"]
    return results


def _grader_of(results: Results) -> Any:
    return version.as_now(results).get(version.KEY)


def regraded_file(path: str | Path, grader: int | str) -> Path:
    """Beside the results, named after the grader.

    >>> regraded_file("base.json", 2).name, regraded_file("base.grader-2.json", "3 with math-verify 1.0").name
    ('base.grader-2.json', 'base.grader-3-with-math-verify-1.0.json')
    """
    stem = re.sub(r"\.grader-[\w.-]+$", "", Path(path).stem)
    return Path(path).with_name(f"{stem}.grader-{re.sub(r'[^0-9A-Za-z.]+', '-', str(grader))}.json")


def _refuse(path: str | Path, target: Path, before: Any) -> None:
    """What there is nothing to do for."""
    if before == version.version():
        raise ConfigError("regrade", str(path), f"was graded by this grader, {before}", "compare it as it is")
    if target.exists():
        raise ConfigError("regrade", str(path), f"has been graded by this grader: {target} is there", "compare that")
    refuse_unwritable("regrade", str(path), target.parent, "copy the results elsewhere")


def _check(path: str | Path, records: list[Record], samples: int) -> None:
    """What `summary` and the grader need of the rows."""
    for number, record in enumerate(records, start=1):
        if not isinstance(record.get("gold"), str | int | float):
            raise ResultsError(f"{path}: row {number} has no gold: it is damaged, evaluate again")
    ids = [str(record["id"]) for record in records]
    if not 0 < samples <= len(ids) or ids != [key for key in dict.fromkeys(ids) for _ in range(samples)]:
        raise ResultsError(f"{path}: rows are not {samples} for each problem in turn: it is damaged, evaluate again")


def _record(record: Record, grade: Grade) -> Record:
    truncated = bool(record.get("truncated", record["category"] == "truncated"))
    said = {"verdict": str(grade.verdict), "answer": grade.answer, "in_format": grade.in_format}
    return {**record, **said, "category": category(grade, truncated)}


def text_of(results: Results) -> str:
    """What the regrading changed, in a line.

    >>> changed = {"correct -> wrong": 2, "wrong -> correct": 1}
    >>> print(text_of({"n": 64, "samples": 1, "grader_hash": 2, "regraded": {"grader_hash": 1, "changed": changed}}))
    grader    2, was 1; 3 of 64 verdicts changed: correct -> wrong 2, wrong -> correct 1
    """
    changed, answers = results["regraded"]["changed"], results["n"] * results.get("samples", 1)
    kinds = ", ".join(f"{name} {count}" for name, count in changed.items())
    line = f"grader    {results[version.KEY]}, was {results['regraded'][version.KEY]}; "
    return f"{line}{sum(changed.values())} of {answers} verdicts changed{f': {kinds}' if kinds else ''}"
