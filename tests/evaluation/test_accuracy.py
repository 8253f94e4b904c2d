"""One meaning of accuracy: training, its rewards, an evaluation and a report call the same completions the same."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from grpo_math.evaluation.compare import comparison, read_results
from grpo_math.evaluation.figures import category, summary
from grpo_math.grading import grade_batch
from grpo_math.report.run_dir import read_run
from grpo_math.rewards import accuracy, gsm8k

RUN_OF_0_1 = Path(__file__).parents[1] / "cases/run_of_0_1/finished"
TEXTS = ["3 + 4 = 7\n#### 7", "It is 7.", r"so \boxed{7}", "#### 8", "I do not know.", "7 #### 7 and on"]
GOLDS = ["7"] * len(TEXTS)


def test_the_same_completions_have_the_same_accuracy_in_training_in_its_rewards_and_in_an_evaluation():
    from grpo_math.trainer.meter import shares

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


def test_results_and_histories_of_an_earlier_version_are_read_under_the_names_of_now(tmp_path):
    written = json.loads((RUN_OF_0_1 / "after.json").read_text())
    written["rows"][0]["category"], written["accuracy"], written["answer_accuracy"] = (
        "correct_answer_bad_format",
        0,
        0.25,
    )
    (tmp_path / "after.json").write_text(json.dumps(written))
    now = read_results(tmp_path / "after.json")
    assert (now["accuracy"], now["accuracy_in_format"]) == (1 / len(now["rows"]), 0.0)
    assert "answer_accuracy" not in now
    line = {"step": 5, "accuracy": 0.5, "heldout/accuracy": 0.25, "heldout/n": 4}
    (tmp_path / "history.jsonl").write_text(json.dumps(line) + "\n")
    assert read_run(tmp_path).history == [
        {"step": 5, "accuracy": 0.5, "heldout/accuracy_in_format": 0.25, "heldout/n": 4}
    ]


def test_a_comparison_has_both_with_their_differences():
    rows = [{"id": str(i), "problem": "p", "gold": "7", "completion": "7", "category": "bad_format"} for i in range(4)]
    before = {"rows": [{**row, "category": "correct"} if row["id"] == "0" else row for row in rows]}
    after = {"rows": [{**row, "category": "correct_answer_bad_format"} for row in rows]}
    found = comparison(before, after)
    assert (found["difference"], found["difference_in_format"]) == (0.75, -0.25)
    assert (found["before"]["accuracy"], found["before"]["accuracy_in_format"]) == (0.25, 0.25)
    assert (found["after"]["accuracy"], found["after"]["accuracy_in_format"]) == (1.0, 0.0)
