"""What an answer costs the process that nothing kills: counted operations, bounded by its length, on every machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_math.grading import Verdict, grade_batch
from grpo_math.grading.batch import _quick
from grpo_math.grading.clean import _clean
from grpo_math.grading.compare import _fast_number, _readings, compare, value
from grpo_math.grading.exact import _integer_root, rational
from grpo_math.grading.expression import parse
from grpo_math.grading.extract import extract
from grpo_math.grading.words import for_math_verify
from grpo_math.grading.work import UNITS, Spent, bounded
from grpo_math.rewards import REWARDS

CASES = Path(__file__).parents[1] / "cases" / "hostile_answers.jsonl"
ROOT = r"\sqrt[3]{10^{14000}}"
WORDS = r"""
. , ; ? ! ' " ` * ** _ $ # #### ( ) [ { {} } | / \ \\ ^ ^{ & % ° < = + - 0 1 1, 1= 1/ a/b x= x ½ √ ∛ ﷺ − \( \[ \{ \text{
\text{a} \boxed{ \boxed{} \boxed{1} <answer> <answer></answer> </answer> answer answer: </think> option (A) 1{,} \pm
"""
SPACED = ["x ", "1 ", "\n", "\n1", "a b ", "5 a-", " (a", "of a", "answer is, because ", "the answer is ", "not 5 "]
PIECES = [*WORDS.split(), *SPACED]


def operations(gold: str, text: str) -> int:
    """Calls in this process while an answer is extracted, compared and read as a number.

    A text's own function, or a pattern's, may look at a whole text: it counts for a hundredth of the longest at hand.
    """
    count = 0

    def see(frame, event, argument):
        nonlocal count
        if event == "call":
            count += 1
        elif event == "c_call":
            scans = isinstance(argument.__self__, (str, re.Pattern)) and not argument.__name__.endswith("swith")
            texts = [v for v in (argument.__self__, *frame.f_locals.values()) if scans and isinstance(v, str)]
            count += 1 + max(map(len, texts), default=0) // 100

    for cached in (_fast_number, _readings, _clean):
        cached.cache_clear()
    answer = extract(text, "boxed").text or ""
    sys.setprofile(see)
    try:
        _quick(gold, text, "boxed")
        value(answer)
    finally:
        sys.setprofile(None)
    return count


def growth(gold: str, piece: str, opening: str, closing: str, length: int) -> float:
    """How many times the work of twice as many characters is that of ``length`` of them."""
    one, two = (operations(gold, opening + piece * (n // len(piece)) + closing) for n in (length, 2 * length))
    return two / (one + 300)


def test_twice_the_text_is_at_most_twice_the_work():
    for piece in PIECES:
        assert growth("42", piece, "\\boxed{", "}", 900) < 2.2, piece
        assert growth("42", piece, "\\boxed{5 (", " a)}", 900) < 2.2, piece
        assert growth("42", piece, "", "", 4000) < 2.2, piece
        assert growth("42", piece, "<answer>42", "", 4000) < 2.2, piece


def test_every_hostile_answer_is_little_work_in_this_process():
    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        gold, text = ("".join(piece * n for piece, n in row[side]) for side in ("gold", "prediction"))
        assert operations(gold, text) <= 120_000 + len(text) + len(gold), text[:100]


def test_roots_and_their_sums_are_charged_before_they_are_drawn():
    with pytest.raises(Spent), bounded(1_000_000):
        rational(parse(ROOT))
    with bounded() as left:
        assert rational(parse(ROOT)) is None  # it has none
    assert 0 < left[0] < UNITS / 2
    many = "+".join([ROOT] * 40)
    assert compare("42", many) == (None, "too much work for this process")
    assert value(many) is None
    assert value("+".join([ROOT] * 200)) is None  # too long to be read


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("2^{8000}", "2^{16000}"),
        ("2^{8000} + 1", "2^{16000} + 1"),
        ("2^{4000} * 3^{2000}", "2^{8000} * 3^{4000}"),
        ("2^{4000} / 3^{2000}", "2^{8000} / 3^{4000}"),
        (r"\sqrt{4^{4000}}", r"\sqrt{4^{8000}}"),
        (r"\sqrt[3]{8^{4000}}", r"\sqrt[3]{8^{8000}}"),
        ("1500!", "3000!"),
        (r"\binom{2000}{1000}", r"\binom{4000}{2000}"),
        ("gcd(3^{4000}, 5^{3000})", "gcd(3^{8000}, 5^{6000})"),
        ("lcm(3^{4000}, 5^{3000})", "lcm(3^{8000}, 5^{6000})"),
        (r"\lfloor 3^{5000} / 2^{5000} \rfloor", r"\lfloor 3^{10000} / 2^{10000} \rfloor"),
        ("max(3^{5000}, 2^{9000})", "max(3^{10000}, 2^{18000})"),
    ],
)
def test_twice_the_digits_are_charged_as_more_than_thrice_the_work(small, large):
    """So that what is charged keeps up with what long arithmetic costs."""
    charged = []
    for text in (small, large):
        with bounded() as left:
            assert rational(parse(text)) is not None
        charged.append(UNITS - left[0])
    assert charged[1] > 3 * charged[0] > 100_000


def test_one_answer_has_one_budget_for_all_that_it_is_compared_with():
    one = "3^{3000}/2^{3000}"
    with bounded() as left:
        compare("42", one)
    share = UNITS - left[0]
    assert compare("42", one)[0] is Verdict.WRONG
    members = ", ".join([one] * (int(UNITS / share) + 2))
    assert compare(", ".join(["42"] * members.count("/")), members)[0] is None
    boxes = " and ".join(rf"\boxed{{{one}}}" for _ in range(int(UNITS / share) + 2))
    assert isinstance(_quick(", ".join(["1"] * 12), boxes, None), tuple)


def test_partial_credit_is_given_under_the_same_bound():
    many = rf"\boxed{{{'+'.join([ROOT] * 40)}}}"
    for name, reward in (("proximity", 0.0), ("number_match", 0.0), ("integer_only", 0.0)):
        [grade] = grade_batch(["42"], [many])
        assert REWARDS[name]([""], [many], answer=["42"], grade=[grade]) == [reward]


@given(st.integers(0, 10**60), st.integers(2, 64), st.integers(-1, 1))
@settings(max_examples=200, deadline=None)
def test_an_integer_root_is_the_largest_whose_power_fits(n, degree, off):
    for m in (n, max(0, n**degree + off)):
        root = _integer_root(m, degree)
        assert root**degree <= m < (root + 1) ** degree


def test_an_answer_too_long_to_be_read_still_pays_as_the_golds_text_or_a_plain_number():
    long = "1+" * 1500 + "1"
    assert compare("1501", long)[0] is Verdict.UNPARSEABLE
    assert compare(long, long)[0] is Verdict.CORRECT
    assert compare("42", "0" * 3000 + "42." + "0" * 3000)[0] is Verdict.CORRECT
    assert compare("42", "0" * 3000 + "43")[0] is Verdict.WRONG
    assert compare("42", "\ufdfa" * 1900)[0] is Verdict.UNPARSEABLE


@pytest.mark.parametrize("text", ["not 6", "5f3a9c", "is 6", r"\text{not} 6", "0x1f", r"not \sum_{i=1}^{3} i"])
def test_what_is_no_mathematics_is_decided_without_math_verify(text):
    assert compare("6", text)[0] in (Verdict.WRONG, Verdict.UNPARSEABLE)


@pytest.mark.parametrize(
    "text",
    [
        r"\sum_{i=1}^{3} i",
        r"\int_0^1 x\,dx",
        r"\lim_{x \to 0} \frac{\sin x}{x}",
        r"\prod_{k=1}^{n} (1 + a_k)",
        r"\{x^2 \mid x \in \mathbb{R}\}",
        r"\sum_{i,j,k} ijk",
        r"\begin{pmatrix} 1 & 2 \end{pmatrix} \cdot x",
    ],
)
def test_what_math_verify_is_kept_for_gets_to_it(text):
    assert for_math_verify(_clean(text))


def test_a_long_gold_for_several_boxes_is_not_charged_to_the_answer():
    gold = "1 + " * 400 + "1"
    [grade] = grade_batch([gold], [r"\boxed{400} and \boxed{402}"])
    assert grade.verdict is not Verdict.CRASH


ENDINGS = ((r"\boxed{", ")}"), (r"\boxed{5 ", " (a b)}"), (r"\boxed{", " percent}"), ("<answer>", "5</answer>"))
PROGRAM = """
import json, resource, sys
from grpo_math.grading.batch import _quick
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
for text in json.load(sys.stdin) * 3:
    _quick("42", text, None)
"""


def test_no_pattern_goes_over_an_answer_again_and_again():
    """No tracer counts a pattern's steps. All this takes 3 seconds of CPU time; one cubic pattern takes a minute."""
    texts = [opening + piece * (1900 // len(piece)) + closing for piece in PIECES for opening, closing in ENDINGS]
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(texts), text=True)
    assert done.returncode == 0
