"""The labelled sets: precision and share right.

grading_pairs.jsonl was tuned on. The unseen sets were graded once before anything was changed for them:

    set                            n    true+  false+  true-  false-  precision  right
    grading_pairs_unseen.jsonl    243    171      0      67      5     100.0%    97.9%   ordinary forms
    grading_pairs_unseen_2.jsonl  193    144      1      38     10      99.3%    94.3%   chosen to be awkward
    grading_pairs_unseen_3.jsonl  149    110      0      37      2     100.0%    98.7%   after that

Their misses were then mended. grading_pairs_public.jsonl holds kinds of pairs from public data. The rows of
grading_pairs_earlier.jsonl are answers that an earlier grader decided wrongly, each read by a person, and right
spellings. grading_pairs_rewritten.jsonl has 120 gold answers of GSM8K and MATH, drawn at random. A program rewrote each
in ten ways that keep the value and in ten that do not. grading_tongues.jsonl has sentences in twenty further languages,
ten of which vocabulary.json lacks. Each row of grading_tongues_2.jsonl was decided wrongly once:
several answers, negated choices, and units, decimals and intervals as other languages write them. grading_kinds.jsonl
has kinds of versions 17 to 19: the text of an option, "Yes, ...", a quantity with its value, quotes, a sentence that
goes on, lists in JSON, units of one quantity.
"""

import json
import runpy
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from candidates import CANDIDATES, paid_twice

from grpo_math.grading import grade_batch

CASES = Path(__file__).parents[1] / "cases"


def graded(name):
    """The rows whose grade is, and is not, what the label says: {(correct, label): rows}."""
    rows = [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]
    results = {key: [] for key in product((True, False), repeat=2)}
    for row, grade in zip(
        rows, grade_batch(*([row[name] for row in rows] for name in ("gold", "prediction"))), strict=True
    ):
        assert not grade.verdict.ungradable, row
        results[grade.verdict == "correct", row["equivalent"]].append((row, grade))
    return results


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
    rows = graded(name)
    paid, misses = rows[True, True] + rows[True, False], rows[True, False] + rows[False, True]
    assert len(rows[True, True]) >= 0.99 * len(paid), misses
    assert len(misses) <= 0.03 * sum(map(len, rows.values())), misses


@pytest.mark.parametrize("name", ["grading_pairs_earlier.jsonl", "grading_pairs_rewritten.jsonl"])
def test_of_large_sets_at_most_3_in_1000_wrong_are_paid_and_5_in_1000_right_are_not(name):
    rows = graded(name)
    assert len(rows[True, False]) <= 0.003 * len(rows[True, False] + rows[False, False]), rows[True, False]
    assert len(rows[False, True]) <= 0.005 * len(rows[False, True] + rows[True, True]), rows[False, True]
    # Each was decided wrongly once.
    assert "earlier" not in name or not rows[True, False] + rows[False, True]


@pytest.mark.parametrize("name", ["grading_tongues.jsonl", "grading_tongues_2.jsonl", "grading_kinds.jsonl"])
def test_an_answer_is_found_in_every_language_and_a_closing_that_contradicts_the_sum_is_the_answer(name):
    rows = graded(name)
    assert not rows[True, False] + rows[False, True]


@pytest.mark.parametrize("stride", [389, pytest.param(97, marks=pytest.mark.slow)])
def test_no_text_with_several_candidates_is_paid_for_more_than_one_of_them(stride):
    total, results = paid_twice(CANDIDATES, stride)
    assert total > 250
    assert results == []


@pytest.mark.slow
def test_the_mistakes_in_a_labelled_file_are_counted_for_both_graders_by_source(tmp_path, capsys):
    pairs = [("1", "1", True), ("1", "2", True), ("1", "1", False), ("2021", r"\pm 2021", False)]
    rows = [{"gold": gold, "prediction": text, "equivalent": label} for gold, text, label in pairs]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "source": "theirs"}]))
    runpy.run_path(str(CASES.parent / "benchmarks" / "grading.py"))["mistakes"]([str(path)])
    assert "| mine.jsonl | 4 | 1 | 1 | 2 | 1 |\n| theirs | 1 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out


ORDERED = [r"\boxed{x = ABC}", r"\boxed{\mathbf{ABC}}", "#### ABC"]


@pytest.mark.parametrize(
    ("gold", "completion", "verdict"),
    [
        # Math-Verify calls these correct.
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", "wrong"),
        (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", "wrong"),
        ("2021", r"\boxed{\pm 2021}", "wrong"),
        (r"\pm 2021", r"\boxed{2021}", "wrong"),
        ("1,2,3", r"\boxed{n=2,3,4}", "wrong"),
        ("12:00", r"\boxed{1:00}", "wrong"),
        # Math-Verify calls these wrong.
        ("42", r"First \boxed{3}, then \boxed{42}", "correct"),
        ("42", r"\boxed {42}", "correct"),
        ("1000", "1 000", "correct"),
        (r"\frac{1}{2}\%", r"\boxed{\frac12\%}", "correct"),
        ("74", "74°", "correct"),
        ("3/2", "1 1/2", "correct"),
        (r"\sqrt{3}", "sqrt(3)", "correct"),
        ("y=2", "2 = y", "correct"),
        # The letters of a word or an ordering keep their order.
        *(("ABC", text, "correct") for text in ORDERED),
        *(("BCA", text, "wrong") for text in ORDERED),
        *(("CAB", text, "wrong") for text in ORDERED),
    ],
)
def test_a_known_mistake_of_other_graders_is_not_made_here(gold, completion, verdict):
    assert str(grade_batch([gold], [completion])[0].verdict) == verdict


# The gold solutions of GSM8K and MATH against themselves and against their neighbours


def rows(data_dir, *names):
    return [json.loads(line) for name in names for line in (data_dir / f"{name}.jsonl").read_text().splitlines()]


def verdicts(golds, completions, **options):
    return Counter(str(grade.verdict) for grade in grade_batch(golds, completions, **options))


@pytest.mark.slow
def test_every_gsm8k_solution_is_correct_against_its_own_gold_and_wrong_against_the_next_rows(data_dir):
    answers = [row["answer"] for row in rows(data_dir, "gsm8k/train", "gsm8k/test")]
    bare = [answer.split("####")[1].strip() for answer in answers]
    assert verdicts(answers, answers) == verdicts(bare, answers, answer_format="gsm8k") == {"correct": 8792}
    numbers = [number.replace(",", "") for number in bare]
    others = [i for i in range(len(answers)) if numbers[i] != numbers[i - 1]]
    assert len(others) > 8600
    assert verdicts([answers[i] for i in others], [answers[i - 1] for i in others]) == {"wrong": len(others)}


@pytest.mark.slow
def test_math_solutions_are_correct_against_their_own_answers(data_dir):
    math = rows(data_dir, "math/train", "math/test_outside_math500", "math500/test")
    assert len(math) == 12_500
    grades = grade_batch([row["answer"] for row in math], [row["solution"] for row in math])
    # Two gold answers are empty.
    ungradable = {row["unique_id"] for row, g in zip(math, grades, strict=True) if g.verdict.ungradable}
    assert ungradable == {"train/number_theory/7115.json", "train/number_theory/7117.json"}
    # The others box several answers next to each other, where the data takes the last one for the gold answer, or check
    # "our answer" after the box. One boxes 12 and says 6.
    others = [(row["unique_id"], g) for row, g in zip(math, grades, strict=True) if str(g.verdict) != "correct"]
    assert len(others) <= 30, others
