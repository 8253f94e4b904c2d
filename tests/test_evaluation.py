"""Evaluation: categories, figures by hand, and real answers of the real model."""

from __future__ import annotations

import json

import pytest

from grpo_math.data import load_problems
from grpo_math.errors import ConfigError
from grpo_math.evaluation import evaluate, summary


def record(problem: str, category: str, answer: str | None = "1") -> dict:
    right = category in ("correct", "correct_answer_bad_format")
    return {"id": problem, "category": category, "verdict": "correct" if right else "wrong", "answer": answer}


def test_figures_of_one_sample_a_problem():
    rows = [record("a", "correct"), record("b", "correct_answer_bad_format"), record("c", "truncated")]
    figures = summary([*rows, record("d", "wrong_answer")])
    assert figures["n"] == 4
    assert figures["accuracy"] == 0.25  # right and in the format
    assert figures["answer_accuracy"] == 0.5  # right in any form
    assert sum(figures["categories"].values()) == 4
    lo, hi = figures["ci95"]
    assert (round(lo, 4), round(hi, 4)) == (0.0456, 0.6994)  # Wilson, 1 of 4


def test_figures_of_several_samples_a_problem():
    # problem a: 1 of 2 right; problem b: 2 of 2, both answering 7
    rows = [
        record("a", "correct", "7"),
        record("a", "wrong_answer", "8"),
        record("b", "correct", "7"),
        record("b", "correct", "7"),
    ]
    figures = summary(rows, samples=2)
    assert figures["n"] == 2
    assert figures["accuracy"] == 0.75
    assert figures["pass@k"] == {"1": 0.75, "2": 1.0}
    assert figures["maj@k"] == {"1": 0.75, "2": 0.75}  # problem a is a tie: one half


@pytest.fixture(scope="module")
def rows():
    return load_problems("generated:sums", "heldout", limit=12)


def test_the_real_model_answers_some_sums_and_the_file_holds_every_completion(smollm, rows, tmp_path):
    results = evaluate(smollm, rows, max_new_tokens=16, progress=False, output=tmp_path / "results.json")
    assert results["n"] == 12
    assert 0 < results["accuracy"] < 1
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [row["id"] for row in saved["rows"]] == [row["id"] for row in rows]
    for row in saved["rows"]:
        assert (row["category"] == "correct") == (row["verdict"] == "correct" and row["in_format"])
        assert row["truncated"] == (row["tokens"] == 16 and row["truncated"])


def test_greedy_answers_do_not_depend_on_the_batch_or_on_the_callers_generator(smollm, rows):
    import torch

    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = evaluate(smollm, rows[:6], max_new_tokens=12, batch_size=1, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    six = evaluate(smollm, rows[:6], max_new_tokens=12, batch_size=6, progress=False)
    same = sum(a["completion"] == b["completion"] for a, b in zip(one["rows"], six["rows"], strict=True))
    assert same >= 5  # in bfloat16 a near tie may fall either way


def test_samples_are_drawn_by_seed(smollm, rows):
    draws = [
        [
            row["completion"]
            for row in evaluate(
                smollm, rows[:2], samples=4, temperature=1.5, seed=seed, max_new_tokens=8, progress=False
            )["rows"]
        ]
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0][:4])) > 1


def test_bad_arguments_are_one_line(smollm, rows):
    with pytest.raises(ConfigError, match="samples=4 cannot be drawn at temperature 0"):
        evaluate(smollm, rows, samples=4)
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate(smollm, [])
