"""What the trainer adds to TRL's: advantages, the reinforce surrogate, verdicts, metrics."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from small_trainers import config, padded_batch, relative

from grpo_math.grading import grade_batch
from grpo_math.trainer import trainer as module
from grpo_math.trainer.advantages import advantages
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

ROWS = [{"prompt": "What is 3 + 4?", "answer": "7"}, {"prompt": "What is 2 + 2?", "answer": "4"}]


def make(model, tokenizer, folder, rewards, rows=ROWS, **settings):
    return MathGRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=config(MathGRPOConfig, folder, max_steps=1, logging_steps=1, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def ramp(completions, **columns):
    return [float(i) for i in range(len(completions))]


def test_the_trained_advantages_are_those_of_the_formula_and_are_logged(small, chars, tmp_path):
    trainer = make(small, chars, tmp_path, ramp, baseline="leave_one_out", scale_rewards="batch", advantage_eps=0.5)
    trainer.train()
    expected = advantages(torch.arange(8.0).view(2, 4), "leave_one_out", "batch", 0.5).flatten()
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])), expected)
    logged = trainer.state.log_history[0]
    assert (float(logged["reward_min"]), float(logged["reward_max"])) == (0, 7)
    assert float(logged["advantage_mean"]) == pytest.approx(expected.mean().item(), abs=1e-6)


def test_the_grader_and_the_rewards_get_the_runs_time_limit_and_the_rows_formats(small, chars, tmp_path, monkeypatch):
    told = []

    def graded(golds, texts, **settings):
        told.append(settings)
        return grade_batch(golds, texts, **settings)

    def reward(completions, grade_timeout, **columns):
        told.append(grade_timeout)
        return [0.0] * len(completions)

    monkeypatch.setattr(module, "grade_batch", graded)
    rows = [{**row, "answer_format": "gsm8k"} for row in ROWS]
    make(small, chars, tmp_path, reward, rows, grade_timeout=0.25).train()
    assert told == [{"answer_format": ["gsm8k"] * 8, "timeout": 0.25}, 0.25]


@pytest.mark.parametrize("packed", [True, False])
def test_reinforce_is_the_score_function_however_old_the_rollout(packed, small, chars, tmp_path):
    trainer = make(small, chars, tmp_path, ramp, surrogate="reinforce", pack_updates=packed)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids, attention_mask, longest = padded_batch([5], 4, [6, 3, 5, 1])
    mask = attention_mask[:, -longest:]
    rows = {
        "prompt_ids": ids[:, :-longest],
        "prompt_mask": attention_mask[:, :-longest],
        "completion_ids": ids[:, -longest:],
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.0, 2.0]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": torch.full((4, longest), -3.0),
    }

    def gradient(loss):
        trainer.model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    logits = trainer.model(ids).logits[:, -longest - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, rows["completion_ids"][..., None])[..., 0]
    expected = gradient((-rows["advantages"][:, None] * logps * mask).sum() / mask.sum())
    assert relative(gradient(trainer._compute_loss(trainer.model, rows)), expected) < 1e-5


def test_no_arguments_at_all_are_enough(small, chars, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = MathGRPOTrainer(small, "accuracy", train_dataset=Dataset.from_list(ROWS))
    assert isinstance(trainer.args, MathGRPOConfig)
    assert "grpo_math" in trainer._tag_names
