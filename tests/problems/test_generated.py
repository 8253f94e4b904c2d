"""problems.py: the same bytes everywhere, disjoint splits, right answers, and English that reads well."""

import ast
import itertools
import json
import operator
import re
from collections import Counter
from functools import lru_cache
from hashlib import sha256

import pytest

from grpo_math.problems import generated
from grpo_math.problems.generated import FORMS, LEVELS, SHAPES, SPLITS, arithmetic, count, generate

ALL = tuple(LEVELS)[:5]  # long_products has a test of its own
MIXED = ("sums", "differences", "two_step", "word")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

# One case for each story, worked by hand: the numbers a, b, c and the answer.
WORKED = {
    "finds": ((3, 4), 7),
    "together": ((5, 2), 7),
    "birds": ((8, 3), 11),
    "reads": ((12, 9), 21),
    "at_first": ((4, 6), 10),
    "older": ((7, 5), 12),
    "stop": ((10, 3), 13),
    "longer": ((2, 11), 13),
    "eats": ((9, 4), 5),  # 9 cookies, 4 eaten
    "gives": ((12, 5), 7),
    "more_than": ((8, 2), 6),
    "collects": ((10, 4), 6),  # wants 10, has 4
    "cuts": ((11, 9), 2),
    "descends": ((9, 4), 5),
    "absent": ((12, 3), 9),
    "younger": ((10, 2), 8),
    "boxes": ((3, 4), 12),
    "buys": ((5, 6), 30),
    "rows": ((7, 8), 56),
    "walks": ((2, 9), 18),
    "gives_each": ((3, 5), 15),
    "earns": ((12, 4), 48),
    "times_as_many": ((6, 3), 18),
    "shares": ((4, 3), 4),  # 12 things, 3 friends
    "packs": ((5, 2), 5),  # 10 things, 2 to a box
    "chairs": ((6, 7), 6),  # 42 chairs, 7 rows
    "price": ((9, 3), 9),  # 27 dollars, 3 things
    "finishes": ((8, 5), 8),  # 40 pages, 5 a day
    "twice": ((4,), 12),  # 4 and 8
    "three_days": ((2, 3, 4), 9),
    "colors": ((5, 6, 7), 18),
    "on_and_off": ((9, 5, 3), 11),
    "bakes": ((6, 4, 7), 3),
    "shelf": ((8, 3, 2), 9),
    "spends": ((3, 4, 12), 5),  # 12 dollars, 3 for lunch, 4 for a drink
    "loses": ((2, 5, 10), 3),  # 10 things, 2 given, 5 lost
    "loose": ((3, 4, 5), 17),
    "saves": ((2, 6, 7), 19),  # 7 dollars, 2 in each of 6 weeks
    "tickets": ((4, 5, 3), 23),
    "broken": ((2, 6, 5), 7),
    "works": ((3, 8, 4), 20),
    "fruit": ((2, 3, 4), 20),
    "runs": ((3, 2, 7), 35),
    "cheaper": ((9, 4, 3), 15),
    "takes_out": ((8, 5, 2), 6),  # 2 boxes of 8, 5 out of each
}


@lru_cache
def everything() -> list[generated.Row]:
    return [
        problem for split in SPLITS for level in ALL for problem in generate(split, count(level, split), 0, (level,))
    ]


def calculated(text: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        return node.value

    return value(ast.parse(text, mode="eval").body)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_on_every_platform():
    made = [list(p.values()) for split in SPLITS for seed in (0, 7) for p in generate(split, 200, seed, MIXED)]
    digest = sha256(json.dumps(made).encode()).hexdigest()
    assert digest == "863454a356a28119fe90b7e0f125ec43d4f795d21466f0f458b54709d0819147"


@pytest.mark.slow
def test_long_products_are_of_three_and_four_digits_and_split_like_the_others():
    made = {split: generate(split, 500, 0, ("long_products",)) for split in SPLITS}
    assert not {p["problem"] for p in made["train"]} & {p["problem"] for p in made["heldout"]}
    for p in (p for problems in made.values() for p in problems):
        a, b = map(int, re.fullmatch(r"What is (\d{3,4}) \* (\d{3,4})\?", p["problem"]).groups())
        assert a * b == int(p["answer"])


@pytest.mark.slow
def test_no_arithmetic_is_in_both_splits_whatever_the_order_or_the_story():
    of = {split: set() for split in SPLITS}
    shapes = {(level, form.name): form.shape for level, forms in FORMS.items() for form in forms}
    for split in SPLITS:
        for level in ALL:
            for p in generate(split, count(level, split), 0, (level,)):
                level_name, form, numbers = p["id"].split("/")
                values = tuple(map(int, numbers.split(",")))
                of[split].add(arithmetic(shapes[level_name, form], values))
    assert not of["train"] & of["heldout"]
    assert "a+b 3 4" in of["train"]
    assert arithmetic("a+b", (4, 3)) == arithmetic("a+b", (3, 4)) == "a+b 3 4"
    assert arithmetic("a-b", (4, 3)) != arithmetic("a-b", (3, 4))


@pytest.mark.parametrize("name", sorted(name for name in SHAPES if SHAPES[name].commuting))
def test_the_numbers_that_may_change_places_leave_the_answer_as_it_is(name):
    shape = SHAPES[name]
    numbers = (11, 7, 5)[: shape.numbers]
    for swapped in itertools.permutations(numbers[: shape.commuting]):
        assert shape.answer(*swapped, *numbers[shape.commuting :]) == shape.answer(*numbers)


@pytest.mark.slow
def test_every_answer_of_the_arithmetic_levels_is_what_python_calculates():
    checked = 0
    for p in everything():
        if p["level"] != LEVELS["word"]:
            expression = re.fullmatch(r"What is ([\d +*()-]+)\?", p["problem"])
            assert expression, p
            assert p["answer"] == str(calculated(expression[1])), p
            assert int(p["answer"]) >= 0
            checked += 1
    assert checked == 784 + 465 + 121 + 8045


def test_every_story_is_worked_by_hand():
    assert {form.name for form in FORMS["word"]} == set(WORKED)


@pytest.mark.parametrize("form", FORMS["word"], ids=lambda form: form.name)
def test_every_story_has_the_answer_worked_by_hand(form):
    numbers, answer = WORKED[form.name]
    made = generated._row(form, numbers)
    assert made["answer"] == str(answer)
    told = list(numbers)
    if form.shape == "ab/b":
        told[0] = numbers[0] * numbers[1]
    assert sorted(map(int, re.findall(r"\d+", made["problem"]))) == sorted(told)


def test_the_texts_of_all_problems_read_as_sentences():
    texts = [p["problem"] for p in everything()]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert re.fullmatch(r"[A-Z][^{}]*\?", text), text
        assert text.isascii()
        assert "  " not in text
        assert not re.search(r"\b(?:1 of them are|There (?:are|were) 1 |There (?:is|was) (?:[2-9]|\d\d))", text), text
        assert not re.search(r"\b[Aa] [aeiou]", text), text


def test_levels_are_mixed_evenly_and_shuffled():
    made = generate("heldout", 200, 0, MIXED)
    assert Counter(p["level"] for p in made) == {1: 50, 2: 50, 4: 50, 5: 50}
    assert len({p["level"] for p in made[:20]}) == 4
    assert {p["id"] for p in made} != {p["id"] for p in generate("heldout", 200, 1, MIXED)}
    assert len({p["problem"] for p in generate("heldout", 256)}) == 256  # the demo's
    assert Counter(p["level"] for p in generate("train", 5)) == {1: 3, 2: 2}
