"""Exact numbers are bounded by their size: the calling process leaves what is larger to a worker."""

import pytest

from grpo_math.grading import Verdict, grade_batch
from grpo_math.grading.equal.compare import QUICK_CHARACTERS, compare, value
from grpo_math.grading.equal.exact import rational
from grpo_math.grading.equal.expression import parse
from grpo_math.grading.equal.numeric import NUMERIC
from grpo_math.rewards import REWARDS

ROOT = r"\sqrt[3]{10^{14000}}"


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("2^{1500}", "2^{6000}"),
        ("2^{2000} * 3^{1000}", "2^{4000} * 3^{2000}"),
        ("2^{2000} / 3^{1000}", "2^{4000} / 3^{2000}"),
        (r"\sqrt{4^{1300}}", r"\sqrt{4^{2600}}"),
    ],
)
def test_a_number_is_computed_up_to_a_number_of_bits(small, large):
    assert rational(parse(small)) is not None
    assert rational(parse(large)) is None


def test_a_worker_computes_what_the_calling_process_leaves():
    for gold, answer in (("2^{20000}", "4^{10000}"), ("2000!", "2000 * 1999!"), ("1", "2^{9000} - 2^{9000} + 1")):
        assert compare(gold, answer) == (None, "")
        assert compare(gold, answer, NUMERIC)[0] is Verdict.CORRECT


def test_a_long_text_is_left_to_a_worker_and_a_very_long_one_is_uncheckable():
    long = "1+" * (QUICK_CHARACTERS // 2) + "1"
    assert compare("201", long) == compare(long, "201") == (None, "long")
    assert compare("201", long, NUMERIC)[0] is Verdict.CORRECT
    assert compare("1501", "1+" * 1500 + "1")[0] is Verdict.UNCHECKABLE
    assert compare("42", "\ufdfa" * 1900, NUMERIC)[0] is Verdict.UNCHECKABLE  # one character stands for eighteen


def test_a_long_list_that_is_not_all_numbers_is_left_to_a_worker():
    gold, answer = (", ".join(rf"\sqrt{{{n}}}" for n in range(2, 17)[::step]) for step in (1, -1))
    assert compare(gold, answer)[0] is None
    assert compare(gold, answer, NUMERIC)[0] is Verdict.CORRECT


def test_partial_credit_is_given_under_the_same_bound():
    many = rf"\boxed{{{'+'.join([ROOT] * 15)}}}"
    assert value("+".join([ROOT] * 15)) is None
    for name in ("proximity", "number_match", "integer_only"):
        [grade] = grade_batch(["42"], [many])
        assert REWARDS[name]([""], [many], answer=["42"], grade=[grade]) == [0.0]
