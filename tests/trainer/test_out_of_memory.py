"""Out of memory in an update: half the tokens a pass, the same weights in the end.

Memory is made to run out by hooks on the model: there is no GPU here whose memory could.
"""

from __future__ import annotations

import traceback

import pytest
import torch
from small_trainers import SMALL, letters, make, relative, runs_out_forward, weights

from grpo_math.errors import UserError
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer


def trainer_of(small, chars, tmp_path, **settings):
    extra = {**SMALL, "advantage_eps": 1e-4, **settings}
    return make(MathGRPOTrainer, MathGRPOConfig, small, chars, tmp_path, letters, **extra)


def runs_out_backward(model, limit):
    """Every backward pass with more tokens fails at the first layer, when the others have their gradients."""

    def hook(module, grad_input, grad_output):
        if grad_output[0].size(1) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.model.layers[0].register_full_backward_hook(hook)


@pytest.mark.full(keep=["dapo-runs_out_forward", "bnpo-runs_out_backward"])
@pytest.mark.parametrize("where", [runs_out_forward, runs_out_backward])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_the_step_is_done_again_with_fewer_tokens_and_gives_the_same_weights(
    where, loss_type, trl_run, small, chars, tmp_path, caplog
):
    settings = {"loss_type": loss_type}
    trainer = trainer_of(small, chars, tmp_path, **settings)
    where(trainer.model, 30)
    trainer.train()
    assert trainer.state.global_step == 5
    assert 0 < trainer.budget.tokens <= 60
    assert "max_tokens_per_micro_batch is now" in caplog.text
    assert relative(weights(trainer.model), trl_run(letters, {**SMALL, **settings})[1]) < 1e-6


def test_memory_that_runs_out_while_earlier_steps_are_replayed_loses_no_step(trl_run, small, chars, tmp_path):
    settings = {"loss_type": "bnpo"}
    trainer, failures = trainer_of(small, chars, tmp_path, logging_steps=1, **settings), []

    def hook(module, args, kwargs):
        # Once in a second training step, and once more while the first one is replayed for it.
        names = [frame.name for frame in traceback.extract_stack()]
        replays = "recompute_and_step" in names and "training_step" not in names[names.index("recompute_and_step") :]
        if torch.is_grad_enabled() and trainer._retry.earlier and len(failures) < 2 and replays == bool(failures):
            failures.append(replays)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    counts, log = [], trainer.log

    def counted(*args):
        if values := trainer._metrics["train"].get("entropy"):
            counts.append((len(values), sum(len(step["micro_batches"]) for step in trainer._buffered_inputs)))
        return log(*args)

    trainer.log = counted
    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)
    trainer.train()
    assert failures == [False, True]
    assert len(counts) == 5
    logged, computed = ([count[i] for count in counts] for i in (0, 1))
    # A replayed training step is logged once: the first, as the one micro-batch that it was before it was split in two.
    assert logged == [computed[0] - 1, *computed[1:]]
    assert relative(weights(trainer.model), trl_run(letters, {**SMALL, **settings})[1]) < 1e-6


@pytest.mark.parametrize(
    ("settings", "alone", "limit", "advice"),
    [
        ({}, True, 0, r"one completion, [0-9]+ tokens with its prompt: turn gradient_checkpointing"),
        # A loss over whole micro-batches is not cut.
        ({"entropy_coef": 0.01}, True, 0, r"set max_tokens_per_micro_batch|gradient_checkpointing"),
        # With several processes, the others would not do the step again.
        ({}, False, 30, r"set max_tokens_per_micro_batch to [0-9]+, or turn gradient_checkpointing on"),
    ],
)
def test_a_step_that_cannot_be_done_again_ends_with_advice(settings, alone, limit, advice, small, chars, tmp_path):
    trainer = trainer_of(small, chars, tmp_path, **settings)
    trainer.budget.is_single_process = alone
    runs_out_forward(trainer.model, limit)
    with pytest.raises(UserError, match=advice):
        trainer.train()


def test_memory_that_runs_out_in_generation_is_not_ours_to_mend(small, chars, tmp_path):
    trainer = trainer_of(small, chars, tmp_path)

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("in generate")

    trainer.model.generate = fails
    with pytest.raises(torch.OutOfMemoryError, match="in generate"):
        trainer.train()
