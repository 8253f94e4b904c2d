"""Gold answers under TRL's name `solution`, rows without one, and rewards that cannot do without."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset, IterableDataset
from small_trainers import config

from grpo_math import MathGRPOConfig, MathGRPOTrainer
from grpo_math.errors import ConfigError
from grpo_math.trainer.gold_answers import check_gold_answers


def by_grade(completions, grade, **columns):
    return [float(g.verdict == "correct") for g in grade]


def rows(*golds, column="solution"):
    return Dataset.from_list([{"prompt": f"What is {gold}?", column: gold} for gold in golds])


def trainer(model, tokenizer, folder, reward, data, **settings):
    settings = {"max_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4, **settings}
    args = config(MathGRPOConfig, folder, **settings)
    return MathGRPOTrainer(model, reward, args, data, processing_class=tokenizer)


@pytest.mark.parametrize(
    "data", [rows(7, 8, column="answer"), rows("so $\\boxed{7}$", "#### 8"), rows("7", "8").to_iterable_dataset()]
)
def test_a_solution_is_graded_as_an_answer_is(data, small, chars, tmp_path, caplog):
    seen = []

    def reward(completions, grade, **columns):
        seen.extend(grade)
        return [float(g.verdict == "correct") for g in grade]

    made = trainer(small, chars, tmp_path, [reward, "accuracy"], data)
    made.train()
    assert len(seen) == 8  # each completion is graded once
    logged = made.state.log_history[0]
    assert float(logged["accuracy"]) == pytest.approx(float(logged["rewards/accuracy/mean"]))
    assert sum(float(value) for name, value in logged.items() if name.startswith("grading/")) == pytest.approx(1)
    assert float(logged["grading/bad_gold"]) == 0
    assert "gold" not in caplog.text


def test_rows_without_a_gold_are_said_once_and_are_ungradable(small, chars, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        made = trainer(small, chars, tmp_path, "accuracy", rows("7", None), max_steps=2)
        made.train()
    assert caplog.text.count("1 of 2 rows of train_dataset have no gold answer (answer or solution)") == 1
    assert float(made.state.log_history[0]["grading/bad_gold"]) == 0.5


@pytest.mark.parametrize("reward", [by_grade, ["format_soft", by_grade], "accuracy", "llm_judge"])
@pytest.mark.parametrize(
    "data",
    [
        Dataset.from_list([{"prompt": "1 + 1?", "target": "2", "answer": None}]),
        IterableDataset.from_generator(lambda: iter([{"prompt": "1 + 1?", "target": "2"}])),
    ],
)
def test_a_reward_that_needs_golds_is_refused_before_weights_load(reward, data, tmp_path):
    with pytest.raises(
        ConfigError, match=r"needs gold answers, and .*: give each row its gold in a column answer or solution"
    ):
        MathGRPOTrainer("a/model-that-is-nowhere", reward, config(MathGRPOConfig, tmp_path), data)


def test_rewards_that_read_no_gold_need_none():
    data = Dataset.from_list([{"prompt": "1 + 1?"}])
    output = check_gold_answers(["format_soft", lambda completions, grade=None, **columns: []], data)
    assert output.startswith("train_dataset has no gold")
    assert check_gold_answers(by_grade, None) is None


@pytest.mark.parametrize("name", ["completions", "grade", "trainer_state"])
def test_a_column_that_training_would_replace_is_refused_before_weights_load(name, small, chars, tmp_path):
    data = rows("7", "8").add_column(name, ["a", "b"])
    with pytest.raises(ConfigError, match=f"dataset='train_dataset' has a column '{name}'"):
        trainer(small, chars, tmp_path, by_grade, data)
    assert check_gold_answers(lambda completions, **columns: [], Dataset.from_list([{"prompt": "a?", "grade": "5th"}]))
