"""What is a unit, and what only looks like one."""

from itertools import product
from string import ascii_letters

import pytest

from grpo_math.grading import Verdict, grade
from grpo_math.grading.equal.units import split

# Letters that are a unit of their own behind a number and a space. "3 a" is three of an article: "3 a day".
ALONE = "msgLNJWVAKa"


@pytest.mark.parametrize("letter", ascii_letters)
def test_no_single_letter_variable_is_a_unit(letter):
    assert split(f"3{letter}") == (f"3{letter}", None)
    assert (split(f"3 {letter}")[1] is not None) == (letter in ALONE)
    for answer in (f"3{letter}", f"{letter}"):
        assert grade("3", rf"\boxed{{{answer}}}") is not Verdict.CORRECT
        assert grade(f"3{letter}", r"\boxed{3}") is not Verdict.CORRECT


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
    assert split(f"5{joined}{words}")[1] is None
    assert grade("5", rf"\boxed{{5{joined}{words}}}") is not Verdict.CORRECT
    assert grade("5", rf"\boxed{{5{joined}\text{{{words}}}}}") is not Verdict.CORRECT


@pytest.mark.parametrize(
    ("text", "bare", "unit"),
    [
        ("5 square inches", "5", {"in": 2}),
        (r"5\text{ cm}^2", "5", {"cm": 2}),
        ("60 mph", "60", {"mile": 1, "h": -1}),
        ("3 apples", "3", {}),
        ("2 pi", "2 pi", None),
        ("USD 20", "20", {"dollar": 1}),
    ],
)
def test_a_unit_is_split_off(text, bare, unit):
    assert split(text) == (bare, unit)
