"""Many rows at once, also of a file, each with its own format; what a `GradingPolicy` may decide either way."""

import json
from unittest.mock import Mock

import pytest

from grpo_math.errors import ConfigError, DataError
from grpo_math.grading import GradingPolicy, Verdict, grade, grade_batch, grader
from grpo_math.grading.file import grade_file
from grpo_math.grading.where import find


def test_an_answer_that_breaks_the_reader_is_uncheckable_and_the_rest_is_graded(monkeypatch):
    monkeypatch.setattr(grader, "find", Mock(side_effect=[find("#### 7"), AssertionError, find("#### 8")]))
    first, second, third = grade_batch(["7"] * 3, ["#### 7", "#### evil", "#### 8"])
    assert (first.verdict, second.verdict, third.verdict) == (Verdict.CORRECT, Verdict.UNCHECKABLE, Verdict.WRONG)
    assert second.reason == "AssertionError while reading the answer"


@pytest.mark.parametrize(("gold", "answer"), [("7", "7"), (r"\sqrt{12}", r"2\sqrt{3}")])  # the second needs a worker
def test_rows_of_one_gold_and_answer_are_each_held_to_their_own_format(gold, answer):
    completions = [f"#### {answer}", f"The answer is {answer}", rf"\boxed{{{answer}}}", f"#### {answer}"]
    grades = grade_batch([gold] * 4, completions, answer_format=["gsm8k", "gsm8k", "boxed", None])
    assert [(grade.verdict, grade.answer) for grade in grades] == [(Verdict.CORRECT, answer)] * 4
    assert [grade.in_format for grade in grades] == [True, False, True, True]


@pytest.mark.parametrize(
    ("gold", "text", "policy", "verdict"),
    [
        ("25", r"\boxed{25\%}", GradingPolicy(), "correct"),
        ("25", r"\boxed{25\%}", GradingPolicy(percent_as_number=False), "wrong"),
        ("0.25", r"\boxed{25\%}", GradingPolicy(percent_as_number=False), "correct"),
        (r"\frac{1}{3}", "0.333333333333", GradingPolicy(), "correct"),
        (r"\frac{1}{3}", "0.33333333333", GradingPolicy(), "wrong"),
        (r"\frac{1}{3}", "0.333333", GradingPolicy(digits=6), "correct"),
        (r"\sqrt{2}", "1.41421", GradingPolicy(digits=6), "correct"),
        (r"\sqrt{2}", "1.41421356237309", GradingPolicy(digits=0), "wrong"),
        ("85.71", "600/7", GradingPolicy(), "wrong"),
        ("85.71", "600/7", GradingPolicy(rounded_golds=True), "correct"),
        ("1.41", r"\sqrt{2}", GradingPolicy(rounded_golds=True), "correct"),
        ("85.71", "85.714", GradingPolicy(rounded_golds=True), "wrong"),
        ("0.01", "1/67", GradingPolicy(rounded_golds=True), "wrong"),
        ("0.25", "249/1000", GradingPolicy(rounded_golds=True), "wrong"),
    ],
)
def test_a_rule_of_the_policy_decides(gold, text, policy, verdict):
    assert str(grade(gold, text, policy=policy)) == verdict


def test_digits_that_would_pay_a_near_answer_are_refused():
    with pytest.raises(ConfigError, match="digits=3 would reward answers that are only near: give 0, or 6 or more"):
        grade_batch(["1"], ["1"], policy=GradingPolicy(digits=3))


def write(tmp_path, *lines):
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_results_of_a_file_keep_the_row_order_and_verdicts_are_counted_and_a_row_can_name_its_own_format(tmp_path):
    rows = [{"gold": "7", "prediction": p} for p in ("#### 7", "#### 8", "")] + [{"gold": "", "prediction": "7"}]
    rows += [
        {"gold": 7, "prediction": None},
        {"gold": "1", "prediction": "<answer>1</answer>\n#### 2", "format": "xml"},
        {"gold": "2", "prediction": "#### 2\n<answer>1</answer>", "format": None},
    ]
    results = json.loads(json.dumps(grade_file(write(tmp_path, *rows), answer_format="gsm8k")))
    assert [(r["verdict"], r["answer"]) for r in results["results"]] == [
        *(("correct", "7"), ("wrong", "8"), ("no_answer", None), ("bad_gold", None), ("no_answer", None)),
        *(("correct", "1"), ("correct", "2")),
    ]
    counts = {"correct": 3, "wrong": 1, "no_answer": 2, "unparseable": 0, "uncheckable": 0, "bad_gold": 1, "crash": 0}
    assert (results["rows"], results["verdicts"]) == (7, counts)
    assert all(r["seconds"] >= 0 for r in results["results"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"gold": "1"}', ":2: prediction is missing"),
        ('{"prediction": "1"}', ":2: gold is missing"),
        ("not json", ":2: row cannot be read"),
        ("[1]", ":2: gold is missing"),
        ('{"gold": "1", "prediction": "1", "format": "latex"}', ":2: format is 'latex'"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_field(tmp_path, line, message):
    with pytest.raises(DataError, match="answers.jsonl" + message):
        grade_file(write(tmp_path, {"gold": "1", "prediction": "1"}, line))
