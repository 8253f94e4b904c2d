"""The tables of docs/grading.md, example by example: the page and the grader say the same."""

import re
from pathlib import Path

import pytest

from grpo_math.grading import grade
from grpo_math.grading.where import find

PAGE = (Path(__file__).parents[2] / "docs" / "grading.md").read_text(encoding="utf-8")


def table(section: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    text = re.search(rf"^## {section}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)[1]
    rows = re.search(r"^\| .*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)[1].splitlines()
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def examples() -> list[tuple[str, str, bool]]:
    results = []
    for gold, *sides, _ in table("What counts as equal"):
        for cell, right in zip(sides, (True, False), strict=True):
            results += [(gold.strip("`"), answer, right) for answer in re.findall("`([^`]+)`", cell)]
    return results


@pytest.mark.parametrize(("gold", "answer", "right"), examples())
@pytest.mark.parametrize("frame", [r"So it is $\boxed{%s}$.", "<answer>%s</answer>", "#### %s"])
def test_an_example_of_what_is_equal(gold, answer, right, frame):
    assert (str(grade(gold, frame.replace("%s", answer))) == "correct") == right


@pytest.mark.parametrize(("text", "answer", "rule"), table("Where the answer is"))
def test_an_example_of_a_position(text, answer, rule):
    assert find(text.strip("`")).text == ("" if answer == "none" else answer.strip("`"))
