"""Kept answers graded anew: what changes, what stays, what is refused, and the line that a comparison gives."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_math.cli import main
from grpo_math.evaluation.compare import read_results
from grpo_math.evaluation.regrade import regraded_file
from grpo_math.grading import version

RUN_OF_0_1 = Path(__file__).parents[1] / "cases/run_of_0_1/finished"


@pytest.fixture
def grader(monkeypatch):
    """The grader is of this version, and its verdicts are what they are."""
    monkeypatch.setattr(version, "version", lambda: 7)
    return 7


def kept(path, *answers: tuple[str, str], samples: int = 1, **changes):
    """Results of two-digit problems, each answer with the category that an earlier grader gave it."""
    rows = [
        {
            "id": f"p{i // samples}", "sample": i % samples, "problem": "What is 3 + 4?", "gold": "7", "level": 1,
            "completion": completion, "verdict": "correct" if category == "correct" else "wrong", "answer": "?",
            "in_format": True, "category": category, "tokens": 3, "truncated": category == "truncated",
        }
        for i, (completion, category) in enumerate(answers)
    ]  # fmt: skip
    settings = {"template": "gsm8k", "prompt_hash": "ab", "grader_hash": 2, "max_new_tokens": 8, "samples": samples}
    content = {"schema": 1, **settings, "temperature": 1.0, "versions": {"torch": "2"}, "rows": rows} | changes
    path.write_text(json.dumps(content))
    return path


def test_only_what_the_grader_says_changes_and_the_old_file_stays(grader, tmp_path, capsys):
    old = kept(
        tmp_path / "base.json",
        ("#### 7", "correct"), ("#### 7 or 8", "correct"), ("It is 7.", "wrong_answer"), ("3 + 4 is", "truncated"),
    )  # fmt: skip
    before, written = json.loads(old.read_text()), old.read_bytes()
    assert main(["evaluate", "--regrade", str(old), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert old.read_bytes() == written
    assert answer["results"] == str(tmp_path / "base.grader-7.json")
    after = json.loads(Path(answer["results"]).read_text())
    categories = [row["category"] for row in after["rows"]]
    assert categories == ["correct", "wrong_answer", "correct_answer_bad_format", "truncated"]
    assert after["accuracy"] == 0.5
    assert after["accuracy_in_format"] == 0.25
    assert after["by_level"] == {"1": {"n": 4, "accuracy": 0.5, "ci95": after["ci95"]}}
    changed = {"correct -> wrong": 1, "wrong -> correct": 1}
    assert after["regraded"] == {"from": "base.json", "grader_hash": 2, "changed": changed}
    assert after["grader_hash"] == grader
    assert after["versions"].keys() == {"torch", "math-verify"}
    said = {"verdict", "answer", "in_format", "category"}
    for was, now in zip(before["rows"], after["rows"], strict=True):
        assert {key: was[key] for key in was.keys() - said} == {key: now[key] for key in now.keys() - said}
    settings = ("schema", "template", "prompt_hash", "max_new_tokens", "samples", "temperature")
    assert {key: before[key] for key in settings} == {key: after[key] for key in settings}


def test_several_samples_are_counted_by_problem(grader, tmp_path, capsys):
    answers = [("#### 7", "correct"), ("#### 8", "correct"), ("#### 9", "wrong_answer"), ("#### 9", "wrong_answer")]
    old = kept(tmp_path / "base.json", *answers, samples=2)
    assert main(["evaluate", "--regrade", str(old)]) == 0
    out = capsys.readouterr().out
    assert "pass@k              1: 25.0%  2: 50.0%" in out
    assert "grader    7, was 2; 1 of 4 verdicts changed: correct -> wrong 1\n" in out
    assert out.endswith(f"results   {tmp_path / 'base.grader-7.json'}\n")


def test_a_comparison_of_two_graders_names_the_lines_that_make_them_one(grader, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "the runs"
    folder.mkdir()
    for name in ("before", "after"):
        shutil.copy(RUN_OF_0_1 / f"{name}.json", folder)
    newer = json.loads((folder / "after.json").read_text()) | {"grader_hash": 2}
    (folder / "after.json").write_text(json.dumps(newer))
    assert main(["evaluate", "--compare", str(folder / "before.json"), str(folder / "after.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: grader_hash differs (before 1, after 2): the verdicts of two graders may differ")
    assert error.count("\n") == 1
    for line in error.partition("what that writes: ")[2].split(" && "):
        program, *arguments = shlex.split(line)
        assert program == "grpo-math"
        assert main(arguments) == 0
    capsys.readouterr()
    regraded = [folder / f"{name}.grader-7.json" for name in ("before", "after")]
    assert main(["evaluate", "--compare", *map(str, regraded)]) == 0
    for name, path in zip(("before", "after"), regraded, strict=True):
        was, now = read_results(RUN_OF_0_1 / f"{name}.json"), read_results(path)
        assert [row["completion"] for row in was["rows"]] == [row["completion"] for row in now["rows"]]
        assert now["n"] == was["n"]


def test_only_the_older_of_two_is_named(grader, tmp_path, capsys):
    new = kept(tmp_path / "new.json", ("#### 7", "correct"), grader_hash=7)
    old = kept(tmp_path / "old.json", ("#### 7", "correct"))
    assert main(["evaluate", "--compare", str(old), str(new)]) == 2
    assert capsys.readouterr().err.endswith(f": grpo-math evaluate --regrade {old}\n")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"grader_hash": 7}, "was graded by this grader, 7: compare it as it is"),
        ({"samples": 2}, "rows are not 2 for each problem in turn"),
        ({"schema": 2}, "is not a results file of schema 1"),
        ({"template": "gsm9k"}, "did you mean 'gsm8k'"),
        ({"rows": [{"id": "p", "completion": "#### 7", "category": "correct"}]}, "row 1 has no gold"),
    ],
)
def test_what_cannot_be_graded_anew_is_refused_in_one_line(grader, changes, says, tmp_path, capsys):
    path = kept(tmp_path / "base.json", ("#### 7", "correct"), **changes)
    assert main(["evaluate", "--regrade", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_overwritten_and_no_option_is_ignored(grader, tmp_path, capsys):
    path = kept(tmp_path / "base.json", ("#### 7", "correct"))
    there = tmp_path / "base.grader-7.json"
    there.write_text("mine")
    assert main(["evaluate", "--regrade", str(path)]) == 2
    assert f"has been graded by this grader: {there} is there" in capsys.readouterr().err
    assert there.read_text() == "mine"
    assert main(["evaluate", "--regrade", str(path), "--n", "4"]) == 2
    assert "--n would be ignored by --regrade: leave it out" in capsys.readouterr().err


def test_it_asks_no_model(tmp_path):
    """Nor does it import torch: `tests/test_layers.py` holds the module's imports, and here the command's are held."""
    path = kept(tmp_path / "base.json", ("#### 7", "correct"))
    program = (
        "import sys; from grpo_math.cli import main\n"
        f"code = main(['evaluate', '--regrade', {str(path)!r}])\n"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert '"verdict": "correct"' in regraded_file(path, version.version()).read_text()
