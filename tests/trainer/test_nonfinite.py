"""A gradient that is not finite moves no weight, is counted, and ends the run when it goes on."""

from __future__ import annotations

import pytest
import torch
from small_trainers import letters, make, weights

from grpo_math.errors import UserError
from grpo_math.run import metrics
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 1.0, "logging_steps": 1, "max_steps": 4}


def trainer_of(small, chars, tmp_path, poisoned, factor=float("nan"), **settings):
    """``poisoned``: the optimizer steps, from 0, whose loss is multiplied by ``factor``."""
    trainer = make(MathGRPOTrainer, MathGRPOConfig, small, chars, tmp_path, letters, **{**ADAM, **settings})
    loss_of, snapshots = trainer._loss_of, []

    def loss(model, rows):
        snapshots.append(weights(trainer.model))
        return loss_of(model, rows) * (factor if trainer.state.global_step in poisoned else 1.0)

    trainer._loss_of = loss
    return trainer, snapshots


@pytest.mark.parametrize(("factor", "max_grad_norm"), [(float("nan"), 1.0), (float("inf"), 0.0)])
def test_the_step_is_left_out_and_the_run_goes_on(factor, max_grad_norm, small, chars, tmp_path):
    trainer, before = trainer_of(small, chars, tmp_path, {1}, factor, max_grad_norm=max_grad_norm)
    trainer.train()
    after = weights(trainer.model)
    assert torch.equal(before[1], before[2])
    assert not torch.equal(before[0], before[1])
    assert not torch.equal(before[2], before[3])
    assert after.isfinite().all()
    skipped = [line[metrics.SKIPPED] for line in trainer.state.log_history if metrics.SKIPPED in line]
    assert skipped == [0.0, 1.0, 0.0, 0.0]


def test_so_many_in_a_row_end_the_run_with_a_checkpoint_of_finite_weights(small, chars, tmp_path):
    trainer, before = trainer_of(small, chars, tmp_path, {1, 2, 3}, max_nonfinite_steps=2)
    with pytest.raises(
        UserError, match=r"not finite in steps 2 to 3, 2 in a row: the weights are still those of step 1"
    ):
        trainer.train()
    assert torch.equal(weights(trainer.model), before[1])
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
