"""The table of logged names: what each means and in what unit. No other module spells a metric key.

Where TRL has a name, it is TRL's (``reward``, ``kl``, ``entropy``, ``completions/clipped_ratio``); the rest is ours.
A line of ``history.jsonl`` holds ``step`` and whichever of these the step produced.

>>> METRICS[REWARD].unit
'reward'

Does not compute anything.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    unit: str
    meaning: str


STEP = "step"
LOSS = "loss"
REWARD = "reward"
REWARD_STD = "reward_std"
REWARD_MIN = "reward_min"
REWARD_MAX = "reward_max"
ACCURACY = "accuracy"
HELDOUT_ACCURACY = "heldout/accuracy"
HELDOUT_N = "heldout/n"
ADVANTAGE_MEAN = "advantage_mean"
ADVANTAGE_STD = "advantage_std"
DEGENERATE = "frac_reward_zero_std"
ALL_RIGHT = "degenerate/all_right"
ALL_WRONG = "degenerate/all_wrong"
VERDICT_PREFIX = "grading/"
KL = "kl"
RATIO = "ratio"
APPROX_KL = "approx_kl"
ENTROPY = "entropy"
CLIP_LOW = "clip_ratio/low_mean"
CLIP_HIGH = "clip_ratio/high_mean"
CLIP_REGION = "clip_ratio/region_mean"
GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
LENGTH_MEAN = "completions/mean_length"
LENGTH_MAX = "completions/max_length"
TRUNCATED = "completions/clipped_ratio"
TOKENS = "num_tokens"
SECONDS_STEP = "step_time"
SECONDS_GENERATE = "seconds/generate"
SECONDS_GRADE = "seconds/grade"
SECONDS_UPDATE = "seconds/update"

METRICS: dict[str, Metric] = {
    STEP: Metric("steps", "optimizer steps done"),
    LOSS: Metric("loss", "the loss as logged; near zero is normal in on-policy GRPO, where advantages sum to zero"),
    REWARD: Metric("reward", "mean of the weighted reward over the step's completions"),
    REWARD_STD: Metric("reward", "standard deviation of the reward over the step's completions"),
    REWARD_MIN: Metric("reward", "smallest reward of the step"),
    REWARD_MAX: Metric("reward", "largest reward of the step"),
    ACCURACY: Metric("share", "completions of the step whose verdict is correct"),
    HELDOUT_ACCURACY: Metric("share", "held-out problems answered rightly and in the format, greedy"),
    HELDOUT_N: Metric("problems", "held-out problems that this accuracy is over"),
    ADVANTAGE_MEAN: Metric("advantage", "mean advantage of the step's completions"),
    ADVANTAGE_STD: Metric("advantage", "standard deviation of the advantages"),
    DEGENERATE: Metric("share", "groups whose rewards are all equal: they move no weight"),
    ALL_RIGHT: Metric("share", "groups whose verdicts are all correct"),
    ALL_WRONG: Metric("share", "groups with no correct verdict"),
    KL: Metric(
        "nats", "KL to the reference for each token, as kl_estimator gives it, times the ratio where that corrects it"
    ),
    RATIO: Metric("1", "mean over tokens of their probability now by that when they were sampled; 1 on policy"),
    APPROX_KL: Metric("nats", "KL of the sampling policy to the current one for each token (k3); 0 on policy"),
    ENTROPY: Metric("nats", "entropy of the policy for each completion token"),
    CLIP_LOW: Metric("share", "tokens clipped below 1 - epsilon"),
    CLIP_HIGH: Metric("share", "tokens clipped above 1 + epsilon_high"),
    CLIP_REGION: Metric("share", "tokens clipped on either side"),
    GRAD_NORM: Metric("norm", "gradient norm before clipping"),
    LEARNING_RATE: Metric("1", "learning rate of the step"),
    LENGTH_MEAN: Metric("tokens", "mean completion length"),
    LENGTH_MAX: Metric("tokens", "longest completion"),
    TRUNCATED: Metric("share", "completions cut at max_completion_length"),
    TOKENS: Metric("tokens", "prompt and completion tokens since the start"),
    SECONDS_STEP: Metric("seconds", "wall time of the step"),
    SECONDS_GENERATE: Metric("seconds", "of which generation"),
    SECONDS_GRADE: Metric("seconds", "of which grading and rewards"),
    SECONDS_UPDATE: Metric("seconds", "of which forward, backward and optimizer"),
}


# What a completion of an evaluation falls in, and how tables call it.
CATEGORIES = {
    "correct": "correct, in the format",
    "correct_answer_bad_format": "answer right, format wrong",
    "wrong_answer": "format right, answer wrong",
    "bad_format": "wrong, and not in the format",
    "truncated": "cut at the length limit",
    "ungradable": "ungradable",
}


def verdict_key(verdict: str) -> str:
    """The key under which the share of a verdict is logged.

    >>> verdict_key("timeout")
    'grading/timeout'
    """
    return VERDICT_PREFIX + verdict
