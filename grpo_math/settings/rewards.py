"""Rewards and grading: settings and rules."""

from dataclasses import dataclass

from grpo_math.settings.declare import Facts, Rule, setting
from grpo_math.settings.loss import VERDICT_BASELINES
from grpo_math.settings.trl_types import GRPOConfig


@dataclass
class Rewards:
    """Rewards and grading."""

    rewards: list[str] = setting(
        ["accuracy"], "Reward functions: keys of grpo_math.REWARDS, or module:function for your own."
    )


FACTS: Facts = {"grade_timeout": {"gt": 0}}


@dataclass
class Grading(GRPOConfig):
    """Rewards and grading."""

    grade_timeout: float = setting(5.0, "Seconds of CPU time for grading one answer, to raise if many are uncheckable.")


PROGRAM_RULES = [
    Rule(
        "error",
        "rewards",
        lambda s: not s.rewards and not s.reference_model,
        "is empty",
        "name a reward function, such as accuracy, or a reference_model to distil",
    ),
    Rule(
        "error",
        "resample_groups",
        lambda s: s.resample_groups and not s.rewards,
        "needs rewards, and on-policy distillation (rewards=[]) has none",
        "leave it at 0",
    ),
    Rule(
        "error",
        "rewards",
        lambda s: len(set(s.rewards)) < len(s.rewards),
        "names a function twice",
        "name it once, with a weight in reward_weights",
    ),
    Rule(
        "error",
        "rewards",
        lambda s: (
            s.baseline in VERDICT_BASELINES and (s.rewards != ["accuracy"] or s.reward_weights not in (None, [1]))
        ),
        "is more than the verdict, and baseline={baseline!r} needs the verdict only",
        "set rewards: [accuracy], without reward_weights",
    ),
    Rule(
        "no_effect",
        "multi_objective_aggregation",
        lambda s: len(s.rewards) == 1,
        "one reward is normalized alone",
        "name several rewards, or leave it out",
    ),
    Rule(
        "error",
        "reward_weights",
        lambda s: s.reward_weights is not None and len(s.reward_weights) != len(s.rewards),
        "are not as many as the reward functions",
        "give one weight for each",
    ),
    Rule(
        "error",
        "reward_weights",
        lambda s: s.reward_weights and not any(s.reward_weights) and not s.beta,
        "are all 0, so that every gradient is zero",
        "give a reward another weight",
    ),
]
