"""Many rows at once: one that cannot be read costs no other, and each is held to its own format."""

from __future__ import annotations

from grpo_math.grading import Verdict, batch, grade_batch

ROOTS = r"2\sqrt{3}"  # only a worker can tell that this is the root of 12


def test_an_answer_that_breaks_the_reader_is_a_crash_and_the_rest_is_graded(monkeypatch):
    extract = batch.extract

    def breaks(completion, *rest, **more):
        if "evil" in completion:
            raise IndexError("no such group")
        return extract(completion, *rest, **more)

    monkeypatch.setattr(batch, "extract", breaks)
    first, second, third = grade_batch(["7"] * 3, ["#### 7", "#### evil", "#### 8"])
    assert (first.verdict, second.verdict, third.verdict) == (Verdict.CORRECT, Verdict.CRASH, Verdict.WRONG)
    assert second.reason == "IndexError while reading the answer"


def test_rows_of_one_gold_and_answer_are_each_held_to_their_own_format():
    completions = [f"#### {ROOTS}", f"The answer is {ROOTS}", rf"\boxed{{{ROOTS}}}"]
    grades = grade_batch([r"\sqrt{12}"] * 3, completions, answer_format=["gsm8k", "gsm8k", "boxed"])
    assert [grade.verdict for grade in grades] == [Verdict.CORRECT] * 3
    assert [grade.in_format for grade in grades] == [True, False, True]


def test_an_answer_is_wrong_only_where_no_way_to_compare_it_is_left_to_a_worker():
    gold = r"The sides are \boxed{\sqrt{12}} and \boxed{1}."  # 1, or both
    (grade,) = grade_batch([gold], [rf"\boxed{{{ROOTS}, 1}}"])
    assert grade.verdict is Verdict.CORRECT
