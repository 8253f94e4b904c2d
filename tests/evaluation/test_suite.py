"""`grpo-math evaluate --data a,b,c`: several data sets, each as its authors score it, and one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_math.cli import main
from grpo_math.errors import UserError
from grpo_math.evaluation import backends, suite
from grpo_math.problems.sources import SOURCES

LESS = ["--n", "2", "--max_completion_length", "4", "--batch_size", "4"]


def folder(path: Path, row: dict, split: str = "test") -> None:
    path.mkdir(parents=True)
    (path / f"{split}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with a problem each of AIME 2025 and Minerva."""
    cached = pytest.importorskip("datasets").config
    monkeypatch.setattr(cached, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("GRPO_MATH_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "data" / "aime2025", {"id": "0", "problem": "What is 3 + 4?", "answer": "7"})
    folder(tmp_path / "data" / "minerva", {"question": "What is 3 + 5?", "answer": "8"})


@pytest.mark.slow
def test_several_sets_give_one_table_and_load_the_model_once(data, tiny, capsys, monkeypatch):
    loads = []
    weights = backends.load_weights
    monkeypatch.setattr(backends, "load_weights", lambda *names: loads.append(names) or weights(*names))
    asked = ["evaluate", "--model", tiny(), "--dataset", "aime2025,generated:sums,differences,minerva", *LESS]
    assert main([*asked, "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["sets"]  # DeepSpeed says hello
    assert list(results) == ["aime2025", "generated:sums,differences", "minerva"]
    assert [of["mean@n"]["n"] for of in results.values()] == [32, 1, 1]
    assert len(loads) == 1
    kept = [json.loads(Path(of["results"]).read_text()) for of in results.values()]
    assert [(one["template"], one["temperature"]) for one in kept] == [("boxed", 0.6), ("gsm8k", 0.0), ("boxed", 0.0)]
    assert kept[2]["rows"][0]["tolerance"] == pytest.approx(8e-5)
    monkeypatch.setattr(backends.Model, "generator", None)  # all answers are there
    assert main(asked) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].split() == ["n", "mean@", "accuracy", "95%", "interval", "in", "format", "cut"]
    assert [line.split()[:3] for line in text[1:5]] == [
        *(["aime2025", "1", "32"], ["generated:sums,differences", "2", "1"], ["minerva", "1", "1"]),
        ["mean", "of", "3"],
    ]


def test_a_number_within_the_authors_tolerance_is_right():
    from grpo_math.evaluation.scoring import as_published
    from grpo_math.grading import Grade, Verdict, grade_batch

    late = Grade(Verdict.UNCHECKABLE, "2.5")
    assert as_published(late, "2.5", {"tolerance": 0.1}) == late
    rows = [{"answer": "2.5", "tolerance": 0.1}, {"answer": "2.5", "tolerance": 1e-8}, {"answer": "2.5"}]
    grades = grade_batch([row["answer"] for row in rows], [r"\boxed{2.45}"] * 3)
    assert [str(as_published(g, row["answer"], row).verdict) for g, row in zip(grades, rows, strict=True)] == [
        *("correct", "wrong", "wrong")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "gsm8k", "--suite", "math"], "--suite would be ignored by --data"),
        (["--suite", "maths"], "suite='maths' is not known: did you mean 'math'?"),
        (["--data", "gsm8k,gsm8k"], "data='gsm8k,gsm8k' names nothing, or one set twice"),
        (["--data", "gsm8k,,math500"], "names nothing, or one set twice"),
        (["--data", "generated,gsm9k"], "dataset='gsm9k' is not known: did you mean 'gsm8k'?"),
        (["--data", "gsm8k,math500", "--output", "x.json"], "output='x.json' is one file, and there are 2 data sets"),
        (["--data", "gsm8k", "--temperature", "0", "--samples", "4"], "samples=4 cannot be drawn at temperature 0"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    folder(tmp_path / "gsm8k", {"question": "What is 3 + 4?", "answer": "#### 7"})
    monkeypatch.setenv("GRPO_MATH_DATA", str(tmp_path))
    assert main(["evaluate", "--model", "embedded", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_suite_is_what_it_says_and_each_set_has_its_way():
    names = suite.sets(None, "math")
    assert [suite.asked(name, None, None, None).samples for name in names] == [1, 1, 1, 1, 32, 32, 32]
    assert suite.asked("owner/name", None, None, None) == ("gsm8k", 1, 0.0)
    assert suite.asked(SOURCES["aime2025"].hub, None, 4, None) == ("boxed", 4, 0.6)
    with pytest.raises(UserError, match="--data is missing"):
        suite.sets(None, None)
