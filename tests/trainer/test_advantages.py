"""Advantages against numbers worked by hand, and against TRL's own."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grpo_math.errors import ConfigError
from grpo_math.trainer.advantages import advantages

NAN = float("nan")
MEANS = ("group_mean", "leave_one_out")
PAIRS = [(baseline, scale) for baseline in MEANS for scale in ("group", "batch", "none")] + [("none", "none")]


def test_group_mean_with_deviation_is_the_z_score():
    # mean 1/4; deviations 3/4, -1/4, -1/4, -1/4; variance (9 + 1 + 1 + 1)/16/3 = 1/4; deviation 1/2
    got = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=1e-12)
    torch.testing.assert_close(got, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))


def test_epsilon_is_added_to_the_deviation():
    got = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=0.5)
    torch.testing.assert_close(got, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def test_leave_one_out_compares_with_the_others():
    # (3, 1, 2): the others' means are 1.5, 2.5, 2
    got = advantages(torch.tensor([[3.0, 1.0, 2.0]]), "leave_one_out", "none")
    torch.testing.assert_close(got, torch.tensor([[1.5, -1.5, 0.0]]))


def test_leave_one_out_is_group_mean_times_g_over_g_minus_1():
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    loo, mean = (advantages(rewards, name, "none") for name in ("leave_one_out", "group_mean"))
    torch.testing.assert_close(loo, mean * 4 / 3)


def test_no_baseline_gives_the_raw_reward():
    rewards = torch.tensor([[1.0, 0.25], [0.0, 0.0]])
    assert torch.equal(advantages(rewards, "none", "none"), rewards)


def test_batch_deviation_is_one_number_for_all_groups():
    # rewards 2, 0, 1, 1: mean 1, squares 1 + 1, variance 2/3
    got = advantages(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), scale="batch", eps=1e-12)
    by = math.sqrt(1.5)
    torch.testing.assert_close(got, torch.tensor([[by, -by], [0.0, 0.0]]))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, 1 / 3, -1e-3, 1e6])
@pytest.mark.parametrize("group", [2, 3, 7, 8, 16])
@pytest.mark.parametrize(("baseline", "scale"), PAIRS[:-1])
def test_equal_rewards_give_exactly_no_advantage(baseline, scale, group, value):
    """In float32 eight rewards of 0.7 have the mean 0.70000005, which a deviation of 1e-6 turns into 0.056."""
    assert torch.equal(advantages(torch.full((3, group), value), baseline, scale), torch.zeros(3, group))


def test_group_mean_without_deviation_is_dr_grpos():
    # mean of (3, 1, 2, 0) is 1.5
    got = advantages(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), scale="none")
    assert torch.equal(got, torch.tensor([[1.5, -0.5, 0.5, -1.5]]))


def test_leave_one_out_with_deviation():
    # (4, 0, 2): differences from the others' means 3, -3, 0; deviation of the group 2
    got = advantages(torch.tensor([[4.0, 0.0, 2.0]]), "leave_one_out", eps=1e-12)
    torch.testing.assert_close(got, torch.tensor([[1.5, -1.5, 0.0]]))


def test_leave_one_out_over_the_batch_deviation():
    # groups (2, 0) and (1, 1): differences 2, -2, 0, 0; deviation of 2, 0, 1, 1 is the root of 2/3
    got = advantages(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), "leave_one_out", "batch", 1e-12)
    torch.testing.assert_close(got, torch.tensor([[math.sqrt(6), -math.sqrt(6)], [0.0, 0.0]]))


def test_an_ungraded_reward_counts_in_no_mean_and_no_deviation():
    # of (1, -, 0, 0.5) the mean is 0.5 and the deviation 0.5; the others' means are 0.25, 0.75, 0.5
    rewards = torch.tensor([[1.0, NAN, 0.0, 0.5]])
    torch.testing.assert_close(advantages(rewards, eps=1e-12), torch.tensor([[1.0, 0.0, -1.0, 0.0]]))
    loo = advantages(rewards, "leave_one_out", "none")
    torch.testing.assert_close(loo, torch.tensor([[0.75, 0.0, -0.75, 0.0]]))


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_a_raw_reward_is_divided_by_the_deviation_where_there_is_one(scale):
    """A group that is all right would otherwise have the advantage 1 / eps."""
    assert advantages(torch.ones(1, 4), "none", scale).tolist() == [[1.0] * 4]
    assert advantages(torch.tensor([[2.0]]), "none", scale).tolist() == [[2.0]]
    got = advantages(torch.tensor([[2.0, 0.0]]), "none", scale, eps=1e-12)
    torch.testing.assert_close(got, torch.tensor([[2.0**0.5, 0.0]]))


def test_dtype_and_shape_are_those_of_the_rewards():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        got = advantages(torch.rand(2, 3).to(dtype))
        assert got.dtype == dtype
        assert got.shape == (2, 3)


# One group to learn from, one with an ungraded completion, one all equal, one with a single grade, one with none.
REWARDS = [1.0, 0.0, 0.25, 0.0, 1.0, None, 0.0, 0.5, *[0.5] * 4, None, 1.0, None, None, *[None] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_mean_gives_the_advantages_that_trl_trains_on(scale, tiny, tokenizer, tmp_path):
    args = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=1,
        per_device_train_batch_size=len(REWARDS),
        num_generations=4,
        max_completion_length=2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        scale_rewards=scale,
    )
    rows = Dataset.from_list([{"prompt": "x"}] * 5)
    trainer = GRPOTrainer(tiny(), lambda completions, **columns: REWARDS, args, rows, processing_class=tokenizer)
    trainer.train()
    rewards = torch.tensor([NAN if reward is None else reward for reward in REWARDS]).view(5, 4)
    expected = torch.tensor(list(trainer._logs["advantages"])).view(5, 4)
    torch.testing.assert_close(advantages(rewards, scale=scale, eps=1e-4), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("baseline", "scale"), PAIRS)
def test_an_ungraded_completion_has_no_advantage_and_leaves_the_others_as_without_it(baseline, scale):
    with_it = advantages(torch.tensor([[1.0, NAN, 0.0, 0.5], [0.0, 1.0, NAN, 1.0]]), baseline, scale)
    without = advantages(torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]]), baseline, scale)
    assert with_it[0, 1] == 0
    assert with_it[1, 2] == 0
    torch.testing.assert_close(with_it[0, [0, 2, 3]], without[0])
    torch.testing.assert_close(with_it[1, [0, 1, 3]], without[1])


@pytest.mark.parametrize(("baseline", "scale"), PAIRS)
def test_a_group_with_nothing_graded_is_zero_everywhere(baseline, scale):
    assert torch.equal(advantages(torch.full((2, 3), NAN), baseline, scale), torch.zeros(2, 3))


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_group_of_one_has_no_advantage(baseline):
    assert torch.equal(advantages(torch.tensor([[1.0], [0.0]]), baseline), torch.zeros(2, 1))
    assert torch.equal(advantages(torch.tensor([[1.0, NAN]]), baseline), torch.zeros(1, 2))


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'group_mean'"):
        advantages(torch.zeros(1, 2), "groupmean")
    with pytest.raises(ConfigError, match="scale_rewards='std'"):
        advantages(torch.zeros(1, 2), scale="std")
