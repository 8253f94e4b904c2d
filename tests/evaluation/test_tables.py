"""Evaluations of several data sets as tables."""

from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.paired import Comparison
from grpo_math.evaluation.stats import PairedDifference
from grpo_math.evaluation.summary import Record, summarize
from grpo_math.evaluation.tables import comparisons_table, sets_table


def evaluation(*categories: str, samples: int = 1, cut: int = 0) -> Evaluation:
    """``cut``: the number of completions that the length limit has cut, from the first."""
    records = [
        Record(i // samples, i % samples, category=category, truncated=i < cut) for i, category in enumerate(categories)
    ]
    return Evaluation({"samples": samples, "temperature": 0.0}, summarize(records, samples), records)


def test_a_table_has_a_line_for_each_set():
    one, other = (evaluation(*["correct"] * right, *["wrong_answer"] * (8 - right), samples=4) for right in (2, 4))
    pair = PairedDifference(0.25, 0.1, 0.375, 2, 1, 0)
    assert comparisons_table({"aime2024": Comparison(one, other, pair, pair, [], [])}).splitlines() == [
        "              n  mean@   base  trained    difference  95% paired interval",
        "aime2024      2      4  25.0%    50.0%  +25.0 points       [+10.0, +37.5]",
    ]
    assert sets_table({"a": one, "b": other}).splitlines()[-1] == "mean of 2                  37.5%"


def test_the_share_of_cut_completions_has_those_that_are_right():
    table = sets_table({"a": evaluation("truncated", "correct", "bad_format", cut=2)})
    assert table.splitlines()[-1].split()[-1] == "66.7%"
