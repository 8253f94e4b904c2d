"""Each finding on a history that shows it and on one that nearly does; simulated healthy runs show none."""

from __future__ import annotations

import json
import random
import re

import pytest

from grpo_math.checks import LEVELS
from grpo_math.checks.diagnosis import CHECKS, EXPLAINED_BY, diagnose
from grpo_math.checks.series import evaluation_line
from grpo_math.run import metrics

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
UNCHECKABLE, NO_ANSWER = metrics.verdict_key("uncheckable"), metrics.verdict_key("no_answer")
FORMAT = metrics.reward_key("format_soft")


def healthy(seed, steps=80, start=None, gain=None, prompts=8, generations=8, **more):
    """A run that learns: each prompt's pass rate is drawn around a mean that rises, each completion from its rate.

    The mean also wanders (an AR(1) of 0.03), as stretches of harder problems make it.
    """
    rng = random.Random(seed)
    start = rng.uniform(0.1, 0.5) if start is None else start
    gain = rng.uniform(0.25, 0.4) if gain is None else gain
    tau = rng.uniform(0.15, 0.4) * steps
    lines, wander = [], 0.0
    for step in range(1, steps + 1):
        learned = 1 - 2.718 ** (-step / tau)
        wander = 0.6 * wander + rng.gauss(0, 0.03)
        mean = min(0.95, max(0.02, start + gain * learned + wander))
        rates = [rng.betavariate(3 * mean, 3 * (1 - mean)) for _ in range(prompts)]
        right = [sum(rng.random() < rate for _ in range(generations)) for rate in rates]
        share = sum(right) / (prompts * generations)
        all_right, all_wrong = right.count(generations) / prompts, right.count(0) / prompts
        line = {
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
        lines.append(line)
        if step % 25 == 0:
            right_heldout = sum(rng.random() < start + gain * learned for _ in range(64)) / 64
            lines.append({metrics.STEP: step, metrics.HELDOUT_ACCURACY: right_heldout, metrics.HELDOUT_N: 64})
    base = sum(rng.random() < start for _ in range(64)) / 64
    return [*evaluation_line(0, {"accuracy": base, "n": 64}), *lines]


def alarms(lines, config=CONFIG):
    return {finding.check for finding in diagnose(lines, config) if finding.level != "info"}


def changed(lines=None, seed=0, **series):
    """A healthy history in which some metrics are other functions of the step; None leaves the key out."""
    lines = healthy(seed) if lines is None else lines
    made = []
    for line in lines:
        line = dict(line)
        if metrics.LOSS in line:
            for name, value in series.items():
                key = KEYS[name]
                line[key] = value(line[metrics.STEP]) if callable(value) else value
                if line[key] is None:
                    del line[key]
        made.append(line)
    return made


KEYS = {
    **{name.lower(): getattr(metrics, name) for name in dir(metrics) if isinstance(getattr(metrics, name), str)},
    "uncheckable": UNCHECKABLE,
    "no_answer": NO_ANSWER,
    "format": FORMAT,
}


def noisy(mean, spread=0.1, seed=0):
    """A function of the step: the mean (a number or a function) with noise."""
    rng = random.Random(seed)
    return lambda step: (mean(step) if callable(mean) else mean) + rng.gauss(0, spread)


def flat(seed=0, level=0.4, **more):
    return changed(
        seed=seed, reward=noisy(level, 0.05, seed), accuracy=noisy(level, 0.05, seed), heldout_n=None, **more
    )


def without_heldout(lines):
    return [line for line in lines if metrics.HELDOUT_ACCURACY not in line]


FLAT = without_heldout(flat())


def evaluated(before, after):
    """A run with 256 problems before and after it."""
    first, last = ({"accuracy": accuracy, "n": 256} for accuracy in (before, after))
    return [*evaluation_line(0, first), *without_heldout(healthy(0)), *evaluation_line(80, last)]


def rising(step):
    return 0.3 + 0.4 * min(1, step / 40)


# The lines of a run that shows a finding.
SHOWN = {
    "flat_reward": FLAT,
    "collapse": changed(reward=noisy(lambda s: rising(s) if s < 60 else 0.2)),
    "reward_stuck": changed(reward=0.0, reward_min=0.0, reward_max=0.0, accuracy=0.0),
    "format_without_accuracy": changed(format=lambda s: min(1, s / 40), accuracy=noisy(0.2, 0.05)),
    "kl_explosion": changed(kl=lambda s: 0.05 * 1.08 ** (s - 1) - 0.05),
    "kl_not_zero_at_start": changed(kl=0.05),
    "entropy_collapse": without_heldout(flat(entropy=lambda s: 1.0 * 0.93**s)),
    "truncation": changed(truncated=noisy(0.26, 0.03)),
    "eos_mismatch": changed(truncated=1.0),
    "uniform_groups": changed(degenerate=0.9, all_right=0.8, all_wrong=0.1),
    "adapter_not_moving": changed(grad_norm=0.0),
    "uncheckable_answers": changed(uncheckable=lambda s: 0.05 * (s % 4 == 0)),
    "sampler_apart": changed(sampler_difference=noisy(0.2, 0.03)),
    "long_completions_fade": changed(logp_sum_spread=0.025, length_max=4096),
    "heldout_worse": evaluated(0.5, 0.35),
    "learning_rate_too_high": changed(grad_norm=lambda s: 0.3 * 1.05**s),
}


def steady(level=0.4, steps=80, **series):
    """A flat run without noise."""
    lines = [line for line in without_heldout(healthy(0, steps=80)) if 1 <= line[metrics.STEP] <= steps]
    return changed(lines, **{"reward": level, "accuracy": level, "format": 0.5, "no_answer": 0.0, "kl": None} | series)


def then(first, last, at=50):
    return lambda step: first if step <= at else last


def zigzag(first, last, size=0.1):
    """A change of level under a noise of ``size`` times the root of two that each window of ten averages to nothing."""
    return lambda step: (first if step <= 50 else last) + (size if step % 2 else -size)


def scored(step, accuracy):
    return evaluation_line(step, {"accuracy": accuracy, "n": 64})


def in_the_middle(middle, last):
    """256 problems before the run, of which half are right, in its middle, and after it."""
    return [*evaluated(0.5, last), *evaluation_line(40, {"accuracy": middle, "n": 256})]


def of_many(after):
    """100,000 problems, of which half are right before the run."""
    return [*evaluation_line(0, {"accuracy": 0.5, "n": 10**5}), *evaluation_line(80, {"accuracy": after, "n": 10**5})]


def first_of(most, size):
    """A function of the step: 1 in the first ``most`` steps of each ``size``, 0 in the others."""
    return lambda step: float(step % size < most)


# Each threshold, from both sides: (finding, settings, what is just over it, what is just under it).
EDGES = [
    (
        "collapse",
        {},
        changed(reward=noisy(lambda s: rising(s) if s < 60 else 0.2)),
        changed(reward=noisy(lambda s: rising(s) if s < 60 else 0.6, 0.06)),
    ),
    (
        "reward_stuck",
        {},
        changed(reward=0.0, reward_min=0.0, reward_max=0.0, accuracy=0.0),
        changed(reward=0.0, reward_min=0.0, reward_max=lambda s: float(s % 8 == 0), accuracy=0.0),
    ),
    (
        "kl_explosion",
        {},
        changed(kl=lambda s: 0.05 * 1.08 ** (s - 1) - 0.05),
        changed(kl=lambda s: 40.0 if s > 70 and s % 3 == 0 else 1.5),
    ),
    (
        "uncheckable_answers",
        {},
        changed(uncheckable=lambda s: 0.05 * (s % 4 == 0)),
        changed(uncheckable=lambda s: 0.036 * (s % 4 == 0)),
    ),
    ("flat_reward", {}, steady(reward=then(0.4, 0.47)), steady(reward=then(0.4, 0.53))),
    ("flat_reward", {}, steady(level=0.8), steady(level=0.9)),
    ("flat_reward", {}, steady(steps=40), steady(steps=39)),
    ("flat_reward", {}, steady(reward=zigzag(0.4, 0.4, 0.07)), steady(reward=zigzag(0.4, 0.44, 0.07))),
    (  # one line of three holds a reward: that none of 13 more does is a chance of 4.4%, of 11 more of 5.7%
        "collapse",
        {},
        steady(steps=16, reward_min=0.0, reward_max=lambda s: float(s == 3)),
        steady(steps=14, reward_min=0.0, reward_max=lambda s: float(s == 3)),
    ),
    ("collapse", {}, steady(reward=then(0.64, 0.4)), steady(reward=then(0.56, 0.4))),
    ("collapse", {}, steady(reward=zigzag(0.7, 0.4)), steady(reward=zigzag(0.63, 0.4))),
    ("format_without_accuracy", {}, steady(format=then(0.5, 0.75)), steady(format=then(0.5, 0.65))),
    ("format_without_accuracy", {}, steady(no_answer=then(0.5, 0.25)), steady(no_answer=then(0.5, 0.35))),
    ("format_without_accuracy", {}, steady(format=then(0, 1, 9), steps=60), steady(format=then(0, 1, 9), steps=59)),
    ("kl_explosion", {}, changed(kl=then(0, 6)), changed(kl=then(0, 4))),
    ("kl_not_zero_at_start", {}, changed(kl=0.012), changed(kl=0.008)),
    ("entropy_collapse", {}, steady(entropy=then(1, 0.17)), steady(entropy=then(1, 0.23))),
    ("truncation", {}, steady(truncated=0.3, steps=20), steady(truncated=0.3, steps=19)),
    (
        "eos_mismatch",
        {"max_completion_length": 300},
        steady(level=0.0, truncated=1.0),
        steady(level=0.0, truncated=then(1.0, 0.99)),
    ),
    ("learning_rate_too_high", {}, changed(grad_norm=then(0.3, 1.8)), changed(grad_norm=then(0.3, 1.3))),
    ("learning_rate_too_high", {}, changed(grad_norm=then(0.1, 1.2)), changed(grad_norm=then(0.1, 0.8))),
    ("learning_rate_too_high", {}, changed(approx_kl=0.12), changed(approx_kl=0.08)),
    ("sampler_apart", {}, changed(sampler_difference=0.12), changed(sampler_difference=0.08)),
    (
        "long_completions_fade",
        {},
        changed(logp_sum_spread=0.0137, length_max=4096),
        changed(logp_sum_spread=0.0131, length_max=4096),
    ),
    (  # truncation keeps the limit of what is above it
        "long_completions_fade",
        {"vllm_importance_sampling_mode": "sequence_truncate"},
        changed(logp_sum_spread=0.025, length_max=4096),
        changed(logp_sum_spread=0.0137, length_max=4096),
    ),
    ("heldout_worse", {}, evaluated(0.5, 0.375), evaluated(0.5, 0.4)),
    ("heldout_worse", {}, in_the_middle(0.5, 0.3), in_the_middle(0.3, 0.5)),
    ("heldout_worse", {}, of_many(0.47), of_many(0.485)),  # a loss that is sure, but of a point
    ("flat_reward", {}, FLAT, without_heldout(flat(level=0.93))),
    ("flat_reward", {}, FLAT, [*FLAT, *scored(20, 0.3), *scored(60, 0.5)]),
    (  # as the demo at a rate of 5e-4: the first ten lines are then mostly of what it has learned
        "flat_reward",
        {},
        without_heldout(changed(reward=noisy(0.6, 0.02), accuracy=0.6)),
        without_heldout(changed(reward=noisy(lambda s: {1: 0.2, 2: 0.35}.get(s, 0.6), 0.02), accuracy=0.6)),
    ),
    (  # with one prompt a step, six groups of ten without signal have a median of all, and are not four fifths
        "uniform_groups",
        {},
        changed(degenerate=first_of(9, 10), all_wrong=first_of(9, 10), all_right=0.0),
        changed(degenerate=first_of(6, 10), all_wrong=first_of(6, 10), all_right=0.0),
    ),
    # Groups without signal have a gradient of zero, and that is right.
    ("adapter_not_moving", {}, changed(learning_rate=0.0), changed(grad_norm=0.0, advantage_std=0.0)),
]


@pytest.mark.parametrize(
    ("name", "lines", "settings"),
    [
        # Dynamic sampling holds the reward near a half.
        ("flat_reward", FLAT, {"resample_groups": 2})
    ],
)
def test_a_setting_that_explains_it_ends_a_finding(name, lines, settings):
    assert name in checks_of(lines, {})
    assert name not in checks_of(lines, settings)


@pytest.mark.parametrize(("name", "settings", "over", "under"), EDGES, ids=[edge[0] for edge in EDGES])
def test_a_threshold_is_where_it_is_said_to_be(name, settings, over, under):
    assert name in checks_of(over, settings)
    assert name not in checks_of(under, settings)


def checks_of(lines, settings):
    return {finding.check for finding in diagnose(lines, CONFIG | settings)}


@pytest.mark.parametrize("name", CHECKS)
def test_a_history_that_shows_it_gives_the_finding(name):
    lines = SHOWN[name]
    [finding] = [f for f in diagnose(lines, CONFIG) if f.check == name]
    assert finding.level == CHECKS[name].level
    assert finding.level in LEVELS
    assert finding.message.startswith(CHECKS[name].symptom + ": ")
    assert finding.message.endswith("; " + CHECKS[name].cause)
    assert "step" in finding.message
    assert finding.remedy.startswith(CHECKS[name].remedy)
    setting = finding.remedy.removeprefix(CHECKS[name].remedy)
    assert re.fullmatch(r": \w+: \S.*", setting)
    assert "\n" not in finding.line()
    json.dumps(finding._asdict(), allow_nan=False)


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
        asked = [i for i, line in enumerate(lines, 1) if line[metrics.STEP] % 10 == 0]
        for i in asked:
            for name in alarms(lines[:i]):
                raised.setdefault(seed, []).append((lines[i - 1][metrics.STEP], name))
    assert len(raised) <= SEEDS // 100, raised


def test_a_resumed_run_counts_its_newest_attempt():
    good = [line for line in healthy(3) if metrics.LOSS in line]
    bad = changed([line for line in good if line[metrics.STEP] > 30], truncated=1.0, reward=0.0)
    assert alarms(good[:30] + bad) >= {"collapse"}
    assert alarms(good[:30] + bad + good[30:]) == set()
    assert alarms(good[:60] + bad) == alarms(good[:30] + bad)


def test_a_policy_that_one_step_destroyed_is_a_collapse_and_not_too_hard_a_set():
    """As with a rate of 5e-3: a reward at step 1, and from the next step on none. No window can be a peak."""
    alive = then(1.0, 0.0, at=1)
    lines = [line for line in without_heldout(healthy(0)) if 1 <= line[metrics.STEP] <= 12]
    dead = {"degenerate": 1.0, "all_wrong": 1.0, "truncated": then(0.1, 1.0, at=1), "entropy": 0.3}
    lines = changed(lines, reward=alive, reward_max=alive, reward_min=0.0, accuracy=alive, **dead)
    assert alarms(lines) == {"collapse"}
    [finding] = [f for f in diagnose(lines, CONFIG) if f.check == "collapse"]
    assert "1 of the 1 lines up to step 1 hold a reward, none in steps 2 to 12" in finding.message
    assert "collapse" not in alarms(lines, CONFIG | {"resample_groups": 2})


def test_the_checkpoint_to_keep_is_one_that_is_there():
    lines = without_heldout(SHOWN["collapse"])
    for kept, words in (
        (["checkpoint-80", "checkpoint-30", "checkpoint-7"], "; keep checkpoint-30;"),
        (["checkpoint-70", "checkpoint-80"], "; keep checkpoint-70;"),  # the first one after the peak
        ([], "; no checkpoint was saved;"),
    ):
        [message] = [f.message for f in diagnose(lines, CONFIG, kept) if f.check == "collapse"]
        assert words in message


def test_one_cause_is_one_finding_and_the_worst_comes_first():
    levels = [finding.level for finding in diagnose(changed(truncated=0.5, grad_norm=0.0, loss=1e-4), CONFIG)]
    assert levels == sorted(levels, key=LEVELS.index)
    assert "truncation" not in alarms(changed(truncated=1.0))
    assert "flat_reward" not in alarms(without_heldout(flat(grad_norm=0.0)))
    assert set(EXPLAINED_BY) | set().union(*EXPLAINED_BY.values()) <= set(CHECKS)


@pytest.mark.parametrize(
    ("series", "settings", "line"),
    [
        ({"accuracy": 0.4}, {}, "rewards: [accuracy]"),
        ({"accuracy": 0.1, "truncated": 0.9}, {}, "max_completion_length: 256"),
        ({"accuracy": 0.0, "no_answer": 0.9}, {}, "rewards: [shaped]"),
        ({"accuracy": 0.0, "no_answer": 0.1}, {}, "dataset: another"),
    ],
)
def test_a_stuck_reward_is_told_by_its_verdicts(series, settings, line):
    lines = changed(reward=0.0, reward_min=0.0, reward_max=0.0, **series)
    [finding] = [f for f in diagnose(lines, CONFIG | settings) if f.check == "reward_stuck"]
    assert finding.remedy.endswith(line)


@pytest.mark.parametrize(
    ("name", "config", "line"),
    [
        ("truncation", {"max_completion_length": 300}, "max_completion_length: 600"),
        ("collapse", {"learning_rate": 3e-5}, "learning_rate: 1.5e-05"),
        ("uncheckable_answers", {"grade_timeout": 2.5}, "grade_timeout: 5"),
    ],
)
def test_the_remedy_is_a_line_for_this_recipe(name, config, line):
    lines = SHOWN[name]
    [remedy] = [f.remedy for f in diagnose(lines, CONFIG | config) if f.check == name]
    assert remedy.endswith(f": {line}")
