"""The metrics of graded completions, by hand, and equal in training, in its rewards and in an evaluation."""

from statistics import fmean

import pytest

from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.stats import wilson_for_means
from grpo_math.evaluation.summary import Record, category, summarize
from grpo_math.evaluation.tables import metrics_table
from grpo_math.grading import grade_batch
from grpo_math.rewards import accuracy, gsm8k
from grpo_math.trainer.meter import verdict_metrics


def problem(subject: str | None, level: int, *samples: tuple[str, str | None]) -> list[Record]:
    return [Record("p", subject=subject, level=level, category=c, answer=a) for c, a in samples]


# The share of right answers of each problem: 1, 1/2, 1/2, 0.
ROWS = [
    *problem("algebra", 1, ("correct", "7"), ("correct", "7")),
    *problem("algebra", 2, ("correct", "7"), ("wrong_answer", "8")),
    *problem("geometry", 2, ("correct_answer_bad_format", "7"), ("truncated", None)),
    *problem(None, 1, ("bad_format", None), ("bad_format", "8")),
]


NOT_SUMMED = {"format", "samples", "temperature", "seconds", "versions", "prompt_of_first_row"}


def evaluation(records: list[Record], samples: int) -> Evaluation:
    return Evaluation({"samples": samples, "temperature": 0.7}, summarize(records, samples), records)


def interval(*values: float) -> list[float]:
    return list(wilson_for_means(values, 2 * len(values)))


def part(*values: float) -> dict:
    return {"n": len(values), "accuracy": fmean(values), "ci95": interval(*values)}


def test_all_figures_of_several_samples_a_problem():
    each = interval(1, 0.5, 0.5, 0)
    metrics = evaluation(ROWS, 2).to_dict(records=False)
    assert {name: metrics[name] for name in metrics.keys() - NOT_SUMMED} == {
        "n": 4,
        "accuracy": 0.5,
        "ci95": each,
        "accuracy_in_format": 3 / 8,
        "mean@n": {"n": 2, "mean": 0.5, "ci95": each},
        "categories": {
            "correct": 3,
            "correct_answer_bad_format": 1,
            "wrong_answer": 1,
            "bad_format": 2,
            "truncated": 1,
            "ungradable": 0,
        },
        "pass@k": {"1": 0.5, "2": 0.75},
        "pass@k_ci95": {"1": each, "2": interval(1, 1, 1, 0)},
        # Of two votes, 7 against 8 is a tie, and 7 against no answer is won.
        "maj@k": {"1": 0.5, "2": (1 + 0.5 + 1 + 0) / 4},
        "maj@k_ci95": {"1": each, "2": interval(1, 0.5, 1, 0)},
        "by_subject": {"algebra": part(1, 0.5), "geometry": part(0.5), "none": part(0)},
        "by_level": {"1": part(1, 0), "2": part(0.5, 0.5)},
    }
    for samples, ks in ((6, "1246"), (8, "1248")):  # each power of two, and the number of samples
        figures = evaluation([Record("p", category="correct")] * samples, samples).to_dict(records=False)
        assert "".join(figures["pass@k"]) == "".join(figures["maj@k"]) == ks
        assert not figures.keys() & {"by_subject", "by_level"}


def test_the_table_of_several_samples():
    assert metrics_table(evaluation(ROWS, 2)).splitlines() == [
        "4 problems, 2 samples each at temperature 0.7",
        "                            n  share    95% interval",
        "accuracy                    4  50.0%  18.8% to 81.2%",
        "accuracy in format          4  37.5%",
        "pass@2                      4  75.0%  30.1% to 95.4%",
        "maj@2                       4  62.5%  22.2% to 90.7%",
        "",
        "correct, in the format      3  37.5%",
        "correct, not in the format  1  12.5%",
        "wrong, in the format        1  12.5%",
        "wrong, not in the format    2  25.0%",
        "cut at the length limit     1  12.5%",
        "algebra                     2  75.0%  25.6% to 96.3%",
        "geometry                    1  50.0%   5.5% to 94.5%",
        "none                        1   0.0%   0.0% to 79.3%",
        "level 1                     2  50.0%   9.5% to 90.5%",
        "level 2                     2  50.0%   9.5% to 90.5%",
    ]


TEXTS = ["3 + 4 = 7\n#### 7", "It is 7.", r"so \boxed{7}", "#### 8", "I do not know.", "7 #### 7 and on"]
GOLDS = ["7"] * len(TEXTS)


def test_the_same_completions_have_the_same_accuracy_in_training_in_its_rewards_and_in_an_evaluation():
    grades = grade_batch(GOLDS, TEXTS, answer_format="gsm8k")
    trained = verdict_metrics([str(g.verdict) for g in grades], [g.in_format for g in grades], len(TEXTS))
    records = [Record(i, category=category(g, truncated=False), answer=g.answer) for i, g in enumerate(grades)]
    evaluated = evaluation(records, 1).to_dict(records=False)
    columns = {"answer": GOLDS, "answer_format": ["gsm8k"] * len(TEXTS)}
    for name, reward in (("accuracy", accuracy), ("accuracy_in_format", gsm8k)):
        assert trained[name] == pytest.approx(evaluated[name]) == pytest.approx(fmean(reward(TEXTS, TEXTS, **columns)))
    assert evaluated["accuracy"] > evaluated["accuracy_in_format"] > 0
