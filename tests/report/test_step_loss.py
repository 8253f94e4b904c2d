"""The panel "Why is the loss 0?": shares of the gradient worked by hand, what was left out, and what is not known."""

import pytest

from grpo_math.report.step_loss import panels

# Group 0 has one correct completion of four, the longest one. In group 1 all are wrong, and one is not graded.
GROUPS = [
    [(1.0, 1.5, 6), (0.0, -0.5, 2), (0.0, -0.5, 2), (0.0, -0.5, 2)],
    [(0.0, 0.0, 9), (0.0, 0.0, 1), (None, 0.0, 4)],
]


def completion(reward, advantage, tokens, **more):
    row = {"reward": reward, "advantage": advantage, "tokens": tokens, "truncated": tokens == 6, "verdict": "wrong"}
    return {**row, "mine": reward, **more}


def panel(config, line=None, groups=GROUPS):
    rows = [[completion(*each) for each in group] for group in groups]
    return list(panels(rows, config, line or {}))


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        # |A| / 7 rows each: 1.5 and three times 0.5, of 3.
        ({"loss_type": "grpo"}, ["50.0%", "16.7%", "16.7%", "16.7%"]),
        # |A| x tokens: 9 and three times 1, of 12, whatever divides the sum.
        ({"loss_type": "dapo"}, ["75.0%", "8.3%", "8.3%", "8.3%"]),
        ({"loss_type": "bnpo"}, ["75.0%", "8.3%", "8.3%", "8.3%"]),
        ({"loss_type": "dr_grpo", "max_completion_length": 10}, ["75.0%", "8.3%", "8.3%", "8.3%"]),
        # The completion of 6 tokens was cut.
        ({"loss_type": "grpo", "mask_truncated_completions": True}, ["0.0%", "33.3%", "33.3%", "33.3%"]),
    ],
)
def test_a_share_is_advantage_times_tokens_as_the_loss_divides_them(config, shares):
    first, second = panel(config)
    assert [row["share of the gradient"] for row in first["rows"]] == shares
    assert {row["share of the gradient"] for row in second["rows"]} == {"0.0%"}


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        ({"loss_type": "grpo"}, "0"),
        ({"loss_type": "dapo"}, "-0.231"),  # -(1.5 x 6 - 3 x 0.5 x 2) / (12 + 14): the one not graded counts too
        ({"loss_type": "prompt_mean"}, "-0.25"),  # -6 / (2 prompts x 12 tokens of its group)
        ({"loss_type": "dr_grpo", "max_completion_length": 10}, "-0.0857"),  # -6 / (7 x 10)
        ({"loss_type": "luspo"}, "-0.857"),  # -6 / 7
    ],
)
def test_the_loss_at_a_ratio_of_1_is_minus_the_sum_of_advantage_and_weight(config, loss):
    assert f"policy loss of the 7 completions is {loss}: minus" in panel(config)[0]["sentences"][1]


def test_prompt_mean_divides_by_the_tokens_of_the_group_and_by_the_groups():
    # 1 x 6 / 8 and 1 x 2 / 8 of the first group, 1 x 1 / 4 and 1 x 3 / 4 of the second, and nothing of the third.
    groups = [[(1.0, 1.0, 6), (0.0, -1.0, 2)], [(1.0, 1.0, 1), (0.0, -1.0, 3)], [(0.0, 0.0, 0), (0.0, 0.0, 0)]]
    first, second, third = panel({"loss_type": "prompt_mean"}, groups=groups)
    assert [row["share of the gradient"] for row in first["rows"]] == ["37.5%", "12.5%"]
    assert [row["share of the gradient"] for row in second["rows"]] == ["12.5%", "37.5%"]
    assert [row["share of the gradient"] for row in third["rows"]] == ["0.0%", "0.0%"]
    assert "completions is 0: minus" in first["sentences"][1]  # -((6 - 2) / 8 + (1 - 3) / 4) / 2
    # The first group's longest completion is masked: 2 / 2 of it, next to 1 / 4 and 3 / 4.
    masked = panel({"loss_type": "prompt_mean", "mask_truncated_completions": True}, groups=groups)
    assert [row["share of the gradient"] for row in masked[0]["rows"]] == ["0.0%", "50.0%"]


def test_each_completion_has_its_rewards_its_baseline_and_why_it_is_left_out():
    first, second = panel({"loss_type": "grpo", "mask_truncated_completions": True}, {"rewards/mine/mean": 0.1})
    assert list(first["rows"][0]) == [
        *("completion", "verdict", "mine", "reward", "baseline", "advantage", "tokens", "left out"),
        "share of the gradient",
    ]
    assert [row["left out"] for row in first["rows"][:2]] == ["masked: cut at the limit", "no"]
    assert [row["left out"] for row in second["rows"]] == [*["advantage 0"] * 2, "dropped: not graded"]
    assert [row["baseline"] for row in first["rows"]] == [0.25] * 4
    others = panel({"baseline": "leave_one_out"})[0]
    assert [row["baseline"] for row in others["rows"]] == [0.0, *[pytest.approx(1 / 3)] * 3]


def test_a_sentence_says_why_the_loss_is_near_0_and_when_it_is_not():
    first, second = panel({"loss_type": "grpo"})
    assert "add up to 0" in first["sentences"][0]
    assert "100% of the gradient" in first["sentences"][0]
    assert "they add nothing to the gradient" in second["sentences"][0]
    [without] = panel({"baseline": "none"}, groups=[[(1.0, 1.0, 3), (0.0, 0.0, 3)]])
    assert without["sentences"][0].startswith("The advantages of this group add up to 1,")


def test_what_the_run_has_not_logged_is_listed():
    *_, logged, unknown = panel({"loss_type": "grpo"}, {"loss": 0.0, "kl": 0.25})[0]["sentences"]
    assert logged == "Logged for the whole step: loss 0, KL 0.25."
    assert "clipping, KL and correction for the sampler are not logged" in unknown
    config = {"loss_type": "bnpo", "top_entropy_quantile": 0.2, "delta": None, "per_device_train_batch_size": 4}
    *_, logged, unknown = panel(config)[0]["sentences"]
    assert logged == "The history has no line of this step."
    assert "Which tokens top_entropy_quantile left out is not logged." in unknown
    assert "bnpo divides by the tokens of a micro-batch" in unknown
    assert "A step trains on 4 completions and the table has 7" in unknown
    assert "loss_type is not recorded" in panel({})[0]["sentences"][-1]
