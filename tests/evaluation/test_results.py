"""Evaluation: figures by hand, answers that go on where they were cut, and real answers of the real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.evaluation import backends
from grpo_math.evaluation.figures import category, summary, text_of
from grpo_math.evaluation.of_trainer import evaluate
from grpo_math.evaluation.results import answers_file
from grpo_math.evaluation.stats import wilson, wilson_of_means
from grpo_math.grading import grade_batch
from grpo_math.problems.datasets import load_problems
from grpo_math.rewards import accuracy, gsm8k
from grpo_math.run.metrics import CATEGORIES
from grpo_math.trainer.meter import shares


def record(problem: str, category: str, answer: str | None = "1") -> dict:
    right = category in ("correct", "correct_answer_bad_format")
    return {"id": problem, "category": category, "verdict": "correct" if right else "wrong", "answer": answer}


def test_figures_of_several_samples_a_problem():
    # problem a: 1 of 2 right; problem b: 2 of 2, both answering 7
    rows = [
        record("a", "correct", "7"),
        record("a", "wrong_answer", "8"),
        record("b", "correct", "7"),
        record("b", "correct", "7"),
    ]
    figures = summary(rows, samples=2)
    assert figures["n"] == 2
    assert figures["accuracy"] == 0.75
    assert figures["pass@k"] == {"1": 0.75, "2": 1.0}
    assert figures["pass@k_ci95"]["2"] == list(wilson(2, 2))
    assert figures["maj@k"] == {"1": 0.75, "2": 0.75}  # problem a is a tie: one half
    assert figures["maj@k_ci95"]["2"] == list(wilson_of_means([0.5, 1.0], 4))


def test_figures_by_subject_and_level():
    parts = [("algebra", 1), ("algebra", 2), ("geometry", 2), (None, 1)]
    rows = [
        {**record(str(i), category), "subject": subject, "level": level}
        for i, (subject, level) in enumerate(parts)
        for category in ("correct", "correct" if i == 0 else "wrong_answer")
    ]
    figures = summary(rows, samples=2)
    # Problems have 1, 1/2, 1/2, 1/2: mean 5/8, variance 1/16, error 1/8.
    assert figures["mean@n"] == {"n": 2, "mean": 0.625, "ci95": figures["ci95"]}
    assert {name: (part["n"], part["accuracy"]) for name, part in figures["by_subject"].items()} == {
        "algebra": (2, 0.75),
        "geometry": (1, 0.5),
        "none": (1, 0.5),
    }
    assert {name: (part["n"], part["accuracy"]) for name, part in figures["by_level"].items()} == {
        "1": (2, 0.75),
        "2": (2, 0.5),
    }
    assert figures["by_subject"]["geometry"]["ci95"] == list(wilson(0.5, 1))
    text = text_of({"samples": 2, "temperature": 0.7, **figures})
    assert "2 samples each at temperature 0.7" in text
    for name, label in CATEGORIES.items():
        assert (label in text) == bool(figures["categories"][name])
    assert all(label in text for label in ("algebra", "geometry", "level 1"))
    assert "pass@2              100.0%  95% interval 51.0% to 100.0%" in text
    assert "pass@1" not in text  # it is the accuracy
    assert not summary([record("a", "correct")]).keys() & {"by_subject", "by_level"}
    for samples, ks in ((6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):  # each power of two, and the number of samples
        figures = summary([record("a", "correct")] * samples, samples)
        assert [*figures["pass@k"]] == [*figures["maj@k"]] == list(map(str, ks))


TEXTS = ["3 + 4 = 7\n#### 7", "It is 7.", r"so \boxed{7}", "#### 8", "I do not know.", "7 #### 7 and on"]
GOLDS = ["7"] * len(TEXTS)


def test_the_same_completions_have_the_same_accuracy_in_training_in_its_rewards_and_in_an_evaluation():
    grades = grade_batch(GOLDS, TEXTS, answer_format="gsm8k")
    trained = shares([str(g.verdict) for g in grades], [g.in_format for g in grades], len(TEXTS))
    records = [{"category": category(g, truncated=False), "answer": g.answer} for g in grades]
    evaluated = summary(records)
    columns = {"answer": GOLDS, "answer_format": ["gsm8k"] * len(TEXTS)}
    paid = [fmean(reward(TEXTS, TEXTS, **columns)) for reward in (accuracy, gsm8k)]
    for name, share in zip(("accuracy", "accuracy_in_format"), paid, strict=True):
        assert trained[name] == pytest.approx(evaluated[name])
        assert trained[name] == pytest.approx(share)
    assert evaluated["accuracy"] > evaluated["accuracy_in_format"] > 0


@pytest.fixture(scope="module")
def rows():
    return load_problems("generated:sums", "heldout", limit=12)


# Going on where it was cut: a tiny random model, sampled, 6 problems x 4 completions in 5 batches.

SAMPLED = {"samples": 4, "temperature": 1.0, "max_new_tokens": 24, "batch_size": 5, "seed": 3, "grade_timeout": 120.0}
KILLED = """
import json, os, signal, sys
from grpo_math import evaluate
from grpo_math.evaluation import journal
model, data, output, settings = sys.argv[1:]
calls = []

def append(path, lines):
    calls.append(1)
    if len(calls) < 3:
        return plain(path, lines)
    text = "".join(json.dumps(line, ensure_ascii=False) + chr(10) for line in lines)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

plain, journal.append = journal.append, append
rows = json.loads(open(data).read())
evaluate(model, rows, output=output, progress=False, **json.loads(settings))
"""


@pytest.fixture(scope="module")
def uninterrupted(tiny, rows, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "results.json"
    return evaluate(tiny(), rows[:6], output=output, progress=False, **SAMPLED)


def same_answers(a, b):
    return json.dumps(a["rows"]) == json.dumps(b["rows"])


@pytest.mark.slow
def test_a_call_that_was_killed_while_it_wrote_goes_on_with_the_same_answers(
    tiny, rows, tmp_path, uninterrupted, monkeypatch
):
    output, data = tmp_path / "results.json", tmp_path / "rows.json"
    data.write_text(json.dumps(rows[:6]))
    killed = subprocess.run([sys.executable, "-c", KILLED, tiny(), data, output, json.dumps(SAMPLED)])
    assert killed.returncode == -signal.SIGKILL
    assert not output.exists()
    left = answers_file(output).read_text()
    assert 10 < left.count("\n") - 1 < 15, "two batches whole and a part of the third"
    assert not left.endswith("\n")
    results = evaluate(tiny(), rows[:6], output=output, progress=False, **SAMPLED)
    assert same_answers(results, uninterrupted)
    assert results["accuracy"] == uninterrupted["accuracy"]
    assert answers_file(output).read_text().startswith(left[: left.rfind("\n") + 1]), "what was there has stayed"
    with monkeypatch.context() as patched:  # a call that was finished needs no weights
        patched.setattr(backends.Model, "generator", None)
        assert same_answers(evaluate(tiny(), rows[:6], output=output, progress=False, **SAMPLED), uninterrupted)
    before = output.read_text()
    for change, words in (
        ({"seed": 0}, "seed=3, not 0"),
        ({"batch_size": 6}, "batch_size=5, not 6"),
        ({"extra": {"data": "gsm8k"}}, "data=None, not 'gsm8k'"),
    ):
        with pytest.raises(ConfigError, match=f"was measured with {words}"):
            evaluate(tiny(), rows[:6], output=output, progress=False, **SAMPLED | change)
    with pytest.raises(ConfigError, match="problems_hash="):
        evaluate(tiny(), rows[1:7], output=output, progress=False, **SAMPLED)
    assert output.read_text() == before


@pytest.mark.slow
def test_a_folder_gets_one_file_for_each_way_of_evaluating(tiny, rows, tmp_path):
    files = [
        evaluate(tiny(), rows[:1], output=tmp_path, max_new_tokens=tokens, progress=False, extra={"data": "a:b"})
        for tokens in (2, 3, 2)
    ]
    first, second, third = (Path(results["results"]) for results in files)
    assert first == third != second
    assert first.parent == tmp_path
    assert first.name.startswith("llama-a_b-")


def test_results_of_which_the_answers_are_gone_are_not_written_over(tiny, rows, tmp_path):
    (tmp_path / "before.json").write_text("mine")
    with pytest.raises(ConfigError, match="holds results without their answers"):
        evaluate(tiny(), rows[:1], output=tmp_path / "before.json", progress=False)
    assert (tmp_path / "before.json").read_text() == "mine"


@pytest.mark.slow
def test_the_command_reports_overlap_and_the_same_figures_in_json_and_file(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["evaluate", "--model", tiny(), "--data", "generated:sums", "--n", "4", "--max_new_tokens", "8"]
    assert main([*arguments, "--samples", "2", "--temperature", "1", "--contamination", "generated:sums:heldout"]) == 0
    text = capsys.readouterr().out
    assert "contamination: 4 of 4 (100.0%) problems overlap" in text
    assert "pass@2" in text
    assert main([*arguments, "--samples", "2", "--temperature", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    saved = json.loads(Path(answer["results"]).read_text())
    assert answer.keys() >= {"n", "accuracy", "ci95", "pass@k", "maj@k", "mean@n", "categories", "results"}
    assert all(saved[name] == value for name, value in answer.items() if name not in ("results", "seconds"))
    assert sum(answer["categories"].values()) == 8
    assert f"{answer['accuracy']:6.1%}" in text
    assert saved.keys() >= {"template", "prompt_hash", "problems_hash", "grader", "max_new_tokens", "temperature"}
    assert "contamination" not in saved, "it is not a setting: the second call went on with the first one's answers"


@pytest.mark.parametrize(
    ("problems", "settings", "words"),
    [
        (slice(12), {"samples": 4}, "samples=4 cannot be drawn at temperature 0"),
        (slice(0), {}, "nothing to evaluate"),
        (slice(12), {"temperature": -1}, "temperature=-1 is out of range"),
        (slice(12), {"batch_size": 0}, "batch_size=0 evaluates nothing"),
    ],
)
def test_bad_arguments_are_one_line(problems, settings, words, smollm, rows):
    with pytest.raises(ConfigError, match=words):
        evaluate(smollm, rows[problems], **settings)


def test_a_prompt_that_is_longer_than_the_context_is_refused_before_the_first_answer(smollm, rows):
    long = {**rows[0], "id": "long", "prompt": "7 + " * 5000}
    with pytest.raises(ConfigError, match=r"max_position_embeddings=8192, and the longest prompt 15000 tokens: leave"):
        evaluate(smollm, [*rows, long])
