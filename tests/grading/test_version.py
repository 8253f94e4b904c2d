"""The grader's version: raised with a verdict on the committed cases, and not with the code that gives it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_math.grading import Verdict, batch, grade_batch, version
from grpo_math.grading.formats import FORMATS, made_up
from grpo_math.run.resume import short_hash

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases"
SLOW = ("sum", "algebra", "matrix")  # hostile answers whose verdict hangs on the machine's speed or memory


def read(*names: str) -> list[dict]:
    return [json.loads(line) for name in names for line in (CASES / name).read_text(encoding="utf-8").splitlines()]


def pairs() -> list[tuple[str, str]]:
    """(gold, prediction) of every labelled pair."""
    rows = read(*sorted(path.name for path in CASES.glob("grading_pairs*.jsonl")))
    return [(row["gold"], row["prediction"]) for row in rows]


def hostile() -> list[tuple[str, str]]:
    """(gold, prediction) of the hostile answers that every machine decides alike."""
    rows = [row for row in read("hostile_answers.jsonl") if row["kind"] not in SLOW]
    return [("".join(p * n for p, n in row["gold"]), "".join(p * n for p, n in row["prediction"])) for row in rows]


def verdicts_hash(pairs: list[tuple[str, str]], hostile: Sequence[tuple[str, str]] = ()) -> str:
    """Of the answer formats, and of all verdicts: without a format, and on the pairs in each one, kept to and not."""
    rows = [(gold, text, None) for gold, text in [*pairs, *hostile]]
    for name in FORMATS:
        rows += [(gold, text, name) for gold, plain in pairs for text in (plain, made_up(plain, name))]
    golds, texts, formats = map(list, zip(*rows, strict=True))
    grades = grade_batch(golds, texts, answer_format=formats, timeout=120.0)
    assert not [grade.reason for grade in grades if grade.verdict is Verdict.CRASH]
    ways = [[f.name, f.marker.pattern, f.strict.pattern, f.strict.flags, f.tags] for f in FORMATS.values()]
    return short_hash([ways, [(str(grade.verdict), grade.in_format) for grade in grades]])


def check(found: str) -> None:
    said = f'raise GRADER in grpo_math/grading/version.py and set VERDICTS = "{found}"; for added cases VERDICTS alone'
    assert found == version.VERDICTS, f"the verdicts on tests/cases are others: {said}"


def test_the_verdicts_on_the_cases_are_those_of_this_version():
    check(verdicts_hash(pairs(), hostile()))
    assert version.version() == version.GRADER, "the verdicts are the same: add this Math-Verify to MATH_VERIFY"


def test_one_changed_verdict_asks_for_another_version(monkeypatch):
    some = pairs()[:40]
    plain, compare = verdicts_hash(some), batch.compare
    assert verdicts_hash(some) == plain

    def another(gold, answer, **named):
        return (Verdict.WRONG, "") if gold == some[0][0] else compare(gold, answer, **named)

    monkeypatch.setattr(batch, "compare", another)
    changed = verdicts_hash(some)
    assert changed != plain
    with pytest.raises(AssertionError, match=r"raise GRADER in grpo_math/grading/version\.py"):
        check(changed)


def test_another_answer_format_asks_for_another_version(monkeypatch):
    some = pairs()[:1]
    plain = verdicts_hash(some)
    monkeypatch.setitem(FORMATS, "gsm8k", replace(FORMATS["gsm8k"], tags=("###",)))
    assert verdicts_hash(some) != plain


def test_a_changed_comment_is_the_same_version(tmp_path):
    shutil.copytree(ROOT / "grpo_math", tmp_path / "grpo_math", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "grpo_math" / "grading").glob("*.py"):
        file.write_text(file.read_text(encoding="utf-8") + "# a comment\n", encoding="utf-8")
    program = "from grpo_math.grading import version; print(version.__file__, version.version())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(tmp_path / "grpo_math" / "grading" / "version.py"), str(version.GRADER)]


def test_a_math_verify_that_nobody_tried_is_another_grader(monkeypatch):
    version.version.cache_clear()
    monkeypatch.setattr(version.metadata, "version", lambda name: "9.9")
    assert version.version() == f"{version.GRADER} with math-verify 9.9"
    version.version.cache_clear()
