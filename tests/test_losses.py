"""The reinforce surrogate's gradient, and rows without advantage leaving a loss as it was."""

from __future__ import annotations

import torch

from grpo_math.losses import hold_ratio_at_one, without_zero_advantages


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


def test_rows_without_advantage_leave_every_tensor_of_the_batch():
    kept, factor = without_zero_advantages(batch([0.0, 2.0, 0.0, -1.0], [1, 2, 3, 4]), "grpo")
    assert kept["advantages"].tolist() == [2.0, -1.0]
    assert kept["completion_mask"].sum(dim=1).tolist() == [2, 4]
    assert kept["completion_ids"][:, 0].tolist() == [4, 12]
    assert kept["num_items_in_batch"] == 99
    assert factor == 0.5


def test_the_factor_is_what_the_loss_type_divides_by():
    inputs = batch([0.0, 2.0, 0.0, -1.0], [1, 2, 3, 4])
    assert without_zero_advantages(inputs, "dr_grpo")[1] == 0.5
    assert without_zero_advantages(inputs, "dapo")[1] == 1.0  # divides by the tokens of the whole batch
    assert float(without_zero_advantages(inputs, "bnpo")[1]) == 0.6000000238418579  # 6 of 10 tokens


def test_the_shortest_row_stays_where_no_row_has_an_advantage():
    kept, _ = without_zero_advantages(batch([0.0, 0.0, 0.0], [3, 1, 2]), "grpo")
    assert kept["completion_mask"].sum(dim=1).tolist() == [1]


def test_nothing_is_touched_where_every_row_has_an_advantage():
    inputs = batch([1.0, -1.0], [2, 3])
    assert without_zero_advantages(inputs, "grpo") == (inputs, 1.0)
