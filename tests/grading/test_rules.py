"""The rules of docs/rewards.md, example by example: the page and the grader say the same."""

import re
from pathlib import Path

import pytest

from grpo_math.grading import grade

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def section(start: str, end: str) -> list[list[str]]:
    """The cells of the table rows between two lines of the page."""
    text = PAGE.partition(start)[2].partition(end)[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def examples() -> list[tuple[str, str, str]]:
    found = []
    for _, gold, right, wrong, _ in section("## What counts as an answer", "Where the answer stands"):
        for cell, verdict in ((right, "right"), (wrong, "wrong")):
            found += [(gold.strip("`"), answer, verdict) for answer in re.findall("`([^`]+)`", cell)]
    return found


@pytest.mark.parametrize(("gold", "answer", "verdict"), examples())
@pytest.mark.parametrize("frame", [r"So it is $\boxed{%s}$.", "<answer>%s</answer>", "#### %s"])
def test_an_example_of_a_rule(gold, answer, verdict, frame):
    paid = str(grade(gold, frame.replace("%s", answer))) == "correct"
    assert paid == (verdict == "right")


@pytest.mark.parametrize(("text", "verdict"), section("The text around it must stand by it", "Three of these rules"))
def test_an_example_of_a_text(text, verdict):
    assert (str(grade("42", text.strip("`"))) == "correct") == verdict.startswith("right")


def test_the_page_has_its_examples():
    assert len(examples()) > 100
