"""The table of logged names: what each means and in what unit.

If TRL has a metric, the name is TRL's (``reward``, ``kl``, ``entropy``, ``completions/clipped_ratio``). A line of
``history.jsonl`` has the metrics whose ``when`` applies to its step. A value that is not a finite number is left out.
With some settings TRL adds keys that are not in this table (an entropy bonus, an auxiliary loss).

>>> METRICS[REWARD].unit, METRICS[REWARD].when
('reward', 'rollout')
"""

import re
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """A logged value. ``when`` is the kind of step that logs it: always, rollout, graded, kl, ..."""

    unit: str
    meaning: str
    when: str = "always"


STEP = "step"
EPOCH = "epoch"
LOSS = "loss"
REWARD = "reward"
REWARD_STD = "reward_std"
REWARD_MIN = "reward_min"
REWARD_MAX = "reward_max"
ACCURACY = "accuracy"
ACCURACY_IN_FORMAT = "accuracy_in_format"
FORMAT_RATE = "format_kept"
HELDOUT_ACCURACY = "heldout/accuracy"
HELDOUT_IN_FORMAT = "heldout/accuracy_in_format"
HELDOUT_N = "heldout/n"
SCRIPT_PREFIX = "script/"  # before a script's metric that has the name of one of `METRICS`, until the line is logged
EVAL_PREFIX = "eval_"  # of the names in transformers' evaluations
HELDOUT_SET = re.compile(f"{EVAL_PREFIX}(.+)_{ACCURACY}")  # the accuracy of a held-out set
ADVANTAGE_MEAN = "advantage_mean"
ADVANTAGE_STD = "advantage_std"
DEGENERATE = "frac_reward_zero_std"
ALL_RIGHT = "degenerate/all_right"
ALL_WRONG = "degenerate/all_wrong"
FINDING_PREFIX = "findings/"
PROMPTS_DRAWN = "resample/drawn"
PROMPTS_RETAINED = "resample/kept"
PROMPTS_DISCARDED = "resample/thrown_away"
KL = "kl"
RATIO = "ratio"
APPROX_KL = "approx_kl"
ENTROPY = "entropy"
SAMPLER_DIFFERENCE = "sampling/sampling_logp_difference/mean"
TRL_WEIGHTS = tuple(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max"))
DROPPED_TOKENS = "sampling/dropped_tokens"
DROPPED_COMPLETIONS = "sampling/dropped_completions"
EFFECTIVE_SHARE = "sampling/effective_share"
LOGP_SUM_SPREAD = "sampling/logp_sum_spread"
WEIGHT_BY_LENGTH = tuple(f"sampling/weight/{part}" for part in ("shortest", "shorter", "longer", "longest"))
CLIP_LOW = "clip_ratio/low_mean"
CLIP_HIGH = "clip_ratio/high_mean"
CLIP_REGION = "clip_ratio/region_mean"
CLIP_LOWEST = "clip_ratio/low_min"
CLIP_HIGHEST = "clip_ratio/high_max"
CISPO_CLIPPED = "cispo_clip_ratio"
VESPO_WEIGHT = "vespo/phi_seq_mean"
AUX_LOSS = "aux_loss"
POLICY_LOSS = "policy_loss"
ENTROPY_COEF = "entropy_coef"
GRAD_NORM = "grad_norm"
LEARNING_RATE = "learning_rate"
LENGTH_MEAN = "completions/mean_length"
LENGTH_MAX = "completions/max_length"
ENDED_MEAN = "completions/mean_terminated_length"
ENDED_MIN = "completions/min_terminated_length"
ENDED_MAX = "completions/max_terminated_length"
TRUNCATED = "completions/clipped_ratio"
SKIPPED = "skipped"
LOSS_SCALE = "float16/loss_scale"
OVERFLOWED = "float16/overflowed"
TOKENS = "num_tokens"
SECONDS_STEP = "step_time"
SECONDS_GENERATE = "seconds/generate"
SECONDS_SYNC = "seconds/sync"
SYNC_SHARE = "sync_share"
STALENESS = "staleness"
SECONDS_SAMPLING = "seconds/sampling"
SECONDS_OVERLAP = "seconds/overlap"
SECONDS_GRADE = "seconds/grade"
SECONDS_SCORE = "seconds/score"
SECONDS_UPDATE = "seconds/update"
TOKENS_PER_SECOND = "tokens_per_second"
MEMORY_ALLOCATED = "memory/allocated"
MEMORY_RESERVED = "memory/reserved"
MEMORY_RESIDENT = "memory/resident"

# The phases of a step, without the update, which is the remainder.
PHASES = (SECONDS_GENERATE, SECONDS_SYNC, SECONDS_GRADE, SECONDS_SCORE)
# Work at the same time as the phases, so it is not a part of the step.
SERVER_SECONDS = (SECONDS_SAMPLING, SECONDS_OVERLAP)

METRICS: dict[str, Metric] = {
    STEP: Metric("steps", "optimizer steps done"),
    EPOCH: Metric("epochs", "passes over the problems"),
    LOSS: Metric("loss", "the loss as logged; near zero is normal in on-policy GRPO, where advantages sum to zero"),
    REWARD: Metric("reward", "mean of the weighted reward over the step's completions", "rollout"),
    REWARD_STD: Metric("reward", "standard deviation of the reward over the step's completions", "rollout"),
    REWARD_MIN: Metric("reward", "smallest reward of the step", "rollout"),
    REWARD_MAX: Metric("reward", "largest reward of the step", "rollout"),
    ACCURACY: Metric("share", "completions with a correct answer, in any form", "graded"),
    ACCURACY_IN_FORMAT: Metric(
        "share", "completions that are correct and in the format that the prompt asks for", "graded"
    ),
    FORMAT_RATE: Metric("share", "completions in the format that their rows name, correct or wrong", "graded"),
    HELDOUT_ACCURACY: Metric("share", "held-out problems answered correctly, in any form; greedy", "heldout"),
    HELDOUT_IN_FORMAT: Metric("share", "held-out problems answered correctly and in the format; greedy", "heldout"),
    HELDOUT_N: Metric("problems", "number of these held-out problems", "heldout"),
    ADVANTAGE_MEAN: Metric("advantage", "mean advantage of the step's completions", "rollout"),
    ADVANTAGE_STD: Metric("advantage", "standard deviation of the advantages", "rollout"),
    DEGENERATE: Metric("share", "groups whose rewards are all equal: they have no gradient", "rollout"),
    ALL_RIGHT: Metric("share", "groups whose verdicts are all correct", "graded"),
    ALL_WRONG: Metric("share", "groups with no correct verdict", "graded"),
    PROMPTS_DRAWN: Metric("prompts", "prompts for which the step sampled completions", "resample"),
    PROMPTS_RETAINED: Metric(
        "prompts", "sampled prompts that the step trains on: they have correct and wrong completions", "resample"
    ),
    PROMPTS_DISCARDED: Metric("prompts", "prompts that were sampled and discarded", "resample"),
    KL: Metric(
        "nats", "KL to the reference per token, as kl_estimator gives it, times the ratio if that corrects it", "kl"
    ),
    RATIO: Metric("1", "mean importance ratio per token (current by sampling policy); 1 on policy"),
    APPROX_KL: Metric("nats", "KL of the sampling policy to the current one per token (k3); 0 on policy"),
    ENTROPY: Metric("nats", "entropy of the policy per token, without completions whose advantage is 0"),
    SAMPLER_DIFFERENCE: Metric("nats", "mean distance of vLLM's log-probs from the trainer's", "sampler"),
    DROPPED_TOKENS: Metric("share", "tokens to which the correction of vLLM's log-probs gives weight 0", "correction"),
    DROPPED_COMPLETIONS: Metric("share", "completions whose tokens all have weight 0", "correction"),
    EFFECTIVE_SHARE: Metric("share", "effective sample size of the completions' mean weights; 1: equal", "correction"),
    LOGP_SUM_SPREAD: Metric(
        "nats", "spread of a completion's summed log-ratios, divided by the root of its tokens", "correction"
    ),
    **{
        name: Metric("1", f"mean weight of the {name.rpartition('/')[2]} quarter of the completions", "correction")
        for name in WEIGHT_BY_LENGTH
    },
    CLIP_LOW: Metric("share", "tokens clipped below 1 - epsilon", "clip"),
    CLIP_HIGH: Metric("share", "tokens clipped above 1 + epsilon_high", "clip"),
    CLIP_REGION: Metric("share", "tokens clipped on either side", "clip"),
    CLIP_LOWEST: Metric("share", "smallest share of a completion's tokens that is clipped below", "clip"),
    CLIP_HIGHEST: Metric("share", "largest share of a completion's tokens that is clipped above", "clip"),
    GRAD_NORM: Metric("norm", "gradient norm before clipping"),
    LEARNING_RATE: Metric("1", "learning rate of the step"),
    LENGTH_MEAN: Metric("tokens", "mean completion length", "rollout"),
    "completions/min_length": Metric("tokens", "shortest completion", "rollout"),
    LENGTH_MAX: Metric("tokens", "longest completion", "rollout"),
    ENDED_MEAN: Metric("tokens", "mean length of the completions that ended by themselves; 0: none did", "rollout"),
    ENDED_MIN: Metric("tokens", "shortest of these", "rollout"),
    ENDED_MAX: Metric("tokens", "longest of these", "rollout"),
    TRUNCATED: Metric("share", "completions cut at max_completion_length", "rollout"),
    "tools/call_frequency": Metric("calls", "tool calls per completion of the step", "tools"),
    "tools/failure_frequency": Metric("share", "calls that raised", "tools"),
    SKIPPED: Metric("share", "steps that were skipped because their gradient was not finite"),
    LOSS_SCALE: Metric("1", "factor of the loss, which keeps small gradients above zero", "float16"),
    OVERFLOWED: Metric("share", "steps that were skipped because this factor was too large: it halves", "float16"),
    TOKENS: Metric("tokens", "prompt and completion tokens since the start", "rollout"),
    SECONDS_STEP: Metric("seconds", "wall time of the step; the phases below add up to it"),
    SECONDS_GENERATE: Metric("seconds", "generation; 0 in a step that reuses a rollout"),
    SECONDS_SYNC: Metric("seconds", "sending the weights to vLLM", "vllm"),
    SYNC_SHARE: Metric("share", "part of the step's wall time that sends weights", "vllm"),
    STALENESS: Metric(
        "steps", "optimizer steps between the weights that sampled the rollout and those that are trained", "ahead"
    ),
    SECONDS_SAMPLING: Metric("seconds", "for the servers to sample the batch, from request to answer", "ahead"),
    SECONDS_OVERLAP: Metric("seconds", "of the batch's sampling that training did not wait for; in no phase", "ahead"),
    SECONDS_GRADE: Metric("seconds", "grading and rewards"),
    SECONDS_SCORE: Metric("seconds", "the rollout's old and reference log-probs, padding and advantages"),
    SECONDS_UPDATE: Metric("seconds", "forward and backward; includes the optimizer only if DeepSpeed runs it"),
    TOKENS_PER_SECOND: Metric(
        "tokens/s", "prompt and completion tokens trained on by all processes, per second of wall time"
    ),
    MEMORY_ALLOCATED: Metric("bytes", "peak GPU memory of tensors since the start, on the main process", "gpu"),
    MEMORY_RESERVED: Metric("bytes", "peak GPU memory reserved by torch since the start, on the main process", "gpu"),
    MEMORY_RESIDENT: Metric("bytes", "peak resident memory of the main process since its start"),
}


# The categories of an evaluation's completions, and their names in tables.
CATEGORIES = {
    "correct": "correct, in the format",
    "correct_answer_bad_format": "correct, not in the format",
    "wrong_answer": "wrong, in the format",
    "bad_format": "wrong, not in the format",
    "truncated": "cut at the length limit",
    "ungradable": "ungradable",
}

# Categories that count for `accuracy`, in an evaluation as in training.
RIGHT = ("correct", "correct_answer_bad_format")
# Categories that count for `accuracy_in_format`.
IN_FORMAT = ("correct",)


def verdict_key(verdict: str) -> str:
    """Return the key of the share of a verdict.

    >>> verdict_key("crash")
    'grading/crash'
    """
    return f"grading/{verdict}"


def reserved(name: str) -> str:
    """Return the name under which a script's metric is collected. It gets a prefix if `METRICS` has the same name.

    >>> reserved("accuracy"), reserved("grading/crash"), reserved("my_metric")
    ('script/accuracy', 'script/grading/crash', 'my_metric')
    """
    return SCRIPT_PREFIX + name if name in METRICS or name.startswith(verdict_key("")) else name


def prefer_scripts(log: dict[str, Any]) -> None:
    """Replace our values with those that a script has logged under the same names.

    >>> log = {"accuracy": [0.5, 0.25], "script/accuracy": [0.75]}
    >>> prefer_scripts(log)
    >>> log
    {'accuracy': [0.75]}
    """
    for name in [name for name in log if name.startswith(SCRIPT_PREFIX)]:
        log[name.removeprefix(SCRIPT_PREFIX)] = log.pop(name)


def reward_key(name: str, figure: str = "mean") -> str:
    """Return the key under which TRL logs the mean or the std of one reward function.

    >>> reward_key("accuracy")
    'rewards/accuracy/mean'
    """
    return f"rewards/{name}/{figure}"
