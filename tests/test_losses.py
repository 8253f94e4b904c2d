"""What a loss is given for the reinforce surrogate, and what a part of a micro-batch weighs."""

from __future__ import annotations

import pytest
import torch

from grpo_math.losses import hold_ratio_at_one, weight_of_part


def batch(advantages: list[float], lengths: list[int], width: int = 4) -> dict:
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    return {
        "advantages": torch.tensor(advantages),
        "completion_mask": mask,
        "completion_ids": torch.arange(len(lengths) * width).view(-1, width),
        "num_items_in_batch": torch.tensor(99.0),
        "old_per_token_logps": torch.zeros(len(lengths), width),
    }


def test_the_ratio_held_at_one_keeps_everything_but_the_old_log_probs():
    inputs = batch([1.0, -1.0], [2, 3])
    held = hold_ratio_at_one(inputs)
    assert set(inputs) - set(held) == {"old_per_token_logps"}
    assert all(held[name] is inputs[name] for name in held)


def test_the_weight_of_a_part_is_what_the_loss_type_divides_by():
    scored = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):
        assert weight_of_part(loss_type, scored, 8, torch.tensor(10)) == 2 / 8
    for loss_type in ("dapo", "cispo", "vespo"):  # divide by a number of the whole batch
        assert weight_of_part(loss_type, scored, 8, torch.tensor(10)) == 1.0
    assert float(weight_of_part("bnpo", scored, 8, torch.tensor(10))) == pytest.approx(3 / 10)
