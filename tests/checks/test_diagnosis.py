"""Each finding on a history that shows it and on one that nearly does; simulated healthy runs show none; real runs."""

import json
import math
import random
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grpo_math.checks.diagnosis import CHECKS, diagnose, diagnose_whole
from grpo_math.checks.live import Diagnosis
from grpo_math.evaluation.evaluation import Evaluation, write
from grpo_math.evaluation.summary import Record, summarize
from grpo_math.grading import GRADER
from grpo_math.report.plots import PLOTS, curves
from grpo_math.run import metrics
from grpo_math.run.log import History

CONFIG = {
    "learning_rate": 1e-4,
    "max_completion_length": 128,
    "use_peft": True,
    "num_generations": 8,
    "save_strategy": "steps",
    "save_steps": 20,
    "rewards": ["accuracy"],
    "logging_steps": 1,
}
# Real runs of SmolLM2-135M, bad and healthy. The first line of a file has the run, what was done to the demo's recipe,
# its settings, and its findings with the step at which each is found first.
REAL_RUNS = Path(__file__).parents[1] / "cases/real_runs"
UNCHECKABLE, NO_ANSWER = metrics.verdict_key("uncheckable"), metrics.verdict_key("no_answer")
FORMAT = metrics.reward_key("format_soft")


@cache
def healthy(seed, steps=80, prompts=8, generations=8):
    """A run that learns: each prompt's pass rate is drawn around a mean that rises, each completion from its rate.

    The mean also wanders (an AR(1) of 0.03), as stretches of harder problems make it.
    """
    rng = random.Random(seed)
    start, gain, tau = rng.uniform(0.1, 0.5), rng.uniform(0.25, 0.4), rng.uniform(0.15, 0.4) * steps
    lines, wander = [], 0.0
    for step in range(1, steps + 1):
        learned = 1 - 2.718 ** (-step / tau)
        wander = 0.6 * wander + rng.gauss(0, 0.03)
        mean = min(0.95, max(0.02, start + gain * learned + wander))
        rates = [rng.betavariate(3 * mean, 3 * (1 - mean)) for _ in range(prompts)]
        right = [sum(rng.random() < rate for _ in range(generations)) for rate in rates]
        share = sum(right) / (prompts * generations)
        all_right, all_wrong = right.count(generations) / prompts, right.count(0) / prompts
        lines.append(
            {
                metrics.STEP: step,
                metrics.LOSS: rng.gauss(0, 0.005),
                metrics.REWARD: share,
                metrics.ACCURACY: share,
                metrics.REWARD_MIN: float(share == 1),
                metrics.REWARD_MAX: float(share > 0),
                metrics.REWARD_STD: (share * (1 - share)) ** 0.5,
                metrics.ADVANTAGE_STD: (1 - all_right - all_wrong) ** 0.5,
                metrics.DEGENERATE: all_right + all_wrong,
                metrics.ALL_RIGHT: all_right,
                metrics.ALL_WRONG: all_wrong,
                metrics.GRAD_NORM: 0.3 * 2.718 ** rng.gauss(0, 0.5) if all_right + all_wrong < 1 else 0.0,
                metrics.LEARNING_RATE: 1e-4,
                metrics.ENTROPY: (1.2 - 1.1 * learned) * 2.718 ** rng.gauss(0, 0.3),
                metrics.KL: 0.0 if step == 1 else 0.8 * learned * 2.718 ** rng.gauss(0, 0.7),
                metrics.APPROX_KL: 0.01 * rng.random(),
                metrics.CLIP_REGION: 0.03 * rng.random(),
                metrics.TRUNCATED: 0.3 * 2.718 ** (-step / 6) + 0.06 * rng.random(),
                metrics.SAMPLER_DIFFERENCE: 0.04 * 2.718 ** rng.gauss(0, 0.3),
                UNCHECKABLE: (rng.random() < 0.1) / (prompts * generations),
                NO_ANSWER: max(0.0, 0.4 * (1 - learned) + rng.gauss(0, 0.03)),
                FORMAT: min(1.0, 0.5 + 0.5 * learned),
            }
        )
        if step % 25 == 0:
            lines += scored(step, sum(rng.random() < start + gain * learned for _ in range(64)) / 64)
    return [*scored(0, sum(rng.random() < start for _ in range(64)) / 64), *lines]


KEYS = {
    **{name.lower(): getattr(metrics, name) for name in dir(metrics) if isinstance(getattr(metrics, name), str)},
    "uncheckable": UNCHECKABLE,
    "no_answer": NO_ANSWER,
    "format": FORMAT,
}


def changed(lines=None, **series):
    """A healthy history in which some metrics are other functions of the step; None leaves the key out."""

    def altered(line):
        values = {KEYS[name]: value(line[metrics.STEP]) if callable(value) else value for name, value in series.items()}
        return {key: value for key, value in (line | values).items() if value is not None}

    return [altered(line) if metrics.LOSS in line else line for line in lines or healthy(0)]


def alarms(lines, settings=None):
    return {finding.check for finding in diagnose(lines, CONFIG | (settings or {}))}


def without_heldout(lines):
    return [line for line in lines if metrics.HELDOUT_ACCURACY not in line]


def scored(step, accuracy, n=64):
    return [{metrics.STEP: step, metrics.HELDOUT_ACCURACY: accuracy, metrics.HELDOUT_N: n}]


def evaluated(before, after, *between):
    """A run with 256 problems before and after it."""
    return [*scored(0, before, 256), *between, *without_heldout(healthy(0)), *scored(80, after, 256)]


def steady(level=0.4, steps=80, **series):
    """A flat run without noise."""
    lines = [line for line in without_heldout(healthy(0, steps=80)) if 1 <= line[metrics.STEP] <= steps]
    return changed(lines, **{"reward": level, "accuracy": level, "format": 0.5, "no_answer": 0.0, "kl": None} | series)


def then(first, last, at=50):
    return lambda step: first if step <= at else last


def zigzag(first, last, size=0.1):
    """A change of level under a noise of ``size`` times the root of two that each window of ten averages to nothing."""
    return lambda step: (first if step <= 50 else last) + (size if step % 2 else -size)


def first_of(most, size):
    """A function of the step: 1 in the first ``most`` steps of each ``size``, 0 in the others."""
    return lambda step: float(step % size < most)


def stuck(value=0.0, **series):
    return steady(**{"reward": value, "reward_min": value, "reward_max": value} | series)


# Each bound, from both sides: (finding, settings, what is just over it or on it, what is just under it or on it). The
# range of the rewards is 1.25 where a fall or a rise is exactly on a bound, since 0.25 and 0.125 are exact in binary.
WIDE = {"reward_min": -0.25, "reward_max": 1.0}
TRUNCATE = {"vllm_importance_sampling_mode": "sequence_truncate"}
EDGES = [
    ("collapse", {}, steady(reward=then(0.75, 0.5), **WIDE), steady(reward=then(0.75, 0.5078125), **WIDE)),
    ("collapse", {}, steady(reward=then(0.64, 0.4)), steady(reward=then(0.56, 0.4))),
    ("collapse", {}, steady(reward=zigzag(0.7, 0.4)), steady(reward=zigzag(0.63, 0.4))),
    ("collapse", {}, steady(reward=then(0.8, 0.2, 20), steps=40), steady(reward=then(0.8, 0.2, 20), steps=39)),
    (  # one line of three holds a reward: that none of 13 more does is a chance of 4.4%, of 12 more of 5%
        "collapse",
        {},
        steady(steps=16, reward_min=0.0, reward_max=lambda s: float(s == 3)),
        steady(steps=15, reward_min=0.0, reward_max=lambda s: float(s == 3)),
    ),
    (
        "collapse",
        {},
        steady(steps=11, reward_min=0.0, reward_max=lambda s: float(s == 1)),
        steady(steps=10, reward_min=0.0, reward_max=lambda s: float(s == 1)),
    ),
    (  # of rewards from -1 to 0
        "collapse",
        {},
        steady(steps=16, reward_min=-1.0, reward_max=lambda s: float(s == 3) - 1),
        steady(steps=15, reward_min=-1.0, reward_max=lambda s: float(s == 3) - 1),
    ),
    ("reward_stuck", {}, stuck(), stuck(reward_max=lambda s: float(s % 8 == 0))),
    ("reward_stuck", {}, stuck(steps=10), stuck(steps=9)),
    ("flat_reward", {}, steady(reward=then(0.25, 0.3671875), **WIDE), steady(reward=then(0.25, 0.375), **WIDE)),
    ("flat_reward", {}, steady(level=0.75, **WIDE), steady(level=0.8125, **WIDE)),
    ("flat_reward", {}, steady(reward_min=None), steady(level=0.9, reward_min=None, reward_max=None)),
    # A fall by more than half of 10% of the range and two standard errors (here 6% of the fall) is not flat.
    ("flat_reward", {}, steady(reward=then(0.75, 0.685), **WIDE), steady(reward=then(0.75, 0.682), **WIDE)),
    ("flat_reward", {}, steady(steps=40), steady(steps=39)),
    ("flat_reward", {}, steady(reward=zigzag(0.4, 0.4, 0.07)), steady(reward=zigzag(0.4, 0.44, 0.07))),
    (
        "flat_reward",
        {},
        [*steady(), *scored(20, 0.0), *scored(60, 0.05)],
        [*steady(), *scored(20, 0.3), *scored(60, 0.36)],
    ),
    (  # as the demo at a rate of 5e-4: the first ten lines are then mostly of what it has learned
        "flat_reward",
        {},
        steady(level=0.6),
        steady(reward=lambda s: {1: 0.2, 2: 0.35}.get(s, 0.6)),
    ),
    ("format_without_accuracy", {}, steady(format=then(0.5, 0.75)), steady(format=then(0.5, 0.65))),
    ("format_without_accuracy", {}, steady(format=zigzag(0.5, 0.85)), steady(format=zigzag(0.5, 0.75))),
    ("format_without_accuracy", {}, steady(no_answer=then(0.5, 0.25)), steady(no_answer=then(0.5, 0.35))),
    ("format_without_accuracy", {}, steady(format=then(0, 1, 9), steps=60), steady(format=then(0, 1, 9), steps=59)),
    ("format_without_accuracy", {}, steady(format=then(0, 1, 9)), steady(format=then(0, 1, 9), accuracy=0.9)),
    ("kl_explosion", {}, steady(kl=5.0, steps=10), steady(kl=5.0, steps=9)),
    ("kl_explosion", {}, steady(kl=5.0), changed(kl=lambda s: 40.0 if s > 70 and s % 3 == 0 else 1.5)),
    ("kl_not_zero_at_start", {}, steady(kl=-0.012), steady(kl=0.01)),
    ("kl_not_zero_at_start", {"logging_steps": None}, steady(kl=0.05), steady(kl=then(None, 0.05, 1))),
    (
        "entropy_collapse",
        {},
        steady(degenerate=0.3, entropy=then(1.0, 0.2)),
        steady(degenerate=0.3, entropy=then(1.0, 0.21)),
    ),
    (
        "entropy_collapse",
        {},
        steady(degenerate=0.3, entropy=then(1.0, 0.2, at=20), steps=40),
        steady(degenerate=0.3, entropy=then(1.0, 0.2, at=20), steps=39),
    ),
    (
        "entropy_collapse",
        {},
        steady(degenerate=0.3, entropy=then(1.0, 0.2, 5)),
        steady(degenerate=0.3, entropy=then(1.0, 0.2, 2)),
    ),
    (
        "entropy_collapse",
        {},
        steady(degenerate=0.3, entropy=then(1.0, 0.2)),
        steady(degenerate=then(0.3, 0.6), entropy=then(1.0, 0.2)),  # of other completions
    ),
    (
        "entropy_rises",
        {"pack_updates": False},
        steady(degenerate=then(0.6, 0.3), entropy=then(1.0, 1.45)),  # of all completions
        steady(degenerate=then(0.6, 0.3), entropy=then(1.0, 1.35)),
    ),
    (
        "entropy_rises",
        {},
        steady(degenerate=0.3, entropy=then(1.0, 1.45)),
        steady(degenerate=0.3, entropy=then(1.0, 1.35)),
    ),
    ("entropy_rises", {}, steady(degenerate=0.3, entropy=then(1.0, 1.6)), changed(entropy=then(1.0, 1.6))),
    ("length_without_accuracy", {}, steady(length_mean=then(100, 140)), steady(length_mean=then(100, 125))),
    ("length_without_accuracy", {}, steady(length_mean=then(100, 140)), changed(length_mean=then(100, 140))),
    (
        "reward_without_heldout",
        {},
        [*scored(0, 0.4, 256), *steady(reward=then(0.3, 0.7)), *scored(80, 0.4, 256)],
        [*scored(0, 0.4, 256), *steady(reward=then(0.3, 0.7)), *scored(80, 0.55, 256)],
    ),
    ("truncation", {}, steady(truncated=0.21, steps=20), steady(truncated=0.21, steps=19)),
    ("truncation", {}, steady(truncated=0.21), steady(truncated=0.2)),
    ("truncation", {}, steady(truncated=0.51, steps=1), steady(truncated=0.5, steps=1)),  # as the first rollout warns
    ("none_correct", {}, steady(accuracy=0.0, steps=1), steady(accuracy=0.01, steps=1)),
    (  # 59 completions without a correct one exclude 5%
        "none_correct",
        {"prompts_per_step": 4},
        steady(accuracy=0.0, steps=2),
        steady(accuracy=0.0, steps=1),
    ),
    ("none_correct", {"rewards": ["a:b", "gsm8k"]}, steady(accuracy=0.0), steady(accuracy=then(0.0, 0.01, at=79))),
    ("eos_mismatch", {"max_completion_length": 256}, steady(accuracy=0.0, truncated=0.999), steady(truncated=0.998)),
    ("eos_mismatch", {"max_completion_length": 255}, steady(truncated=1.0), steady(accuracy=0.0, truncated=1.0)),
    ("eos_mismatch", {"max_completion_length": 255}, steady(truncated=1.0), steady(accuracy=None, truncated=1.0)),
    ("eos_mismatch", {}, steady(truncated=1.0, steps=10), steady(truncated=1.0, steps=9)),
    ("uniform_groups", {}, steady(degenerate=0.8, steps=20), steady(degenerate=0.8, steps=19)),
    (  # with one prompt a step, six groups of ten without signal have a median of all, and are not four fifths
        "uniform_groups",
        {},
        changed(degenerate=first_of(9, 10), all_wrong=first_of(9, 10), all_right=0.0),
        changed(degenerate=first_of(6, 10), all_wrong=first_of(6, 10), all_right=0.0),
    ),
    ("adapter_not_moving", {}, steady(learning_rate=0.0, steps=10), steady(learning_rate=0.0, steps=9, grad_norm=1.0)),
    ("adapter_not_moving", {}, steady(advantage_std=1.0, grad_norm=0.0, steps=10), steady(grad_norm=0.0, steps=9)),
    # Groups without signal have a gradient of zero, and that is right.
    ("adapter_not_moving", {}, steady(advantage_std=1.0, grad_norm=0.0), changed(grad_norm=0.0, advantage_std=0.0)),
    ("adapter_not_moving", {}, steady(advantage_std=1.0, grad_norm=0.0), changed(grad_norm=0.0, advantage_std=None)),
    ("uncheckable_answers", {}, steady(uncheckable=0.011, steps=20), steady(uncheckable=0.011, steps=19)),
    ("uncheckable_answers", {}, steady(uncheckable=0.011), steady(uncheckable=0.01)),
    (
        "uncheckable_answers",
        {},
        changed(uncheckable=lambda s: 0.05 * (s % 4 == 0)),
        changed(uncheckable=lambda s: 0.036 * (s % 4 == 0)),
    ),
    ("learning_rate_too_high", {}, steady(grad_norm=then(0.5, 2.6)), steady(grad_norm=then(0.5, 2.5))),
    ("learning_rate_too_high", {}, steady(grad_norm=then(0.1, 1.1)), steady(grad_norm=then(0.1, 1.0))),
    ("learning_rate_too_high", {"max_grad_norm": 0.6}, steady(grad_norm=then(0.1, 0.7)), steady(grad_norm=then(0, 9))),
    (
        "learning_rate_too_high",
        {},
        steady(grad_norm=then(0.5, 2.6, at=20), steps=40),
        steady(grad_norm=then(0.5, 2.6, at=20), steps=39),
    ),
    ("learning_rate_too_high", {}, steady(approx_kl=0.11, steps=20), steady(approx_kl=0.11, steps=19)),
    ("learning_rate_too_high", {}, steady(approx_kl=0.11), steady(approx_kl=0.1)),
    ("sampler_apart", {}, steady(sampler_difference=0.11, steps=10), steady(sampler_difference=0.11, steps=9)),
    ("sampler_apart", {}, steady(sampler_difference=0.11), steady(sampler_difference=0.1)),
    (
        "long_completions_fade",
        {},
        changed(logp_sum_spread=0.0137, length_max=4096),
        changed(logp_sum_spread=0.0131, length_max=4096),
    ),
    (  # truncation keeps the limit of what is above it
        "long_completions_fade",
        TRUNCATE,
        changed(logp_sum_spread=0.025, length_max=4096),
        changed(logp_sum_spread=0.0137, length_max=4096),
    ),
    ("long_completions_fade", {}, changed(logp_sum_spread=0.025, length_max=4096), changed(logp_sum_spread=0.0)),
    ("heldout_worse", {}, evaluated(0.5, 0.375), evaluated(0.5, 0.4)),
    ("heldout_worse", {}, evaluated(0.5, 0.3, *scored(40, 0.5, 256)), evaluated(0.5, 0.5, *scored(40, 0.3, 256))),
    ("heldout_fell", {}, evaluated(0.1, 0.5, *scored(40, 0.7, 256)), evaluated(0.1, 0.55, *scored(40, 0.7, 256))),
    (  # a loss that is sure, but of a point
        "heldout_worse",
        {},
        [*scored(0, 0.5, 10**5), *scored(80, 0.47, 10**5)],
        [*scored(0, 0.5, 10**5), *scored(80, 0.485, 10**5)],
    ),
]


SHOWN = {name: lines for name, _, lines, _ in reversed(EDGES)}


@pytest.mark.parametrize(("name", "settings", "over", "under"), EDGES, ids=[edge[0] for edge in EDGES])
def test_a_threshold_is_where_it_is_said_to_be(name, settings, over, under):
    assert name in alarms(over, settings)
    assert name not in alarms(under, settings)


@pytest.mark.parametrize("name", ["flat_reward", "collapse", "format_without_accuracy"])
def test_rewards_that_chose_their_problems_are_not_compared(name):
    """Dynamic sampling holds the reward near a half."""
    assert name in alarms(SHOWN[name])
    assert name not in alarms(SHOWN[name], {"resample_groups": 2})


EARLY, LATE, NEWEST = "steps 1 to 10", "steps 55 to 80", "steps 71 to 80"
FLAT_WORDS = f"0.40 in {EARLY}, 0.40 in {LATE}"
# (finding, settings, lines, figures, setting), by hand.
WORDS = [
    ("flat_reward", {}, steady(reward=then(0.4, 0.45)), f"0.40 in {EARLY}, 0.45 in {LATE}", "learning_rate: 0.0003"),
    ("flat_reward", {"learning_rate": None}, steady(), FLAT_WORDS, "learning_rate: 0.0003"),  # of the history
    ("flat_reward", {"learning_rate": 0.0}, steady(learning_rate=None), FLAT_WORDS, "learning_rate: 1e-05"),
    (
        "collapse",
        {"learning_rate": 3e-5},
        steady(reward=then(0.75, 0.25)),
        f"0.75 in {EARLY}, 0.25 in {NEWEST}",
        "learning_rate: 1.5e-05; checkpoint-30 is from before the fall",
    ),
    (
        "collapse",
        {},
        steady(steps=16, reward_min=0.0, reward_max=lambda s: float(s == 3)),
        "1 of the 3 lines up to step 3 have a reward, none in steps 4 to 16",
        "learning_rate: 1e-05; no checkpoint of the peak was saved: keep_best: true",
    ),
    (  # the best of the checkpoints is of later steps
        "collapse",
        {"keep_best": True},
        steady(steps=16, reward_min=0.0, reward_max=lambda s: float(s == 3)),
        "1 of the 3 lines up to step 3 have a reward, none in steps 4 to 16",
        "learning_rate: 1e-05; no checkpoint of the peak was saved: save_steps: 10",
    ),
    (
        "heldout_fell",
        {},
        evaluated(0.1, 0.5, *scored(10, 0.7, 256)),
        "70% of 256 problems at step 10, 50% of 256 at step 80",
        "learning_rate: 5e-05; checkpoint-10 is from before the fall",
    ),
    ("reward_stuck", {}, stuck(accuracy=0.4), f"0 in {NEWEST}, 40% of the answers correct", "rewards: [accuracy]"),
    (  # the best window is the newest but one
        "collapse",
        {},
        steady(reward=lambda s: 0.8 if 62 <= s <= 71 else 0.4),
        f"0.76 in steps 61 to 70, 0.44 in {NEWEST}",
        "learning_rate: 5e-05; checkpoint-30 is from before the fall",
    ),
    ("reward_stuck", {}, stuck(accuracy=None), f"0 in {NEWEST}, 0.0% of the answers correct", "dataset: another"),
    ("reward_stuck", {}, stuck(1.0, accuracy=1.0), f"1 in {NEWEST}, 100% of the answers correct", "dataset: another"),
    (
        "reward_stuck",
        {},
        stuck(accuracy=0.1, truncated=0.51),
        f"0 in {NEWEST}, 10% of the answers correct",
        "max_completion_length: 256",
    ),
    (
        "reward_stuck",
        {},
        stuck(accuracy=0.0, no_answer=0.51),
        f"0 in {NEWEST}, 0.0% of the answers correct",
        "rewards: [shaped]",
    ),
    (
        "reward_stuck",
        {},
        stuck(accuracy=0.0, no_answer=0.5, truncated=0.5),
        f"0 in {NEWEST}, 0.0% of the answers correct",
        "dataset: another",
    ),
    (
        "format_without_accuracy",
        {},
        steady(format=then(0.5, 0.75)),
        f"{FORMAT} 0.50 in {EARLY}, 0.75 in {LATE}; accuracy {FLAT_WORDS}",
        "rewards: [accuracy, gated]",
    ),
    (  # a user's reward that has format in its name
        "format_without_accuracy",
        {"rewards": ["mine:my_format", "mine:right"]},
        [{**line, "rewards/my_format/mean": float(line[metrics.STEP] > 50)} for line in steady()],
        f"rewards/my_format/mean 0.00 in {EARLY}, 1.00 in {LATE}; accuracy {FLAT_WORDS}",
        "rewards: [accuracy, gated]",
    ),
    ("kl_explosion", {}, steady(kl=6.0), f"6 nats a token in {NEWEST}", "learning_rate: 3e-05"),
    (
        "kl_not_zero_at_start",
        {},
        steady(kl=0.05),
        "0.05 nats a token at step 1",
        "disable_dropout: true, and model_init_kwargs: {attention_dropout: 0.0}",
    ),
    (
        "entropy_collapse",
        {},
        steady(degenerate=0.3, entropy=then(1.0, 0.1)),
        f"1 nats at first, 0.1 in {NEWEST}; reward {FLAT_WORDS}",
        "entropy_coef: 0.001",
    ),
    (
        "entropy_rises",
        {},
        steady(degenerate=0.3, entropy=then(1.0, 2.0)),
        f"entropy 1.00 in {EARLY}, 2.00 in {LATE} nats; reward {FLAT_WORDS}",
        "learning_rate: 3e-05",
    ),
    (
        "entropy_rises",
        {"entropy_coef": 0.05},
        steady(degenerate=0.3, entropy=then(1.0, 2.0)),
        f"entropy 1.00 in {EARLY}, 2.00 in {LATE} nats; reward {FLAT_WORDS}",
        "entropy_coef: 0.0",
    ),
    (
        "length_without_accuracy",
        {},
        steady(length_mean=then(100, 150)),
        f"100 tokens in {EARLY}, 150 in {LATE}; accuracy {FLAT_WORDS}",
        "rewards: [accuracy, overlong]",
    ),
    (
        "reward_without_heldout",
        {},
        [*scored(0, 0.4, 256), *steady(reward=then(0.3, 0.7)), *scored(80, 0.4, 256)],
        f"reward 0.30 in {EARLY}, 0.70 in {LATE}; held-out accuracy 40%, then 40% at step 80",
        "rewards: [accuracy]",
    ),
    (
        "truncation",
        {"max_completion_length": 300},
        steady(truncated=0.25),
        f"25% in {NEWEST}",
        "max_completion_length: 600",
    ),
    (
        "truncation",
        {"max_completion_length": None},
        steady(truncated=0.25),
        f"25% in {NEWEST}",
        "max_completion_length: 512",
    ),
    (
        "eos_mismatch",
        {},
        steady(truncated=1.0),
        "all of steps 1 to 80 reach the limit of 128 tokens, though up to 40% are correct",
        "eos_token_id: [...] in generation_config.json",
    ),
    (
        "uniform_groups",
        {},
        steady(degenerate=0.9, all_right=0.81, all_wrong=0.09),
        "90% in steps 61 to 80, 81% all correct, 9.0% all wrong",
        "resample_groups: 3",
    ),
    (
        "uniform_groups",
        {},
        steady(degenerate=0.9, all_right=None, all_wrong=0.1),
        "90% in steps 61 to 80, 0.0% all correct, 10% all wrong",
        "resample_groups: 3",
    ),
    (
        "adapter_not_moving",
        {},
        steady(advantage_std=1.0, grad_norm=0.0),
        "a gradient of 0 in 80 steps whose advantages are not 0",
        "lora_target_modules: all-linear",
    ),
    (
        "adapter_not_moving",
        {"use_peft": None},
        steady(advantage_std=1.0, grad_norm=0.0),
        "a gradient of 0 in 80 steps whose advantages are not 0",
        "learning_rate: 0.0003",
    ),
    (
        "adapter_not_moving",
        {},
        steady(learning_rate=0.0),
        "a learning rate of 0 in steps 1 to 80",
        "learning_rate: 1e-5",
    ),
    (
        "uncheckable_answers",
        {"grade_timeout": 2.5},
        steady(uncheckable=0.05),
        "5.0% of the answers in steps 61 to 80",
        "grade_timeout: 5",
    ),
    (
        "sampler_apart",
        {},
        steady(sampler_difference=0.2),
        f"0.2 nats a token in {NEWEST}",
        "cast_lm_head_to_fp32: true",
    ),
    (  # s = 1.6: Phi((ln 3 - 1.28) / 1.6) = Phi(-0.113) = 45%, and 3 Phi((-ln 3 - 1.28) / 1.6) = 3 Phi(-1.487) = 21%
        "long_completions_fade",
        {},
        steady(logp_sum_spread=0.025, length_max=4096),
        f"a completion of 4,096 tokens keeps 45% of its gradient in {NEWEST}",
        "vllm_importance_sampling_mode: token_truncate",
    ),
    (
        "long_completions_fade",
        TRUNCATE,
        steady(logp_sum_spread=0.025, length_max=4096),
        f"a completion of 4,096 tokens keeps 66% of its gradient in {NEWEST}",
        "vllm_importance_sampling_mode: token_truncate",
    ),
    (
        "heldout_worse",
        {},
        evaluated(0.5, 0.35),
        "50% of 256 problems before training, 35% of 256 at step 80",
        "learning_rate: 3e-05",
    ),
    (
        "learning_rate_too_high",
        {},
        steady(grad_norm=then(0.3, 1.8)),
        f"gradient norm 0.3 in {EARLY}, 1.8 in {NEWEST}",
        "learning_rate: 3e-05",
    ),
    (
        "learning_rate_too_high",
        {},
        steady(approx_kl=0.12),
        "0.12 nats a token from sampling to update in steps 61 to 80",
        "learning_rate: 3e-05",
    ),
]


@pytest.mark.parametrize(("name", "settings", "lines", "words", "setting"), WORDS, ids=[case[0] for case in WORDS])
def test_a_finding_has_its_level_its_figures_and_a_line_for_this_recipe(name, settings, lines, words, setting):
    findings = diagnose(lines, CONFIG | settings, ["checkpoint-30", "checkpoint-10", "checkpoint-5", "checkpoint-x"])
    [finding] = [finding for finding in findings if finding.check == name]
    check = CHECKS[name]
    assert finding.message == f"{check.symptom}: {words}; {check.cause}"
    assert (finding.level, finding.remedy) == (check.level, f"{check.remedy}: {setting}")


@pytest.mark.parametrize("name", CHECKS)
def test_any_key_may_be_missing_or_none(name):
    lines = SHOWN[name]
    for key in sorted({key for line in lines for key in line}):
        diagnose([{k: v for k, v in line.items() if k != key} for line in lines], CONFIG)
        diagnose([{**line, key: None} for line in lines], {})
    assert diagnose([], {}) == diagnose([{}, {metrics.STEP: None}], CONFIG) == []


SEEDS = 300


@pytest.mark.slow
def test_healthy_noisy_runs_raise_no_alarm_at_any_moment():
    """At most 1% of runs, asked after every tenth step as in training."""
    shapes = [(4, 16), (8, 8), (16, 4), (12, 8)]
    raised = {}
    for seed in range(SEEDS):
        prompts, generations = shapes[seed % len(shapes)]
        lines = healthy(seed, steps=(30, 60, 90, 150)[seed // 4 % 4], prompts=prompts, generations=generations)
        for i in [i for i, line in enumerate(lines, 1) if line[metrics.STEP] % 10 == 0]:
            for name in alarms(lines[:i]):
                raised.setdefault(seed, []).append((lines[i - 1][metrics.STEP], name))
    assert len(raised) <= SEEDS // 100, raised


@pytest.mark.parametrize("path", sorted(REAL_RUNS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_real_run_gives_exactly_its_findings(path):
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    first_steps = {}
    last = int(lines[-1][metrics.STEP])
    for step in [*range(10, last, 10), last]:  # as in training
        for name in alarms([line for line in lines if line[metrics.STEP] <= step], head["settings"]):
            first_steps.setdefault(name, step)
    assert first_steps == head["findings"]


def test_a_resumed_run_counts_its_newest_attempt():
    good = [line for line in healthy(3) if metrics.LOSS in line]
    bad = changed([line for line in good if line[metrics.STEP] > 30], truncated=1.0, reward=0.0)
    assert alarms(good[:30] + bad) >= {"collapse"}
    assert alarms(good[:30] + bad + good[30:]) == set()
    assert alarms(good[:60] + bad) == alarms(good[:30] + bad)


# As with a rate of 5e-3: a reward at step 1, and from the next step on none.
ALIVE = then(1.0, 0.0, at=1)
DESTROYED = {"reward": ALIVE, "reward_max": ALIVE, "reward_min": 0.0, "accuracy": ALIVE, "all_wrong": 1.0, "steps": 12}


@pytest.mark.parametrize(
    ("checks", "lines"),
    [
        (["eos_mismatch", "flat_reward"], steady(truncated=1.0, entropy=1.0)),  # and not truncation
        (["adapter_not_moving"], steady(advantage_std=1.0, grad_norm=0.0, entropy=1.0)),  # and not flat_reward
        (["reward_stuck"], stuck(entropy=1.0)),  # and not flat_reward
        (["reward_stuck"], stuck(degenerate=1.0, steps=20)),  # and not uniform_groups
        (["collapse"], steady(**DESTROYED)),  # and not reward_stuck
        (["collapse"], steady(**DESTROYED | {"degenerate": 1.0, "steps": 20})),  # and not uniform_groups
        (["collapse"], steady(**DESTROYED | {"truncated": 0.5, "steps": 20})),  # and not truncation
        (["adapter_not_moving", "truncation"], steady(truncated=0.5, learning_rate=0.0)),
    ],
)
def test_one_cause_is_one_finding_and_the_worst_comes_first(checks, lines):
    assert [finding.check for finding in diagnose(lines, CONFIG)] == checks


@pytest.mark.parametrize(
    ("earlier", "step", "logs", "main", "diagnosed"),
    [
        (0, 1, {metrics.LOSS: 0.0}, True, True),
        (1, 10, {metrics.LOSS: 0.0}, True, False),
        (1, 11, {metrics.LOSS: 0.0}, True, True),
        (0, 10, {metrics.HELDOUT_N: 1}, True, True),
        (0, 10, {"train_runtime": 1.0}, True, False),
        (0, 10, {metrics.LOSS: 0.0}, False, False),
        (900, 1000, {metrics.LOSS: 0.0}, True, True),
        (1000, 1019, {metrics.LOSS: 0.0}, True, False),  # after 1/50 of the steps
        (1000, 1020, {metrics.LOSS: 0.0}, True, True),
    ],
)
def test_a_long_run_is_diagnosed_less_often_and_by_the_main_process(earlier, step, logs, main, diagnosed, tmp_path):
    diagnosis = Diagnosis(History(tmp_path), CONFIG, lambda *words, logs: None)
    diagnosis.history.append(1, {metrics.LOSS: 0.0})
    diagnosis.last_step = earlier
    state = SimpleNamespace(global_step=step, max_steps=9999, is_world_process_zero=main)
    diagnosis.on_log("args", state, "control", logs)
    assert (diagnosis.last_step == step) == diagnosed


def test_a_run_is_diagnosed_at_first_every_tenth_step_and_at_last_and_prints_each_finding_once(tmp_path, capsys):
    told = []
    history = History(tmp_path)
    diagnosis = Diagnosis(history, CONFIG, tell=lambda *words, logs: told.append((*words, logs)))
    (tmp_path / "checkpoint-3").mkdir()
    records = [Record(i, category="correct" if i < 900 else "wrong_answer") for i in range(1000)]
    settings = {"grader": GRADER, "samples": 1, "temperature": 0.0}
    write(Evaluation(settings, summarize(records), records), tmp_path / "before.json")
    lines = [*steady(truncated=0.3, kl=then(0.0, 9.0, 23), steps=31), *scored(31, 0.1, 1000)]
    for line in lines:
        history.append(line[metrics.STEP], line)
        state = SimpleNamespace(global_step=line[metrics.STEP], max_steps=31, is_world_process_zero=True)
        for logs in (None, {"train_runtime": 1.0}, line):
            diagnosis.on_log("args", state, "control", logs)
    diagnosis.on_train_end("args", state, "control")
    output = [re.match(r"step (\d+): (.*\((\w+)\))$", line).groups() for line in capsys.readouterr().err.splitlines()]
    assert [(step, check) for step, _, check in output] == [
        ("21", "truncation"),
        ("31", "kl_explosion"),
        ("31", "heldout_worse"),
    ]
    assert [logs for *_, logs in told] == [{f"findings/{check}": line} for _, line, check in output]


def test_a_long_run_is_compared_with_its_first_lines(tmp_path, capsys):
    history = History(tmp_path)
    # All that is learned is learned in the first 100 steps.
    level = then(0.1, 0.6, 100)
    lines = [{metrics.STEP: step, metrics.LOSS: 0.0, metrics.REWARD: level(step)} for step in range(1, 2201)]
    history.path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    state = SimpleNamespace(global_step=2200, max_steps=2200, is_world_process_zero=True)
    Diagnosis(history, CONFIG, tell=None).on_train_end("args", state, "control")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("none_correct", steady(accuracy=0.0)),
        ("format_without_accuracy", SHOWN["format_without_accuracy"]),
        ("length_without_accuracy", steady(length_mean=then(100, 140), reward=then(0.3, 0.7))),
    ],
)
@pytest.mark.parametrize("rewards", [["mine:my_format"], ["my_format"], ["format_soft", "__main__:brief_format"]])
def test_rewards_for_something_else_than_a_correct_answer_are_not_judged_by_it(name, lines, rewards):
    assert name in alarms(lines)
    assert name not in alarms(lines, {"rewards": rewards})


@pytest.mark.parametrize("name", ["reward_stuck", "uniform_groups"])
def test_equal_rewards_of_the_user_are_named_without_shares_of_correct_answers(name):
    (finding,) = [one for one in diagnose(SHOWN[name], CONFIG | {"rewards": ["mine:brief"]}) if one.check == name]
    assert "correct" not in finding.message
    assert finding.remedy.endswith("differ within a group: rewards: finer ones than brief")


def test_a_finding_that_passed_is_repeated_at_the_end_with_its_steps():
    fell = steady(reward=lambda s: 0.2 if 33 <= s <= 44 else 0.9)
    assert alarms(fell) == alarms(steady(0.9)) == set()
    (finding,) = diagnose_whole(fell, CONFIG, ["checkpoint-20", "checkpoint-40"])
    assert (finding.level, finding.check) == ("warning", "collapse")
    assert finding.message.startswith("the reward fell after a peak: 0.9")
    assert finding.message.endswith(" (found at step 40, passed by step 52)")
    assert finding.remedy.endswith("checkpoint-20 is from before the fall")
    # A finding that is still there is not repeated, and what the fall explains is left out.
    assert diagnose_whole(fell[:44], CONFIG) == diagnose(fell[:44], CONFIG)
    assert all(diagnose_whole(healthy(seed), CONFIG) == [] for seed in range(2))


def test_distillation_has_no_finding_about_rewards_or_a_kl_that_starts_above_zero():
    lines = steady(kl=6.0, reward=0.0, accuracy=0.3, degenerate=1.0)
    with_rewards, without = (
        {finding.check for finding in diagnose(lines, settings)}
        for settings in ({}, {"rewards": [], "reference_model": "teacher"})
    )
    assert {"kl_explosion", "uniform_groups"} <= with_rewards - without
    assert not without & {"flat_reward", "reward_stuck", "collapse", "none_correct"}


SHARES, COUNTS, ANY = st.floats(0, 1) | st.just(math.nan), st.integers(0, 10**6), st.floats() | st.integers(0, 10**6)
BY_UNIT = {"share": SHARES} | dict.fromkeys(("problems", "prompts", "steps", "tokens"), COUNTS)
LINES = st.lists(
    st.fixed_dictionaries({}, optional={name: BY_UNIT.get(one.unit, ANY) for name, one in metrics.METRICS.items()}),
    max_size=40,
)


@pytest.mark.slow
@given(LINES, st.sampled_from([{}, CONFIG, {**CONFIG, "rewards": [], "beta": 0.1}]))
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
def test_any_history_is_diagnosed_twice_alike(lines, config):
    history = [{metrics.LOSS: 0.0, **line, metrics.STEP: step} for step, line in enumerate(lines)]
    findings = diagnose(history, config)
    assert findings == diagnose(deepcopy(history), config)
    assert all("\n" not in f"{finding.message}: {finding.remedy}" for finding in findings)
    assert [curves(history, plot) for plot in PLOTS] == [curves(deepcopy(history), plot) for plot in PLOTS]
