"""One meaning of accuracy: training, its rewards, an evaluation and a report call the same completions the same."""

from __future__ import annotations

from statistics import fmean

import pytest

from grpo_math.evaluation.figures import category, summary
from grpo_math.grading import grade_batch
from grpo_math.rewards import accuracy, gsm8k

TEXTS = ["3 + 4 = 7\n#### 7", "It is 7.", r"so \boxed{7}", "#### 8", "I do not know.", "7 #### 7 and on"]
GOLDS = ["7"] * len(TEXTS)


def test_the_same_completions_have_the_same_accuracy_in_training_in_its_rewards_and_in_an_evaluation():
    from grpo_math.trainer.meter import shares

    grades = grade_batch(GOLDS, TEXTS, answer_format="gsm8k")
    trained = shares([str(g.verdict) for g in grades], [g.in_format for g in grades], len(TEXTS))
    records = [{"category": category(g, truncated=False), "answer": g.answer} for g in grades]
    evaluated = summary(records)
    columns = {"answer": GOLDS, "answer_format": ["gsm8k"] * len(TEXTS)}
    paid = [fmean(reward(TEXTS, TEXTS, **columns)) for reward in (accuracy, gsm8k)]
    for name, share in zip(("accuracy", "accuracy_in_format"), paid, strict=True):
        assert trained[name] == pytest.approx(evaluated[name])
        assert trained[name] == pytest.approx(share)
    assert evaluated["accuracy"] > evaluated["accuracy_in_format"] > 0
