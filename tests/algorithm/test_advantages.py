"""Advantages against numbers worked by hand, and against TRL's own."""

import math
from itertools import combinations, product

import pytest
import torch
from small_trainers import make
from trl import GRPOConfig, GRPOTrainer

from grpo_math.algorithm.advantages import advantages, most_varied, normalized_sum, try_function
from grpo_math.errors import RewardError

NAN = float("nan")
MEANS = ("group_mean", "leave_one_out")
PAIRS = [(baseline, scale) for baseline in MEANS for scale in ("group", "batch", "none")] + [("none", "none")]


ROOT = math.sqrt(1.5)
# What it is, its arguments, rewards, advantages.
BY_HAND = [
    # mean 1/4; deviations 3/4, -1/4, -1/4, -1/4; variance (9 + 1 + 1 + 1)/16/3 = 1/4; deviation 1/2
    ("z score", {"eps": 1e-12}, [[1.0, 0.0, 0.0, 0.0]], [[1.5, -0.5, -0.5, -0.5]]),
    ("epsilon", {"eps": 0.5}, [[1.0, 0.0, 0.0, 0.0]], [[0.75, -0.25, -0.25, -0.25]]),
    # the others' means are 1.5, 2.5, 2
    ("leave one out", {"baseline": "leave_one_out", "scale": "none"}, [[3.0, 1.0, 2.0]], [[1.5, -1.5, 0.0]]),
    # differences from the others' means 3, -3, 0; deviation of the group 2
    ("leave one out over deviation", {"baseline": "leave_one_out"}, [[4.0, 0.0, 2.0]], [[1.5, -1.5, 0.0]]),
    ("raw reward", {"baseline": "none", "scale": "none"}, [[1.0, 0.25], [0.0, 0.0]], [[1.0, 0.25], [0.0, 0.0]]),
    # rewards 2, 0, 1, 1: mean 1, squares 1 + 1, variance 2/3
    ("batch", {"scale": "batch"}, [[2.0, 0.0], [1.0, 1.0]], [[ROOT, -ROOT], [0.0, 0.0]]),
    (
        "leave one out over batch",
        {"baseline": "leave_one_out", "scale": "batch"},
        [[2.0, 0.0], [1.0, 1.0]],
        [[2 * ROOT, -2 * ROOT], [0.0, 0.0]],
    ),
    ("Dr. GRPO", {"scale": "none"}, [[3.0, 1.0, 2.0, 0.0]], [[1.5, -0.5, 0.5, -1.5]]),
    # of (1, -, 0, 0.5) the mean is 0.5 and the deviation 0.5; the others' means are 0.25, 0.75, 0.5
    ("ungraded", {}, [[1.0, NAN, 0.0, 0.5]], [[1.0, 0.0, -1.0, 0.0]]),
    (
        "ungraded, leave one out",
        {"baseline": "leave_one_out", "scale": "none"},
        [[1.0, NAN, 0.0, 0.5]],
        [[0.75, 0.0, -0.75, 0.0]],
    ),
    # mean 1/2 of the graded ones
    ("MaxRL", {"scale": "mean", "eps": 0.5}, [[1.0, 0.0, NAN], [0.0, 0.0, 0.0]], [[1.0, -1.0, 0.0], [0.0] * 3]),
    # n = 4, m = 2, k = 2: R = 1 - 1/6, sigma = sqrt(5)/6; right 1/6, wrong 1/6 - 1/3
    (
        "pass@k",
        {"baseline": "pass_at_k", "k": 2},
        [[1.0, 1.0, 0.0, 0.0, NAN]],
        [[5**-0.5, 5**-0.5, -(5**-0.5), -(5**-0.5), 0.0]],
    ),
    ("pass@k of fewer than k", {"baseline": "pass_at_k", "k": 3}, [[1.0, 0.0, NAN]], [[0.0] * 3]),
    ("W-REINFORCE", {"baseline": "w_reinforce"}, [[1.0, 0.0, NAN]], [[0.1, -1.0, 0.0]]),
    ("negative samples", {"baseline": "nsr"}, [[1.0, 0.0, NAN]], [[0.0, -1.0, 0.0]]),
    # 2 of 5 are at most 0; 1 of 4 is at most 0, and 2 of 4 at most 1; of 2 graded ones the first is 0.5 of them
    (
        "quantile",
        {"baseline": "quantile", "scale": "none"},
        [[1.0, 0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 2.0, 3.0, NAN], [NAN, NAN, NAN, 5.0, 3.0], [NAN] * 5],
        [[1.0, 0.0, 0.0, 1.0, 1.0], [0.0, -1.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 2.0, 0.0], [0.0] * 5],
    ),
    # (30 * 1 + 10 * 0) / 40; an ungraded completion has no weight; equal rewards; no token at all
    (
        "by length",
        {
            "baseline": "length_weighted",
            "scale": "none",
            "lengths": torch.tensor([[30, 10, 0], [30, 10, 99], [3, 5, 7], [0, 0, 0]]),
        },
        [[1.0, 0.0, 4.0], [1.0, 0.0, NAN], [0.7, 0.7, 0.7], [1.0, 0.0, 1.0]],
        [[0.25, -0.75, 3.25], [0.25, -0.75, 0.0], [0.0] * 3, [0.0] * 3],
    ),
    # Without a deviation to divide by: a group that is all right would otherwise have the advantage 1 / eps.
    ("raw, all equal", {"baseline": "none"}, [[1.0] * 4], [[1.0] * 4]),
    ("raw, alone", {"baseline": "none", "scale": "batch"}, [[2.0]], [[2.0]]),
    ("raw over deviation", {"baseline": "none"}, [[2.0, 0.0]], [[2.0**0.5, 0.0]]),
    ("alone", {}, [[1.0], [0.0]], [[0.0], [0.0]]),
    ("alone with an ungraded one", {"baseline": "leave_one_out"}, [[1.0, NAN]], [[0.0, 0.0]]),
    *((f"none graded, {b}, {s}", {"baseline": b, "scale": s}, [[NAN] * 3], [[0.0] * 3]) for b, s in PAIRS),
]


@pytest.mark.parametrize(
    ("arguments", "rewards", "expected"), [row[1:] for row in BY_HAND], ids=[r[0] for r in BY_HAND]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_worked_by_hand(arguments, rewards, expected, dtype):
    got = advantages(torch.tensor(rewards, dtype=dtype), **{"eps": 1e-12, **arguments})
    torch.testing.assert_close(got, torch.tensor(expected, dtype=dtype))


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1 / 3, -1e-3, 1e6])
@pytest.mark.parametrize(("baseline", "scale"), PAIRS[:-1])
def test_equal_rewards_give_exactly_no_advantage(baseline, scale, value):
    """In float32 eight rewards of 0.7 have the mean 0.70000005, which a deviation of 1e-6 turns into 0.056."""
    for group, dtype in product((2, 3, 7, 8, 16), (torch.float32, torch.float64)):
        rewards = torch.full((3, group), value, dtype=dtype)
        assert torch.equal(advantages(rewards, baseline, scale), torch.zeros_like(rewards))
        # Without a baseline, equal rewards are not divided by their deviation, which is 0.
        assert torch.equal(advantages(rewards, "none", scale), rewards)


@pytest.mark.parametrize("group", [3, 7, 8])
def test_gdpo_gives_groups_without_spread_exactly_no_advantage(group):
    """In float32 the batch's deviation of rounding errors made 0.8 of them."""
    uniform = torch.full((4, group, 2), 0.7)
    assert torch.equal(normalized_sum(uniform, torch.tensor([1.0, 0.3])), torch.zeros(4, group))
    mixed = torch.cat([uniform, torch.rand(2, group, 2, generator=torch.Generator().manual_seed(0))])
    values = normalized_sum(mixed, torch.tensor([1.0, 0.3]))
    assert torch.equal(values[:4], torch.zeros(4, group))
    each = (mixed[4:] - mixed[4:].mean(1, keepdim=True)) / (mixed[4:].std(1, keepdim=True) + 1e-4)
    sums = torch.cat([torch.zeros(4, group), (each * torch.tensor([1.0, 0.3])).sum(2)])
    torch.testing.assert_close(values, sums / (sums.std() + 1e-4), atol=1e-5, rtol=1e-5)


def test_gdpo_leaves_out_what_was_not_graded():
    rewards = torch.tensor([[[1.0, NAN], [0.0, 2.0], [NAN, NAN], [0.5, 4.0]]])
    first = torch.tensor([1.0, -1.0, 0.0, 0.0]) / (1 + 2e-4)  # deviation 1/2
    second = torch.tensor([0.0, -1.0, 0.0, 1.0]) / (2**0.5 + 1e-4)  # of 2 and 4
    sums = first + second
    expected = sums / (sums[[0, 1, 3]].std() + 1e-4)
    torch.testing.assert_close(normalized_sum(rewards, torch.ones(2)), expected[None], atol=1e-5, rtol=1e-5)


def max_rl(rewards):
    mean = rewards.nanmean(dim=1, keepdim=True)
    return (rewards - mean) / mean.clamp(min=1e-6)


def test_an_own_advantage_is_taken_as_it_is_and_an_ungraded_completion_has_none():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, NAN, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[3.0, -1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4])
    torch.testing.assert_close(advantages(rewards, f"{__name__}:max_rl"), expected)
    torch.testing.assert_close(advantages(rewards, "torch:ones_like"), (~rewards.isnan()).float())


def fails_unless_a_reward_is_missing(rewards):
    return torch.full_like(rewards, NAN) if rewards.isnan().any() else rewards.missing


def test_an_own_advantage_is_tried_with_a_missing_reward():
    try_function(f"{__name__}:fails_unless_a_reward_is_missing", 3)


@pytest.mark.parametrize(
    ("options", "reward", "line"),
    [
        ({"scale": "mean"}, -0.5, r"scale_rewards='mean' needs rewards of 0 or more, and a reward is -0\.5: use other"),
        (
            {"baseline": "pass_at_k", "k": 2},
            0.5,
            r"baseline='pass_at_k' needs a reward of 0 or 1, and a reward is 0\.5",
        ),
        ({"baseline": "nsr"}, 2.0, r"baseline='nsr' needs a reward of 0 or 1, and a reward is 2"),
    ],
)
def test_a_reward_that_a_formula_does_not_cover_is_one_line(options, reward, line):
    with pytest.raises(RewardError, match=line):
        advantages(torch.tensor([[1.0, reward, NAN]]), **options)


# One group to learn from, one with an ungraded completion, one all equal, one with a single grade, one with none.
REWARDS = [1.0, 0.0, 0.25, 0.0, 1.0, None, 0.0, 0.5, *[0.5] * 4, None, 1.0, None, None, *[None] * 4, *[0.0] * 4]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_mean_gives_the_advantages_that_trl_trains_on(scale, small, chars, tmp_path):
    trainer = make(
        GRPOTrainer,
        GRPOConfig,
        small,
        chars,
        tmp_path,
        lambda **columns: REWARDS,
        max_steps=1,
        per_device_train_batch_size=24,
        max_completion_length=2,
        scale_rewards=scale,
    )
    trainer.train()
    rewards = torch.tensor([NAN if reward is None else reward for reward in REWARDS]).view(-1, 4)
    expected = torch.tensor(list(trainer._logs["advantages"])).view(-1, 4)
    torch.testing.assert_close(advantages(rewards, scale=scale, eps=1e-4), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("m", range(2, 8))
def test_no_other_subset_of_the_graded_rewards_of_a_group_varies_more(m):
    noise = torch.Generator().manual_seed(m)
    rewards = torch.rand(40, 7, generator=noise, dtype=torch.float64)
    rewards[:20] = rewards[:20].round()
    rewards[10:30][torch.rand(20, 7, generator=noise) < 0.3] = NAN
    for group, places in zip(rewards, most_varied(rewards, m).tolist(), strict=True):
        graded = [i for i in range(7) if not group[i].isnan()]
        assert len({*places}) == m
        assert places == sorted(places)
        if len(graded) < m:
            assert set(graded) < set(places)
            continue
        best = max(group[list(one)].var(correction=0) for one in combinations(graded, m))
        torch.testing.assert_close(group[places].var(correction=0), best)
