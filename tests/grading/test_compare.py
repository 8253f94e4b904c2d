"""Two answers are compared by their structure, and leaves exactly. OPEN: only a worker can decide."""

from decimal import Decimal
from fractions import Fraction
from itertools import product
from pathlib import Path
from string import ascii_letters

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_math.grading import Verdict, grade, grade_batch
from grpo_math.grading.equal import exact, units
from grpo_math.grading.equal.clean import FORMS as NORMAL_FORMS
from grpo_math.grading.equal.clean import SPELLINGS, clean
from grpo_math.grading.equal.compare import QUICK_CHARACTERS, compare
from grpo_math.grading.equal.expression import TooLarge, Unreadable, parse
from grpo_math.grading.equal.numeric import NUMERIC
from grpo_math.grading.equal.tree import UNDECIDED
from grpo_math.grading.judge import judge

RIGHT, WRONG, OPEN = Verdict.CORRECT, Verdict.WRONG, UNDECIDED
ROOTS = [rf"\sqrt{{{n}}}" for n in range(2, 17)]
# Lines of "same" or "other", a gold answer, and an answer with the same or another value.
FORMS = Path(__file__).parents[1] / "cases" / "grading_forms.tsv"


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        # lists and sets without order, tuples with it
        ("1, 2", "2, 1", RIGHT),
        ("x = 5", "2x = 10", WRONG),
        ("x = 5", "5 = x", RIGHT),
        # an equation as the gold answer stands for its value
        ("a + b = 6", "6", RIGHT),
        ("6", "a + b = 6", RIGHT),
        ("a + b = 6", "7", WRONG),
        ("6", "5 = 6", WRONG),
        (r"\{1, 2\}", "2 and 1", RIGHT),
        ("1, 2", "1, 2, 3", WRONG),
        ("(1, 2)", "(2, 1)", WRONG),
        ("(1, 2)", "x = 1, y = 2", RIGHT),
        ("n = 2, 3", "2, 3", RIGHT),
        ("1,234", "1234", RIGHT),
        ("100,200", "100, 200", RIGHT),
        # plus and minus
        (r"\pm 3", "3, -3", RIGHT),
        (r"\pm 3", "3", WRONG),
        ("3", r"\pm 3", WRONG),
        # intervals
        ("[1, 2)", "[1, 2]", WRONG),
        ("[1, 2)", r"1 \le x < 2", RIGHT),
        (r"(-\infty, 3)", "x < 3", RIGHT),
        ("x > 3", "3 < x", RIGHT),
        ("(1, 5]", "]1; 5]", RIGHT),
        ("[1, 5)", "[1; 5[", RIGHT),
        ("[1, 5)", "]1; 5]", WRONG),
        (r"(-\infty, 2) \cup (3, \infty)", r"]-\infty; 2[ \cup ]3; +\infty[", RIGHT),
        # alternatives are right if each of them is
        ("0.5", "1/2 or 50%", RIGHT),
        ("0.5", "1/2 or 5", WRONG),
        ("1, 2", "1 or 2", RIGHT),
        ("x > 3", r"x \ge 3", WRONG),
        (r"x < 0 \text{ or } x > 1", r"(-\infty, 0) \cup (1, \infty)", RIGHT),
        (r"(0, 1) \cup (2, 3)", "5", WRONG),
        (r"(0, 1) \cup (2, 3)", r"(1, 0) \cup (2, 3)", WRONG),
        # assignments and labels
        ("x = 5", "5", RIGHT),
        ("5", "x = 5", RIGHT),
        ("2", "2 = y", RIGHT),
        ("x = 5", "y = 5", WRONG),
        ("64", r"\text{Area} = 64", RIGHT),
        ("7", "3 + 4 = 7", RIGHT),
        ("AB = 4", "4", RIGHT),
        ("7 = 11a + c", "11a + c", WRONG),
        # units
        ("5 cm", "5 m", WRONG),
        ("5 cm", "5", RIGHT),
        ("5", r"5\text{ apples}", RIGHT),
        ("5", "5x", WRONG),
        ("2.5", "2{,}5", RIGHT),
        ("2500", "2{,}500", RIGHT),
        ("12", "12 €", RIGHT),
        ("12 km", "12千米", RIGHT),
        ("12 km", "12米", WRONG),
        ("5 ft", "5 Ft", RIGHT),
        ("12", "12 с половиной", Verdict.UNPARSEABLE),
        ("12", "12億", WRONG),
        ("12", "12 oder mehr", Verdict.UNPARSEABLE),
        ("12", "12 au total", RIGHT),
        ("x_1 = 2, x_2 = 3", "x₁=2, x₂=3", RIGHT),
        # ratios, times, bases
        ("3:4", "4:3", WRONG),
        ("3:4", "3 to 4", RIGHT),
        ("12:00", "1:00", OPEN),
        ("8:34 pm", "8:34 p.m.", RIGHT),
        ("8:34 am", "8:34 pm", WRONG),
        ("12 noon", "12 midnight", Verdict.UNPARSEABLE),
        ("52_8", "52_9", WRONG),
        ("52_8", "52_{8}", RIGHT),
        # choices
        ("B", "(B) 12", RIGHT),
        ("(B) 12", "12", RIGHT),
        ("(B) 12", "(C) 12", WRONG),
        # numbers that floats cannot tell apart
        ("1" + "0" * 30, "1" + "0" * 29 + "1", WRONG),
        ("0.1", "0.1" + "0" * 20 + "1", WRONG),
        ("0.1%", "0.001" + "0" * 20 + "1", WRONG),
        ("9" * 300, "9" * 299 + "8", WRONG),
        # a gold answer that is none, and an answer of any size
        ("  ", "5", Verdict.BAD_GOLD),
        ("1+" * 20_000 + "1", "5", Verdict.BAD_GOLD),
        ("5", "1+" * 20_000 + "1", Verdict.UNCHECKABLE),
        # sizes that nobody computes
        ("9^{9^{9^9}}", "9^{9^{9^{9}}}", RIGHT),
        # the worker's
        (r"\sqrt{12}", r"2\sqrt{3}", OPEN),
        ("(x+1)^2", "x^2+2x+1", OPEN),
        ("1+x", "x+1", RIGHT),
    ],
)
def test_two_answers_are_compared_by_their_structure(gold, answer, verdict):
    assert compare(gold, answer)[0] is verdict


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\sqrt{12}", r"2\sqrt{3}", RIGHT),
        (r"\sqrt{2}", r"\sqrt{2.0000000001}", WRONG),
        ("10", r"\frac{5!}{2!3!}", RIGHT),
        ("(x+1)^2", "x^2+2x+1", RIGHT),
        (r"\sqrt{x^2}", "x", WRONG),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", WRONG),
        (r"\sin 30^\circ", r"\frac12", RIGHT),
        ("y = 2x + 3", "2x - y + 3 = 0", RIGHT),
        ("y = 2x + 3", "2x - y - 3 = 0", WRONG),
        ("x + y < 1", "2x + 2y < 2", RIGHT),
        ("x + y < 1", "-2x - 2y < -2", WRONG),
        (r"2^{10^{9}}", r"2^{10^{9}+1}", WRONG),
        ("2^{2005}", r"2^{2005} + \sqrt{2^{2005}}", WRONG),
        ("0", r"2^{2005} + \sqrt{2} - 2^{2005}", WRONG),
        ("1", r"1 + \sqrt{2} * 10^{-400}", WRONG),
        (r"2^{1/2} 10^{5000}", r"\sqrt{2} * 10^{5000}", RIGHT),
        (r"e^{100000}", r"e^{100000} + 1", OPEN),
        # what the calling process leaves to it for its size
        ("2^{20000}", "4^{10000}", RIGHT),
        ("2000!", "2000 * 1999!", RIGHT),
        ("1", "2^{9000} - 2^{9000} + 1", RIGHT),
        (", ".join(ROOTS), ", ".join(ROOTS[::-1]), RIGHT),  # long, and not all numbers
    ],
)
def test_the_worker_compares_leaves_by_their_values(gold, answer, verdict):
    assert compare(gold, answer)[0] is OPEN
    assert compare(gold, answer, NUMERIC)[0] is verdict


def test_another_form_of_a_value_is_right_and_another_value_is_not():
    mistakes = []
    for line in FORMS.read_text(encoding="utf-8").splitlines():
        label, gold, answer = line.split("\t")
        quick, verdict = compare(gold, answer)[0], compare(gold, answer, NUMERIC)[0]
        if (verdict is RIGHT) != (label == "same") or quick not in (OPEN, verdict):
            mistakes.append((label, gold, answer, quick, verdict))
    assert mistakes == []


def test_a_text_that_a_form_matches_has_its_sign():
    texts = FORMS.read_text(encoding="utf-8").split("\t")
    for sign, pattern, _ in (*SPELLINGS, *NORMAL_FORMS):
        assert all(sign in text for text in texts if pattern.search(text)), pattern


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("(1,2)", r"(1,2) \cup 3", "cannot be compared"),
        ("x", r"\text{ x }\int_0^1 t dt", "the answer cannot be read"),
        (r"\frac12", r"\int_0^1 x dx", "Math-Verify"),
        ("1", r"\exp(10^{20})", "a power too large to compute"),
        (r"\sqrt{2}", r"\sinh(10^{16})", "a power too large to compute"),
        ("3", r"\sqrt{2}^{10^{16}}", "a power too large to compute"),
        (r"\sqrt{12}", r"2\sqrt{3}", "numeric"),
        (r"\int_0^1 x dx", "0.5 = 0.6", "a chain"),
        (r"\int_0^1 x dx", r"\sqrt{2}" + "+1" * 200, "more than 400 characters"),
    ],
)
def test_a_worker_names_the_rule_and_asks_math_verify_only_about_formulas_beyond_our_grammar(gold, answer, reason):
    assert judge(gold, answer)[1] == reason


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (r"\lim_{x\to0}\frac{|x|}{x}", "wrong"),
        (r"\lim_{x\to0^{+}}\frac{|x|}{x}", "correct"),
        (r"\lim_{x\to0^{-}}\frac{|x|}{x}", "wrong"),
        (r"\lim_{x\to0}\frac{\sin x}{x}", "correct"),
        (r"\lim_{x\to\infty}\frac{x+1}{x}", "correct"),
    ],
)
def test_a_limit_exists_only_if_both_sides_agree(answer, verdict):
    assert judge("1", answer)[0] == verdict


@pytest.mark.parametrize(
    ("error", "text"),
    [
        *((Unreadable, text) for text in ("", "(", "1 2", "2 +", r"\frac{1}", "x^", "apples", "[1, 2", r"\int_0^3 i")),
        *((TooLarge, text) for text in (r"\sqrt{" * 100 + "2" + "}" * 100, "3" + "%" * 200, "1/" * 200 + "1")),
    ],
)
def test_what_is_outside_the_grammar_or_too_deep_or_too_long_is_never_guessed(error, text):
    with pytest.raises(error):
        parse(text)


# Numbers: a number equals itself in every spelling, and never a different one. Exact numbers are bounded by their size:
# the calling process leaves what is larger to a worker.


def decimal_spellings(d: Decimal) -> list[str]:
    text = f"{d.normalize():f}"
    spelled = [text, f"{text}0" if "." in text else f"{text}.0", f"\\${text}", text.replace("-", "−"), f"{text} cm"]
    spelled += [f"{(d * 100).normalize():f}%", *([text[1:]] if text.startswith("0.") else [])]
    if "." not in text:
        spelled += [f"{int(d):,}", f"{int(d):,}".replace(",", "{,}"), f"{int(d):,}".replace(",", "\\,")]
    return spelled


@given(st.builds(lambda n, places: Decimal(n).scaleb(-places), st.integers(-(10**6), 10**6), st.integers(0, 6)))
@settings(max_examples=150, deadline=None)
def test_a_decimal_equals_its_fraction_and_itself_in_every_spelling(d):
    for one, two in product([*decimal_spellings(d), "{}/{}".format(*d.as_integer_ratio())], repeat=2):
        marks = {unit for unit in ("$", "cm", "%") if unit in one + two}
        assert compare(one, two)[0] is (Verdict.WRONG if len(marks) > 1 else Verdict.CORRECT), (one, two)


@given(st.integers(0, 10**9), st.integers(1, 99))
@settings(max_examples=100, deadline=None)
def test_a_percentage_is_its_hundredth_and_its_bare_number_and_nothing_else(n, other):
    assert compare(f"{n}%", str(n))[0] is Verdict.CORRECT
    assert compare(f"{n}%", f"{n}/100")[0] is Verdict.CORRECT
    hundredth = f"{n // 100}.{n % 100:02}"
    assert compare(f"{n}%", hundredth)[0] is compare(hundredth, f"{n}%")[0] is Verdict.CORRECT
    assert n == 0 or compare(f"{n}%", f"{n}00")[0] is compare(f"{n}00", f"{n}%")[0] is Verdict.WRONG
    assume(n and Fraction(other, 7) not in (1, Fraction(1, 100)))
    assert compare(f"{n}%", f"{n * other}/7")[0] is Verdict.WRONG


@given(
    st.lists(
        st.sampled_from(
            [*"0123456789xyi+-*/^_(){}[]|,.!%= ", "\\frac", "\\sqrt", "\\pi", "\\pm", "\\text{", "\\{", "\\}", "\\le"]
        ),
        max_size=14,
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_correct_against_itself(text):
    assume(clean(text))
    assert compare(text, f" {text} ")[0] is Verdict.CORRECT


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
    assert exact.rational(parse(small)) is not None
    assert exact.rational(parse(large)) is None


def test_a_long_text_is_left_to_a_worker_and_a_very_long_one_is_uncheckable():
    long = "1+" * (QUICK_CHARACTERS // 2) + "1"
    assert compare("201", long) == compare(long, "201") == (OPEN, "long")
    assert compare("201", long, NUMERIC)[0] is Verdict.CORRECT
    assert compare("1501", "1+" * 1500 + "1")[0] is Verdict.UNCHECKABLE
    assert compare("42", "\ufdfa" * 1900, NUMERIC)[0] is Verdict.UNCHECKABLE  # one character stands for eighteen


# What is a unit, and what only looks like one

# Letters that are a unit of their own behind a number and a space. "3 a" is three of an article: "3 a day".
ALONE = "agmsAJKLNVW"


def test_no_single_letter_variable_is_a_unit():
    assert "".join(letter for letter in ascii_letters if units.split(f"3 {letter}")[1] is not None) == ALONE
    assert [letter for letter in ascii_letters if units.split(f"3{letter}") != (f"3{letter}", None)] == []
    pairs = [pair for letter in ascii_letters for pair in (("3", f"3{letter}"), ("3", letter), (f"3{letter}", "3"))]
    grades = grade_batch([gold for gold, _ in pairs], [rf"\boxed{{{answer}}}" for _, answer in pairs])
    assert [pair for pair, one in zip(pairs, grades, strict=True) if one.verdict is Verdict.CORRECT] == []


@pytest.mark.parametrize(
    "unit",
    [
        *(r"\text{ eV}", r"\text{ nm}", r"\text{ MPa}", r"\text{ kg}", r"\text{ mol}", r"\ \mathrm{Hz}"),
        *(
            r"\ \mathrm{m/s^2}",
            r"\text{ m/s}^2",
            r"~\mathrm{km/h}",
            r"\text{ cm}^3",
            " square inches",
            " miles per hour",
        ),
        *(r"\text{ light years}", " light years", r"\ \Omega", r"\ M_\odot", r"^\circ\text{C}", r"\,^\circ\mathrm{C}"),
        *(" in^2", r"\text{ in.}^3", r"\text{ lb/in}^2", " in² in total"),
        *("元", " 元", r"\text{ dozen}", " apples", " red apples", " in total", " m", " V", "°"),
    ],
)
def test_an_answer_may_have_a_unit_that_the_gold_lacks(unit):
    assert grade("9.6", rf"\boxed{{9.6{unit}}}") is Verdict.CORRECT
    assert grade(f"9.6{unit}", r"\boxed{9.6}") is Verdict.CORRECT
    assert grade("9.6", rf"$\boxed{{9.6}}{unit}$") is Verdict.CORRECT
    assert grade("9.7", rf"\boxed{{9.6{unit}}}") is Verdict.WRONG


@pytest.mark.parametrize(("words", "joined"), product(["million", "or 6", "squared", "plus 1", "percent of 10"], " "))
def test_words_that_change_a_value_are_no_unit(words, joined):
    assert units.split(f"5{joined}{words}")[1] is None
    assert grade("5", rf"\boxed{{5{joined}{words}}}") is not Verdict.CORRECT
    assert grade("5", rf"\boxed{{5{joined}\text{{{words}}}}}") is not Verdict.CORRECT
