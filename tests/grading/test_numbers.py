"""Property tests: a number equals itself in every spelling, and never a different one. Exact numbers are bounded by
their size: the calling process leaves what is larger to a worker."""

from decimal import Decimal
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_math.grading import Verdict, grade
from grpo_math.grading.equal.clean import clean
from grpo_math.grading.equal.compare import QUICK_CHARACTERS, compare, value
from grpo_math.grading.equal.exact import rational
from grpo_math.grading.equal.expression import parse
from grpo_math.grading.equal.numeric import NUMERIC

rationals = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=1_000)
decimals = st.builds(lambda n, places: Decimal(n).scaleb(-places), st.integers(-(10**6), 10**6), st.integers(0, 6))


def latex(p: int, q: int, command: str) -> str:
    return f"\\{command}{{{p}}}{{{q}}}"


def fraction_spellings(q: Fraction) -> list[str]:
    n, d = q.numerator, q.denominator
    spelled = [f"{n}/{d}", f"{3 * n}/{3 * d}", latex(n, d, "frac"), latex(n, d, "dfrac"), latex(n, d, "tfrac")]
    spelled += [f"${latex(n, d, 'frac')}$", f"-{latex(-n, d, 'frac')}" if n < 0 else latex(n, d, "cfrac")]
    if 0 < n < 10 and d < 10:
        spelled.append(f"\\frac{n}{d}")
    whole, others = divmod(abs(n), d)
    if whole and others:
        sign = "-" if n < 0 else ""
        spelled += [f"{sign}{whole} {others}/{d}", f"{sign}{whole}\\frac{{{others}}}{{{d}}}"]
    return spelled


def decimal_spellings(d: Decimal) -> list[str]:
    text = f"{d.normalize():f}"
    spelled = [text, f"{text}0" if "." in text else f"{text}.0", f"\\${text}", text.replace("-", "−"), f"{text} cm"]
    spelled += [f"{(d * 100).normalize():f}%", *([text[1:]] if text.startswith("0.") else [])]
    if "." not in text:
        spelled += [f"{int(d):,}", f"{int(d):,}".replace(",", "{,}"), f"{int(d):,}".replace(",", "\\,")]
    return spelled


@pytest.mark.full
@given(rationals, rationals, st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_rational_equals_itself_in_every_spelling_and_never_a_different_one(p, q, same):
    for one, two in product(fraction_spellings(p), fraction_spellings(p if same else q)):
        verdict = Verdict.CORRECT if same or p == q else Verdict.WRONG
        assert compare(one, two)[0] is grade(one, f"\\boxed{{{two}}}") is verdict, (one, two)


@given(decimals)
@settings(max_examples=300, deadline=None)
def test_a_decimal_equals_its_fraction_and_itself_in_every_spelling(d):
    for one, two in product(decimal_spellings(d), [*decimal_spellings(d), "{}/{}".format(*d.as_integer_ratio())]):
        units = {unit for unit in ("$", "cm", "%") if unit in one + two}
        verdict = Verdict.WRONG if len(units) > 1 else Verdict.CORRECT
        assert compare(one, two)[0] is compare(two, one)[0] is verdict, (one, two)


@given(decimals, st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_difference_far_below_float_precision_is_seen(d, places):
    other = Fraction(d) + Fraction(1, 10 ** (6 + places))
    assert compare(str(Fraction(d)), str(other))[0] is compare(f"{d:f}", str(other))[0] is Verdict.WRONG


@given(st.integers(0, 10**9), st.integers(1, 99))
@settings(max_examples=200, deadline=None)
def test_a_percentage_is_its_hundredth_and_its_bare_number_and_nothing_else(n, other):
    assert compare(f"{n}%", str(n))[0] is Verdict.CORRECT
    assert compare(f"{n}%", f"{n}/100")[0] is Verdict.CORRECT
    hundredth = f"{n // 100}.{n % 100:02}"
    assert compare(f"{n}%", hundredth)[0] is compare(hundredth, f"{n}%")[0] is Verdict.CORRECT
    assert n == 0 or compare(f"{n}%", f"{n}00")[0] is compare(f"{n}00", f"{n}%")[0] is Verdict.WRONG
    assume(n and Fraction(other, 7) not in (1, Fraction(1, 100)))
    assert compare(f"{n}%", f"{n * other}/7")[0] is Verdict.WRONG


latexish = st.lists(
    st.sampled_from(
        [*"0123456789xyi+-*/^_(){}[]|,.!%= ", "\\frac", "\\sqrt", "\\pi", "\\pm", "\\text{", "\\{", "\\}", "\\le"]
    ),
    max_size=14,
).map("".join)


@given(latexish)
@settings(max_examples=600, deadline=None)
def test_any_text_is_correct_against_itself(text):
    assume(clean(text))
    assert compare(text, f" {text} ")[0] is Verdict.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1" + "0" * 30, "1" + "0" * 29 + "1"),
        ("0.1", "0.1" + "0" * 20 + "1"),
        ("0.1%", "0.001" + "0" * 20 + "1"),
        ("9" * 300, "9" * 299 + "8"),
    ],
)
def test_numbers_that_floats_cannot_tell_apart_are_different(gold, answer):
    assert compare(gold, answer)[0] is Verdict.WRONG


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"0.\overline{142857}", Fraction(1, 7)),
        (r"\sqrt{\frac{49}{81}}", Fraction(7, 9)),
        (r"2^{-3}", Fraction(1, 8)),
        ("-2^2", -4),
        (r"3\frac{1}{4}\text{ cups}", Fraction(13, 4)),
        ("1.5 million", 1_500_000),
        ("25%", Fraction(1, 4)),
        ("-25%", Fraction(-1, 4)),
        ("-3.5", Fraction(-7, 2)),
        ("x", None),
        ("1, 2", None),
    ],
)
def test_worked_values(text, number):
    assert value(text) == number


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("2^{1500}", "2^{6000}"),
        ("1/2", "1/0"),
        ("2^{2000} * 3^{1000}", "2^{4000} * 3^{2000}"),
        ("2^{2000} / 3^{1000}", "2^{2000} / 3^{1500}"),
        ("2^{2000} + 3^{1000}", "2^{4000} + 1/3^{1000}"),
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
