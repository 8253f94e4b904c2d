"""The position rules of grading/where.py: each row is a completion and the answer that its position picks."""

import re
from pathlib import Path

import pytest

from grpo_math.grading import grade
from grpo_math.grading.where import TAIL, find

RULES = {
    "thinking": [
        ("<think>41</think> 42", "42"),
        (r"<think>\boxed{41}</think> \boxed{42}", "42"),
        ("<think>40</think>41</think> 42", "42"),
        (r"\boxed{41}</think>", ""),
        (r"<think>\boxed{42}", ""),
    ],
    "the last marker": [
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"First \boxed{3}. Hence \boxed{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"\fbox{42}", "42"),
        (r"\boxed 42", "42"),
        (r"\textbf{So \boxed{42} it is}", "42"),
        (r"\boxed{41} in \boxed{}", "41"),
        ("#### 42", "42"),
        ("#### 41\nThen we add one.\n#### 42", "42"),
        ("####\n42", "42"),
        ("<answer>42</answer>", "42"),
        ("<answer>41</answer> so \\boxed{42}", "42"),
        ("\\boxed{41}\n#### 42", "42"),
        ("#### 41\nThe answer is 42.", "42"),
        (r"The answer is 41. So it is \boxed{42}", "42"),
        (r"\boxed{42}. The answer is right.", "42"),
        ("The answer is 41.\nThe answer is 42.", "42"),
        ("The answer is $42$ because 6 * 7 = 42.", "42"),
        ("The answer is **42**.", "42"),
        ("**Final Answer:** 42", "42"),
        ("The answer is:\n$$42$$", "$$42$$"),
    ],
    "a remark after a marker": [
        (r"\boxed{5}. The answer is reasonable, because 5 < 10.", "5"),
        ("\\boxed{5}\nThe answer is an integer between 0 and 999.", "5"),
    ],
    "a marker in a marker": [
        (r"\boxed{\boxed{42}}", "42"),
        (r"<answer>so \boxed{42}</answer>", "42"),
        (r"#### Step 3: \boxed{42}", "42"),
        (r"#### The answer is 42", "42"),
    ],
    "a marker that was cut": [
        (r"\boxed{42", "42"),
        (r"\boxed{41} so \boxed{42", "42"),
        (r"\boxed{41} so \boxed{\frac{1}{2}", r"\frac{1}{2}"),
        ("<answer>42", "42"),
        (r"\boxed{42}}.", "42"),
    ],
    "special tokens": [
        ("#### 42<|im_end|>", "42"),
        ("The answer is 42<|im_end|>", "42"),
        (r"\boxed{42}<|endoftext|>", "42"),
        ("<answer>42</answer><|eot_id|>", "42"),
        ("40 + 2 = <<40+2=42>>42", "40 + 2 = 42"),
    ],
    "boxes next to each other": [
        (r"x=\boxed{1}, y=\boxed{2}", "1, 2"),
        (r"$x = \boxed{1}$ and $y = \boxed{2}$", "1, 2"),
        (r"(a) \boxed{1} (b) \boxed{2}", "1, 2"),
        (r"(i) \boxed{1}; (ii) \boxed{2}; (iii) \boxed{3}", "1, 2, 3"),
        (r"\boxed{1} or \boxed{2}", "1, 2"),
        (r"(a) \boxed{1}\quad (b) \boxed{2}", "1, 2"),
        (r"x=\boxed{1}\\ y=\boxed{2}", "1, 2"),
        (r"\boxed{1}\boxed{2}", "1, 2"),
        (r"\boxed{1}, \boxed{1}", "1"),
        (r"\boxed{1}. Later we see \boxed{2}", "2"),
        ("<answer>1</answer> or <answer>2</answer>", "1, 2"),
        ("#### 1\n#### 2", "1, 2"),
    ],
    "Chinese": [
        ("答案是 5 元。", "5 元"),
        ("所以答案是 $\\frac{1}{2}$。", r"$\frac{1}{2}$"),
        ("故选A", "A"),
        ("故选：B。", "B"),
        ("答案：3、4", "3、4"),
    ],
    "labels of a line": [
        ("so 9 * 2 = 18\nA: 18", "18"),
        ("**A:** 18", "18"),
        ("A: B", "B"),
        ("Ответ: 18", "18"),
        ("答え: 18", "18"),
        ("答：一共18元。", "18元"),
        ("【答案】C", "C"),
        ("综上，选B", "B"),
        ("The answer is 5. This answer is correct.", "5"),
    ],
    "a label that introduces a solution": [
        ("Answer: Tom has 5 balls. He buys 6. 5 + 6 = 11.", "5 + 6 = 11"),
        ("Answer: 11. He had 5 and bought 6.", "11"),
        ("Answer: The trips cost $320.", "320"),
        ("Answer: The 2 trips cost $320.", "320"),
        ("Answer: Either the 2 trips or all cost $320.", "Either the 2 trips or all cost $320"),
        ("Answer: 44 of 50 dollars.", "44 of 50 dollars"),
    ],
    "the last sentence with a value": [
        ("Zusammen sind es 30 + 6 = 36 Kisten voll. Die Antwort lautet 38.", "38"),
        ("A b c 30 + 6 = 36 d. Efgh ijkl 38.", "38"),
        ("The sum is 41. Is it 42?", "41"),
        ("The sum is 41. Some would say 42.", "41"),
        ("The sum is 41. (x = 42)", "41"),
        ("1. We add 40 and 1.\n2. That is all.", "40 and 1"),
        ("รวม 30 + 6 = 36 ผล ที่จริง 38", "38"),
        ("It is not 42.", "not 42"),
        ("It is minus 42.", "-42"),
    ],
    "several values": [
        ("Die Antwort ist 41 oder 42.", "41 or 42"),
        ("Antwort: 41 rote Kisten oder 42 blaue", "41 rote Kisten or 42 blaue"),
        ("The answer is 41 red apples or 42 red apples.", "41 red apples or 42 red apples"),
        ("The answer is 41 to 42.", "41 to 42"),
        ("Ответ: x = 41 или x = 42.", "x = 41 or x = 42"),
        ("所以 $x=41$ 或 $x=42$。", "$x=41$ or $x=42$"),
        ("So x = 41 and y = 42.", "42"),
        ("2 y -3", "2 y -3"),
        ("La respuesta es 12 y 13.", "12 and 13"),
        ("Options A and B are both correct.", "A and B"),
        ("La réponse est A ou B.", "A or B"),
        ("答案是A 或 B。", "A or B"),
        ("The answer is A because B is wrong.", "A"),
        ("The answer is A, not B.", "A"),
        ("A triangle has 3 sides, so C.", "C"),
        ("There are 41 or 42.", "41 or 42"),
        ("Answer: B. A or C would be too small.", "(B) A or C would be too small"),
    ],
    "a choice with a negation": [
        ("The answer is not B.", "not B"),
        ("It is anything but B.", "but B"),
        ("정답은 B가 아닙니다.", "B가 아닙니다"),
        ("答案不是42。", "不是42"),
    ],
    "bold, and JSON": [("答案是**42**个。", "42个"), ("정답은 **B**입니다.", "B"), ('{"answer": 42}', "42")],
    "signs without a space": [
        ("6×7=42（个）", "42个"),
        ("A、B、D错误，C正确。", "C"),
        ("したがって、42円になります。", "42円になります"),
    ],
    "no marker": [
        ("", ""),
        ("42", "42"),
        ("x = 5", "x = 5"),
        (r"3\sqrt{2}", r"3\sqrt{2}"),
        ("(1, 2)", "(1, 2)"),
        ("There are 41 apples, and then there are 42", "42"),
        ("We get 6 * 7 = 42 eggs in 3 days.", "42 eggs in"),
        ("The area of this is $\\frac{3}{4}$.", r"$\frac{3}{4}$"),
        ("So B is correct.", "B"),
        ("x = 41\nx = 42", "x = 42"),
        ("I do not know what to say about all of this.", ""),
    ],
}


@pytest.mark.parametrize(("completion", "text"), [row for rows in RULES.values() for row in rows])
def test_the_position_picks_the_answer(completion, text):
    assert find(completion).text == text


@pytest.mark.parametrize(
    ("answer_format", "text"),
    [("gsm8k", "1"), ("direct", "1"), ("boxed", "2"), ("r1_zero", "3"), ("xml", "3"), (None, "4")],
)
def test_the_marker_of_the_requested_format_comes_first(answer_format, text):
    assert find("\\boxed{2}\n#### 1\n<answer>3</answer> The answer is 4.", answer_format).text == text


def test_only_the_end_of_a_long_completion_is_read():
    words = "we go on " * (TAIL // 9)
    assert find(rf"\boxed{{42}}. {words[: TAIL - 100]}").text == "42"
    assert find(rf"\boxed{{42}}. {words} {words} so it is 41 now").text.startswith("41")


# The tables of docs/grading.md, example by example: the page and the grader say the same.

PAGE = (Path(__file__).parents[2] / "docs" / "grading.md").read_text(encoding="utf-8")
MORE = (Path(__file__).parents[1] / "cases" / "grading_examples.md").read_text(encoding="utf-8")


def table(section: str) -> list[list[str]]:
    """The cells of the first table of a section, of the page and of the file, without its head."""
    texts = (re.search(rf"^## {section}\n(.*?)(?:^## |\Z)", text, re.MULTILINE | re.DOTALL)[1] for text in (PAGE, MORE))
    tables = (re.search(r"^\| .*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1] for text in texts)
    rows = "".join(tables).splitlines()
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def examples() -> list[tuple[str, str, bool]]:
    results = []
    for gold, *sides, _ in table("What counts as equal"):
        for cell, right in zip(sides, (True, False), strict=True):
            results += [(gold.strip("`"), answer, right) for answer in re.findall("`([^`]+)`", cell)]
    return results


EQUAL = examples()


@pytest.mark.parametrize("frame", [r"So it is $\boxed{%s}$.", "<answer>%s</answer>", "#### %s"])
def test_the_examples_of_what_is_equal(frame):
    verdicts = [(gold, answer, str(grade(gold, frame.replace("%s", answer))) == "correct") for gold, answer, _ in EQUAL]
    assert verdicts == EQUAL


@pytest.mark.parametrize(("text", "answer", "rule"), table("Where the answer is"))
def test_an_example_of_a_position(text, answer, rule):
    assert find(text.strip("`")).text == ("" if answer == "none" else answer.strip("`"))
