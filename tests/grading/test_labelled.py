"""The labelled sets: precision and share right.

grading_pairs.jsonl was tuned on. The unseen sets were graded once before anything was changed for them:

    set                            n    true+  false+  true-  false-  precision  right
    grading_pairs_unseen.jsonl    243    171      0      67      5     100.0%    97.9%   ordinary forms
    grading_pairs_unseen_2.jsonl  193    144      1      38     10      99.3%    94.3%   chosen to be awkward
    grading_pairs_unseen_3.jsonl  149    110      0      37      2     100.0%    98.7%   after that

Their misses were then mended. grading_pairs_public.jsonl holds kinds of pairs from public data. The rows of
grading_pairs_farm.jsonl are answers that an earlier grader decided wrongly, each read by a person, and right spellings.
grading_pairs_rewritten.jsonl has 120 gold answers of GSM8K and MATH, drawn at random. A program rewrote each
in ten ways that keep the value and in ten that do not.
"""

import json
from pathlib import Path

import pytest
from candidates import CANDIDATES, paid_twice

from grpo_math.grading import grade_batch

CASES = Path(__file__).parents[1] / "cases"


def pairs(name):
    return [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]


def confusion(rows):
    grades = grade_batch([r["gold"] for r in rows], [r["prediction"] for r in rows])
    output = [(str(g.verdict) == "correct", r["equivalent"]) for g, r in zip(grades, rows, strict=True)]
    misses = [(r, g) for (yes, truth), r, g in zip(output, rows, grades, strict=True) if yes != truth]
    return {key: output.count(key) for key in ((True, True), (True, False), (False, True), (False, False))}, misses


@pytest.mark.parametrize(
    "name",
    [
        "grading_pairs.jsonl",
        "grading_pairs_unseen.jsonl",
        "grading_pairs_unseen_2.jsonl",
        "grading_pairs_unseen_3.jsonl",
        "grading_pairs_public.jsonl",
    ],
)
def test_a_labelled_set_reaches_99_percent_precision_and_97_percent_right(name):
    rows = pairs(name)
    counts, misses = confusion(rows)
    yes_right, yes_wrong = counts[True, True], counts[True, False]
    right = yes_right + counts[False, False]
    print(f"{name}: n={len(rows)} {counts}", *misses, sep="\n")
    assert not any(grade.verdict.ungradable for _, grade in misses)
    assert yes_right / (yes_right + yes_wrong) >= 0.99
    assert right / len(rows) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grading_pairs_farm.jsonl", "grading_pairs_rewritten.jsonl"])
def test_of_large_sets_at_most_3_in_1000_wrong_are_paid_and_5_in_1000_right_are_not(name):
    counts, misses = confusion(pairs(name))
    assert counts[True, False] <= 0.003 * (counts[True, False] + counts[False, False]), misses
    assert counts[False, True] <= 0.005 * (counts[False, True] + counts[True, True]), misses
    assert not misses or "farm" not in name  # each was decided wrongly once


@pytest.mark.slow
def test_no_text_with_several_candidates_is_paid_for_more_than_one_of_them():
    total, results = paid_twice(CANDIDATES, stride=97)
    assert total > 1_000
    assert results == []


@pytest.mark.parametrize("text", [r"\boxed{x = ABC}", r"\boxed{\mathbf{ABC}}", "#### ABC"])
def test_the_letters_of_a_word_or_an_ordering_keep_their_order(text):
    for gold, verdict in (("ABC", "correct"), ("BCA", "wrong"), ("CAB", "wrong")):
        assert str(grade_batch([gold], [text])[0].verdict) == verdict


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("2021", r"\pm 2021"),
        (r"\pm 2021", "2021"),
        ("1,2,3", "n=2,3,4"),
        ("12:00", "1:00"),
    ],
)
def test_a_known_false_positive_of_math_verify_is_wrong_here(gold, answer):
    assert str(grade_batch([gold], [rf"\boxed{{{answer}}}"])[0].verdict) == "wrong"


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("42", r"First \boxed{3}, then \boxed{42}"),
        ("42", r"\boxed {42}"),
        ("1000", "1 000"),
        (r"\frac{1}{2}\%", r"\boxed{\frac12\%}"),
        ("74", "74°"),
        ("3/2", "1 1/2"),
        (r"\sqrt{3}", "sqrt(3)"),
        ("y=2", "2 = y"),
    ],
)
def test_a_known_false_negative_of_math_verify_is_correct_here(gold, completion):
    assert str(grade_batch([gold], [completion])[0].verdict) == "correct"
