"""In the formats `gsm8k` and `direct`, a gold answer that is one number is answered by one number in digits."""

import pytest

from grpo_math.grading import grade_batch
from grpo_math.grading.formats import in_format_for
from grpo_math.rewards import REWARDS

ONE_NUMBER = [
    *(("50", text) for text in ("50", "$50", "50 dollars", r"\$50", "50.", "50.0", "50,00", "**50**", "$50$", "+50")),
    *(("50", text) for text in ("50 euros per hour", r"50\text{ cm}", "50%", "५०", "５０", "50 cm^2")),
    *(("1500", text) for text in ("1,500", "1 500", r"1{,}500", r"\$1,500.00", "1,500 USD")),
    *(("-3.5", text) for text in ("-3.5", "−3.5", "-7/2", r"-\frac{7}{2}", r"-3\frac{1}{2}", "-3 1/2 cm", "-350%")),
    *((r"\frac{2}{4}", text) for text in (r"\frac{2}{4}", r"\dfrac24", "2/4", "1/2", ".5", r"50\%", "½")),
    *((gold, gold) for gold in ("2^{10}", "x = 5", r"0.\overline{3}", "12/1", "1(1/2)", "6!")),
]
CALCULATED = [
    *(("50", text) for text in ("24 + 26", "24 + 26 = x", "24 + 26 = 50", "50 = 24 + 26", "total = 24 + 26", "x = 50")),
    *(("50", text) for text in ("answer: 24 + 26", "24 ＋ 26", "24 − 0 + 26", "24+26/1", r"\text{24 + 26}", "50 + 0")),
    *(("50", text) for text in ("24 + 26 (dollars)", "|24 + 26|", r"\boxed{24+26}", "24 plus 26", "$24 + $26")),
    *(
        ("50", text)
        for text in ("24 and 26", "(50)(1)", "100/2", "100 : 2", r"\frac{100}{2}", "50/1", "fifty", "-(-50)")
    ),
    *(
        ("8", text)
        for text in ("2^3", r"\sqrt{64}", r"2 \cdot 4", "2(4)", r"\binom{8}{1}", r"\gcd(8, 16)", "18 mod 10")
    ),
    *(("24", text) for text in ("4!", r"\sum_{k=1}^{24} 1", "eight times three", "0 24 + 0", "2 dozen + 0", "24 · 1")),
    *((r"\frac{1}{2}", text) for text in ("2/4", "3/6", r"\frac{5}{10}", "1 - 1/2", "1/(1+1)")),
]


@pytest.mark.parametrize("name", ["gsm8k", "direct"])
def test_a_format_of_one_number_is_met_by_a_number_in_digits_and_by_no_calculation(name):
    for cases, met in ((ONE_NUMBER, True), (CALCULATED, False)):
        assert [case for case in cases if in_format_for(case[0], f"#### {case[1]}", name) is not met] == []


def test_tags_have_no_calculation_that_is_left_undone():
    done, undone = (
        ("36", "x = 36", "30 + 6 = 36", r"3.6 \times 10^1"),
        ("30 + 6", "72/2", r"\frac{72}{2}", "6^2", "x = 6^2"),
    )
    for answers, met in ((done, True), (undone, False)):
        texts = [f"So.</think> <answer>{answer}</answer>" for answer in answers]
        grades = grade_batch(["36"] * len(texts), texts, answer_format="r1_zero")
        assert [(str(grade.verdict), grade.in_format) for grade in grades] == [("correct", met)] * len(texts)
    fraction = r"\frac{16}{25}"
    assert in_format_for(fraction, f"So.</think> <answer>${fraction}$</answer>", "r1_zero", f"${fraction}$")


@pytest.mark.parametrize(
    ("gold", "answer", "met"),
    [
        *(("B", text, True) for text in ("B", "(B) 24 + 26", "option B")),
        *(("yes", "Yes, 2 + 2 = 4", True), ("1, 2", "2, 1", True), ("3:45", "3:45 P.M.", True)),
        *((r"2\sqrt{3}", r"\sqrt{12}", True), ("x + 1", "1 + x", True), (r"\sqrt{7}", "3 + 4", False)),
    ],
)
def test_with_any_other_gold_answer_only_a_calculation_of_numbers_is_outside_the_format(gold, answer, met):
    assert in_format_for(gold, f"#### {answer}", "gsm8k") is met


GOES_ON = [
    *("red apples", "for both weeks.", "dozen", "if it rains", "minimum", "is wrong", "doubled", "in hex", "per cow"),
    *("ist falsch", "неверно", "的平方", "の二乗", "ভুল", "wenn gerade", "книг", "er galt", "খাতা"),
]


@pytest.mark.parametrize("text", GOES_ON)
def test_no_sentence_goes_on_behind_one_number(text):
    for name, completion in (("gsm8k", f"So.\n#### 50 {text}"), ("boxed", rf"So \boxed{{50\text{{ {text}}}}}.")):
        assert not grade_batch(["50"], [completion], answer_format=name)[0].in_format
        assert grade_batch([f"50 {text}"], [completion], answer_format=name)[0].in_format


PROBLEM = (
    "Mara ist nicht krank. Wie viele rote Äpfel? 他有多少苹果? कितने सेब हैं? How many dozen is it not? Hälfte, moitié"
)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        *((text, True) for text in ("rote Äpfel", "äpfel", "苹果", "सेब", "")),
        *(
            (text, False)
            for text in (
                "Äpfe",
                "pfel",
                "Birnen",
                "nicht",
                "is not",
                "dozen",
                "Hälfte",
                "moitié",
                "ψέμα",
                "rote Äpfel " * 5,
            )
        ),
    ],
)
def test_words_of_the_problem_may_follow_one_number_unless_they_change_it(text, met):
    texts = {
        "gsm8k": f"So.\n#### 50 {text}",
        "direct": f"#### 50 {text}",
        "boxed": rf"So \boxed{{50\text{{ {text}}}}}.",
    }
    for name, completion in texts.items():
        columns = {"answer": ["50"], "answer_format": [name], "problem": [PROBLEM]}
        [grade] = grade_batch(["50"], [completion], answer_format=name, problems=[PROBLEM])
        assert (grade.in_format, REWARDS["format_strict"]([""], [completion], **columns)) == (met, [met])
        assert REWARDS["shaped"]([""], [completion], **columns)[0] > 1.05 or not met


def test_the_problem_counts_also_for_an_answer_that_only_a_worker_can_compare():
    texts = [rf"So \boxed{{\log_2(4) \text{{ {fruit}}}}}." for fruit in ("pears", "plums")]
    grades = grade_batch(["2"] * 2, texts, answer_format="boxed", problems=["How many pears?", None])
    assert [(str(grade.verdict), grade.in_format) for grade in grades] == [("correct", True), ("correct", False)]


def test_a_box_may_contain_a_calculation_and_a_tag_may_not():
    texts = {"boxed": r"So \boxed{24 + 26}.", "r1_zero": "So.</think> <answer>24 + 26</answer>"}
    assert [grade_batch(["50"], [texts[name]], answer_format=name)[0].in_format for name in texts] == [True, False]


def test_the_grade_and_the_rewards_know_the_gold_answer_and_refuse_a_calculation():
    texts, columns = ["#### 48/2", "#### 24"], {"answer": ["so\n#### 24"] * 2, "answer_format": ["gsm8k"] * 2}
    grades = grade_batch(columns["answer"], texts, answer_format="gsm8k")
    assert [(str(grade.verdict), grade.in_format) for grade in grades] == [("correct", False), ("correct", True)]
    for name in ("gsm8k", "format_strict"):
        assert REWARDS[name](["", ""], texts, **columns) == [0.0, 1.0]
    assert REWARDS["format_strict"](["", ""], texts, answer_format="gsm8k") == [1.0, 1.0]
    one, two = REWARDS["shaped"](["", ""], texts, **columns)
    assert two - one == pytest.approx(0.05)
