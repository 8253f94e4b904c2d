"""What two answers have in common: structure by structure, with the leaves compared exactly (None = the worker's)."""

from pathlib import Path

import pytest

from grpo_math.grading.equal.clean import clean
from grpo_math.grading.equal.compare import compare
from grpo_math.grading.equal.expression import MAX_DEPTH, TooLarge, Unreadable, parse
from grpo_math.grading.equal.numeric import NUMERIC
from grpo_math.grading.judge import judge
from grpo_math.grading.verdict import Verdict

RIGHT, WRONG, OPEN = Verdict.CORRECT, Verdict.WRONG, None
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
        # ratios, times, bases
        ("3:4", "4:3", WRONG),
        ("3:4", "3 to 4", RIGHT),
        ("12:00", "1:00", WRONG),
        ("8:34 pm", "20:34", RIGHT),
        ("8:34 am", "8:34 pm", WRONG),
        ("52_8", "52_9", WRONG),
        ("52_8", "52_{8}", RIGHT),
        # choices
        ("B", "(B) 12", RIGHT),
        ("(B) 12", "12", RIGHT),
        ("(B) 12", "(C) 12", WRONG),
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
    ],
)
def test_the_worker_compares_leaves_by_their_values(gold, answer, verdict):
    assert compare(gold, answer, NUMERIC)[0] is verdict


@pytest.mark.parametrize("line", FORMS.read_text(encoding="utf-8").splitlines())
def test_another_form_of_a_value_is_right_and_another_value_is_not(line):
    label, gold, answer = line.split("\t")
    verdict = compare(gold, answer, NUMERIC)[0]
    assert (verdict is RIGHT) == (label == "same")
    assert compare(gold, answer)[0] in (OPEN, verdict)


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
    "text", [r"(1, \infty)", r"\{(1, 2), 3\}", r"x \in \{1, 2\}", r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}"]
)
def test_and_what_may_is_read(text):
    assert parse(text)


@pytest.mark.parametrize("text", ["", "(", "1 2", "2 +", r"\frac{1}", "x^", "apples", "[1, 2", r"\int_0^3 i"])
def test_what_is_outside_the_grammar_is_unreadable_and_never_guessed(text):
    with pytest.raises(Unreadable):
        parse(text)


@pytest.mark.parametrize("text", [r"\sqrt{" * 100 + "2" + "}" * 100, "3" + "!" * 200, "1/" * 200 + "1"])
def test_what_is_too_deep_or_too_long_says_so(text):
    assert MAX_DEPTH < 100
    with pytest.raises(TooLarge):
        parse(text)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("４２", "42"),
        ("٤٢", "42"),
        ("1\u00a0000", "1 000"),
        (r"1\,000", "1000"),
        (r"\dfrac12", r"\frac12"),
        (r"\left(1,2\right]", "(1,2]"),
        ("x²", "x^{2}"),
        ("$5", "$5"),
        (r"5\%", "5%"),
        ("5\u200b", "5"),
        ("four apples", "4 apples"),
        ("..", "."),
    ],
)
def test_spellings_become_one(text, cleaned):
    assert clean(text) == cleaned


def test_bad_golds_and_answers_of_any_size_have_their_own_verdicts():
    assert compare("  ", "5")[0] is Verdict.BAD_GOLD
    assert compare("1+" * 20_000 + "1", "5")[0] is Verdict.BAD_GOLD
    assert compare("5", "1+" * 20_000 + "1")[0] is Verdict.UNCHECKABLE
