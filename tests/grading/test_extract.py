"""Where the answer of a completion stands: one row, one rule."""

import time

import pytest

from grpo_math.grading import Verdict, grade, grade_batch
from grpo_math.grading.extract import extract, extract_gold, strip_wrappers


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3}, hence \boxed{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"\fbox{42}", "42"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{42} or \boxed{}", "42"),
        (r"\boxed{}", None),
        (r"\boxed{42", "42"),
        (r"\boxed 42", "42"),
        ("#### 42", "42"),
        ("#### 1\n#### 42", "42"),
        ("#### Step 3\nso 42", "42"),
        (r"#### Step 3: \boxed{42}", "42"),
        ("<answer>42</answer>", "42"),
        (r"<answer>so \boxed{42}</answer>", "42"),
        ("<answer>1</answer> <answer>42</answer>", "42"),
        ("<answer></answer>", None),
        ("<think>42</think>", None),
        (r"<think>\boxed{41}</think> \boxed{42}", "42"),
        (r"<think>\boxed{42}", None),
        ("The answer is 42.", "42"),
        ("The answer is $42$ because 6 * 7 = 42.", "42"),
        ("The answer is 41. No, the answer is 42", "42"),
        ("**Final Answer:** 42", "42"),
        ("The answer is:\n$$42$$", "42"),
        (r"\boxed{41}. Final Answer: The final answer is $42$. I hope it is correct.", "42"),
        ("The correct option is (B).", "(B)"),
        ("There are 42 apples in 3 bags: 42", "42"),
        ("She ate 8 of 50, so 42 remain.", "42"),
        (r"Thus $x = \frac{3}{4}$.", r"x = \frac{3}{4}"),
        ("x = 5", "x = 5"),
        ("", None),
        ("I do not know.", None),
        ("It is not 42.", None),
        (r"\boxed{42} or 43}", "42} or 43"),
        (r"\boxed{42}}.", "42"),
        (r"\textbf{So \boxed{42} it is}", "42"),
        (r"\boxed{E\text{ (no)} \fbox{e} only \fbox{e}}", r"E\text{ (no)} \fbox{e} only \fbox{e}"),
        (r"\boxed{=}", None),
        ("She makes 9 * 2 = $18 a day.", "$18"),
        ("So the sum is 5 = 6 = 42 again.", "5 = 6 = 42"),
        ("The area is 36\\pi.", "36\\pi"),
        (r"We get \color{red}{ up to }42 of them.", None),
        (r"Of \mathcal{S} and its members we count 42 of them.", None),
        ("x = a+b\nanything but a+b", "anything but a+b"),
        ("3 * 14 = 42\nThat's not hard.", "3 * 14 = 42"),
        (r"The length is 3\sqrt{2}.", r"3\sqrt{2}"),
        ("The roots are 2 and 3.", "2 and 3"),
        ("Half of the length is (1, 2).", None),
        ("So B is correct.", "B"),
        ("2x = 84, so x = 42", "x = 42"),
        ("40 + 1 = 41\n41 + 1 = 42", "41 + 1 = 42"),
        ("x = 41\nx = 42", "x = 41\nx = 42"),
        ("He makes 6 * 7 = <<6*7=42>>42 dollars in 5 days.", "42 dollars"),
        ("Bert paid 6 * 7 = 42 more than Tom.", "42"),
        ("The number who did not come is 50 - 8 = 42.", "42"),
        ("####\n42", "42"),
    ],
)
def test_the_answer_is_found_without_a_named_format(completion, text):
    assert extract(completion).text == text


@pytest.mark.parametrize(
    ("answer_format", "text"),
    [("gsm8k", "1"), ("direct", "1"), ("boxed", "2"), ("r1_zero", "3"), ("xml", "3"), (None, "3")],
)
def test_the_marker_of_the_named_format_comes_first(answer_format, text):
    assert extract("\\boxed{2}\n#### 1\n<answer>3</answer>", answer_format).text == text


def test_a_missing_marker_falls_back_to_any_form_and_in_format_says_so():
    [g] = grade_batch(["7"], [r"so \boxed{7}"], answer_format="gsm8k")
    assert (g.verdict, g.in_format) == (Verdict.CORRECT, False)
    [g] = grade_batch(["7"], ["so\n#### 7"], answer_format="gsm8k")
    assert (g.verdict, g.in_format) == (Verdict.CORRECT, True)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("72", "72"),
        ("48 + 24 = 72\n#### 72", "72"),
        (r"so $x=\boxed{\frac{3}{4}}$.", r"\frac{3}{4}"),
        (" $x=5$ ", "x=5"),
        ("", None),
        (r"\boxed{}", None),
        ("   ", None),
    ],
)
def test_a_gold_is_a_bare_answer_or_a_solution_that_marks_one(gold, text):
    assert extract_gold(gold).text == text


def test_an_answer_in_several_boxes_counts_where_the_gold_has_several_parts():
    assert grade("2, 3", r"\boxed{2} and \boxed{3}") is Verdict.CORRECT
    assert grade("3", r"\boxed{2} and \boxed{3}") is Verdict.WRONG  # several answers to a question with one
    assert grade("2, 3", r"\boxed{2}. Later we see that \boxed{3}") is Verdict.WRONG
    assert grade(r"\boxed{2} and \boxed{3}", "3, 2") is Verdict.CORRECT
    assert grade(r"\boxed{2} and \boxed{\sqrt{12}}", r"2\sqrt{3}") is Verdict.CORRECT  # the worker sees the last box


def test_a_gold_may_be_a_number_or_missing():
    assert [str(g.verdict) for g in grade_batch([72, None, 0.5], ["#### 72", "#### 72", r"\frac12"])] == [
        *("correct", "bad_gold", "correct")
    ]


def test_wrappers_go_and_values_stay():
    assert [strip_wrappers(t) for t in ("$$x$$", "**7**", r"\(x\)", "7.", '"7"', "$5$ and $6$")] == [
        *("x", "7", "x", "7", "7", "$5$ and $6$")
    ]


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>" * 14_000,
        "\\boxed{" * 14_000,
        "The answer is 5" + " " * 100_000 + "x",
        "#### step" + " " * 100_000 + "$",
        "1," * 50_000,
        "answer (" * 12_000,
        "\\(" * 50_000,
        "**a" * 30_000,
        "not 1 " * 16_000,
        "final answer is " * 6_000 + "\\boxed{1",
        "2x = 10" + " " * 9_900 + "so x = 5",
        "x = 5" + "\n" * 9_900 + "x = 6",
        "x = " + "1+" * 4_900 + "a\nx = 5",
        "a is " * 60 + "5",
        "= <<" * 2_400 + "5",
    ],
)
def test_extraction_stays_quick_on_a_hostile_completion(completion):
    for answer_format in (None, "gsm8k", "boxed", "r1_zero"):
        started = time.perf_counter()
        extract(completion, answer_format)
        assert time.perf_counter() - started < 5  # a quadratic pattern takes a minute
