"""Micro-batches are split, without a model: the loss of a row is its advantage times a weight that is trained."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from grpo_math.trainer.micro_batches import Splitter

BUDGET = 14  # tokens: a group of two completions


def splitter(**changed):
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        device="cpu",
        is_fsdp2=False,
        gradient_state=SimpleNamespace(sync_gradients=True, _set_sync_gradients=lambda sync: None),
        no_sync=lambda model: nullcontext(),
        backward=lambda loss, **options: loss.backward(),
    )
    settings = {"loss_type": "grpo", "whole": False, "only_signal": True, "deepspeed": False, **changed}
    return Splitter(accelerator, **settings)


def micro_batch(first, advantages):
    """Four completions of 4 tokens for two prompts of 4."""
    prompts = torch.arange(first, first + 8).reshape(2, 4).repeat_interleave(2, dim=0)
    ones = torch.ones(4, 4, dtype=torch.long)
    return {
        "prompt_ids": prompts,
        "prompt_mask": ones,
        "completion_ids": torch.arange(100, 116).reshape(4, 4),
        "completion_mask": ones.clone(),
        "advantages": torch.tensor(advantages),
    }


BATCHES = [micro_batch(1, [1.0, -2.0, 3.0, -4.0]), micro_batch(20, [5.0, -5.0, 7.0, -7.5])]


@pytest.mark.parametrize("budget", [BUDGET, 10**6], ids=["several a step", "one"])
def test_the_micro_batches_of_a_step_have_the_gradient_of_trls(budget):
    weight = torch.ones((), requires_grad=True)

    def loss_of(rows):  # as TRL's grpo: the mean over completions of the mean over their tokens
        mask = rows["completion_mask"]
        means = (rows["advantages"][:, None] * weight * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return means.mean()

    whole = sum(loss_of(rows) for rows in BATCHES)
    extra = splitter()
    steps = extra.split(BATCHES, budget)
    assert sum(map(len, steps)) == (4 if budget == BUDGET else 1)
    losses = [extra.accumulate(step, loss_of, None) for step in steps]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(sum(losses), whole)
    torch.testing.assert_close(weight.grad, torch.autograd.grad(whole, weight)[0])


def test_what_is_a_mean_over_a_micro_batch_is_not_split():
    assert splitter(whole=True).split(BATCHES, BUDGET) == [[{"rows": rows, "weight": 1.0}] for rows in BATCHES]


def test_a_step_without_signal_has_a_micro_batch_that_weighs_nothing():
    flat = [{**rows, "advantages": torch.zeros(4)} for rows in BATCHES]
    first, last = splitter().split(flat, BUDGET)
    assert first == []
    (micro_batch,) = last
    assert (len(micro_batch["rows"]["advantages"]), micro_batch["weight"]) == (1, 0.0)
