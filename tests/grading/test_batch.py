"""Many rows at once, each with its own format, and what a grader may decide either way (`GradingPolicy`)."""

import pytest

from grpo_math.errors import ConfigError
from grpo_math.grading import GradingPolicy, Verdict, batch, grade, grade_batch


def test_an_answer_that_breaks_the_reader_is_uncheckable_and_the_rest_is_graded(monkeypatch):
    find = batch.find

    def breaks(completion, *others, **more):
        if "evil" in completion:
            raise IndexError("no such group")
        return find(completion, *others, **more)

    monkeypatch.setattr(batch, "find", breaks)
    first, second, third = grade_batch(["7"] * 3, ["#### 7", "#### evil", "#### 8"])
    assert (first.verdict, second.verdict, third.verdict) == (Verdict.CORRECT, Verdict.UNCHECKABLE, Verdict.WRONG)
    assert second.reason == "IndexError while reading the answer"


@pytest.mark.parametrize(("gold", "answer"), [("7", "7"), (r"\sqrt{12}", r"2\sqrt{3}")])  # the second needs a worker
def test_rows_of_one_gold_and_answer_are_each_held_to_their_own_format(gold, answer):
    completions = [f"#### {answer}", f"The answer is {answer}", rf"\boxed{{{answer}}}", f"#### {answer}"]
    grades = grade_batch([gold] * 4, completions, answer_format=["gsm8k", "gsm8k", "boxed", None])
    assert [(grade.verdict, grade.answer) for grade in grades] == [(Verdict.CORRECT, answer)] * 4
    assert [grade.in_format for grade in grades] == [True, False, True, True]


CASES = [
    ("25", r"\boxed{25\%}", GradingPolicy(), "correct"),
    ("25", r"\boxed{25\%}", GradingPolicy(percent_as_number=False), "wrong"),
    ("0.25", r"\boxed{25\%}", GradingPolicy(percent_as_number=False), "correct"),
    (r"\frac{1}{3}", "0.333333333333", GradingPolicy(), "correct"),
    (r"\frac{1}{3}", "0.33333333333", GradingPolicy(), "wrong"),
    (r"\frac{1}{3}", "0.333333", GradingPolicy(digits=6), "correct"),
    (r"\sqrt{2}", "1.41421", GradingPolicy(digits=6), "correct"),
    (r"\sqrt{2}", "1.41421356237309", GradingPolicy(digits=0), "wrong"),
]


@pytest.mark.parametrize(("gold", "text", "policy", "verdict"), CASES)
def test_a_rule_of_the_policy_decides(gold, text, policy, verdict):
    assert str(grade(gold, text, policy=policy)) == verdict


def test_digits_that_would_pay_a_near_answer_are_refused():
    with pytest.raises(ConfigError, match="digits=3 would pay answers that are only near: give 0, or 6 or more"):
        grade_batch(["1"], ["1"], policy=GradingPolicy(digits=3))
