"""Advantages against numbers worked by hand, and against TRL's own."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_math.advantages import advantages
from grpo_math.errors import ConfigError

NAN = float("nan")


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


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_no_advantage(baseline, scale):
    assert not advantages(torch.full((3, 4), 0.7), baseline, scale).abs().gt(1e-6).any()


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_ungraded_completion_has_no_advantage_and_leaves_the_others_as_without_it(baseline, scale):
    with_it = advantages(torch.tensor([[1.0, NAN, 0.0, 0.5], [0.0, 1.0, NAN, 1.0]]), baseline, scale)
    without = advantages(torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]]), baseline, scale)
    assert with_it[0, 1] == 0
    assert with_it[1, 2] == 0
    torch.testing.assert_close(with_it[0, [0, 2, 3]], without[0])
    torch.testing.assert_close(with_it[1, [0, 1, 3]], without[1])


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
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
