"""The panel "Why is the loss 0?": what each completion of a group adds to the gradient of its step.

A share is the absolute advantage x the completion's weight in the loss, because a run does not log the gradients of
tokens. The panel lists what the run has not logged.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any

from grpo_math.report.render import short
from grpo_math.run import metrics
from grpo_math.run.history import number

# Metrics that the history has for a whole step.
STEP_METRICS = {
    metrics.LOSS: "loss",
    metrics.POLICY_LOSS: "policy loss",
    metrics.GRAD_NORM: "gradient norm",
    metrics.CLIP_REGION: "share of clipped tokens",
    metrics.CISPO_CLIPPED: "share of clipped tokens",
    metrics.KL: "KL",
    metrics.DROPPED_TOKENS: "share of tokens that the sampler's correction drops",
    metrics.EFFECTIVE_SHARE: "effective share of completions after this correction",
}
# Settings by which a run leaves out tokens that its table does not name, and the value that leaves out none.
MASKS = {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "delta": None}

Row = Mapping[str, Any]


# ``rows``: a table with a row for each completion. ``sentences``: what the table means.
Panel = dict[str, list[Any]]


def panels(groups: Sequence[Sequence[Row]], config: Mapping[str, Any], line: Mapping[str, float]) -> Iterator[Panel]:
    """Yield a panel for each group of a step's completions. ``line`` is the step's line of the history."""
    rows = [row for group in groups for row in group]
    advantages = [float(row["advantage"] or 0.0) for row in rows]
    left_out = [_left_out(row, config) for row in rows]
    # The tokens of a completion that was not graded count: the loss divides by them.
    tokens = [[0 if _is_masked(row, config) else row["tokens"] for row in group] for group in groups]
    loss_type = config.get("loss_type") or "dapo"
    weights = row_weights(loss_type, tokens, config.get("max_completion_length") or max(1, *map(max, tokens)))
    shares = gradient_shares(advantages, weights)
    value = -sum(advantage * weight for advantage, weight in zip(advantages, weights, strict=True))
    logged = [f"{label} {short(line[name])}" for name, label in STEP_METRICS.items() if name in line]
    about_step = [
        f"With all ratios at 1, the policy loss of the {len(rows)} completions is {short(value + 0.0)}: minus the sum "
        f"of advantage x weight (loss_type {loss_type}).",
        f"Logged for the whole step: {', '.join(logged)}." if logged else "The history has no line of this step.",
        *_unknown(rows, config, loss_type),
    ]
    named = [name for name in rows[0] if metrics.reward_key(name) in line]
    parts = zip(advantages, left_out, shares, strict=True)
    for group in groups:
        baselines = group_baselines([row["reward"] for row in group], config.get("baseline") or "group_mean")
        group_parts = list(islice(parts, len(group)))
        table = [
            {
                "completion": number,
                "verdict": row["verdict"],
                **{name: row[name] for name in named},
                "reward": row["reward"],
                "baseline": baseline,
                "advantage": advantage,
                "tokens": row["tokens"],
                "left out": reason or ("no" if advantage else "advantage 0"),
                "share of the gradient": f"{share:.1%}",
            }
            for number, (row, baseline, (advantage, reason, share)) in enumerate(
                zip(group, baselines, group_parts, strict=True), 1
            )
        ]
        why = _why([advantage for advantage, _, _ in group_parts], sum(share for _, _, share in group_parts))
        yield {"rows": table, "sentences": [why, *about_step]}


def row_weights(loss_type: str, groups: Sequence[Sequence[int]], limit: int) -> list[float]:
    """Return each completion's weight in the loss of its step: its number of tokens, divided as ``loss_type`` does.

    ``groups`` are the tokens that count, by group; ``limit`` is ``max_completion_length``. prompt_mean divides by the
    tokens of the completion's group, and by the number of groups with tokens.

    >>> groups = [[3, 1], [0, 4]]
    >>> row_weights("grpo", groups, 10), row_weights("dapo", groups, 10)
    ([0.25, 0.25, 0.0, 0.25], [0.375, 0.125, 0.0, 0.5])
    >>> row_weights("dr_grpo", groups, 10), row_weights("luspo", groups, 10)
    ([0.075, 0.025, 0.0, 0.1], [0.75, 0.25, 0.0, 1.0])
    >>> row_weights("prompt_mean", [*groups, [0, 0]], 10)
    [0.375, 0.125, 0.0, 0.5, 0.0, 0.0]
    """
    if loss_type == "prompt_mean":
        prompts = sum(map(any, groups))
        return [n / (prompts * sum(group)) if n else 0.0 for group in groups for n in group]
    tokens = [n for group in groups for n in group]
    rows = len(tokens)
    if loss_type in ("grpo", "sapo"):
        return [min(n, 1) / rows for n in tokens]
    divisor = {"dr_grpo": rows * limit, "luspo": rows}.get(loss_type, sum(tokens))
    return [n / max(divisor, 1) for n in tokens]


def gradient_shares(advantages: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return each completion's share of the sum of absolute advantage x weight; 0 if all advantages are 0.

    >>> gradient_shares([1.5, -0.5, -0.5, 0.0], [0.25, 0.25, 0.5, 0.25])
    [0.5, 0.16666666666666666, 0.3333333333333333, 0.0]
    """
    parts = [abs(advantage) * weight for advantage, weight in zip(advantages, weights, strict=True)]
    return [part / (sum(parts) or 1.0) for part in parts]


def group_baselines(rewards: Sequence[object], baseline: str) -> list[float | None]:
    """Return what is subtracted from each reward of a group; None if unknown. A missing reward counts nowhere.

    >>> group_baselines([1.0, 0.0, None], "group_mean"), group_baselines([1.0, 0.0, None], "leave_one_out")
    ([0.5, 0.5, 0.5], [0.0, 1.0, 0.5])
    >>> group_baselines([1.0], "none"), group_baselines([1.0], "mine:baseline")
    ([0.0], [None])
    """
    if baseline not in ("group_mean", "leave_one_out"):
        return [0.0 if baseline == "none" else None] * len(rewards)
    numbers = [number(reward) for reward in rewards]
    others = [
        [value for j, value in enumerate(numbers) if value is not None and (j != i or baseline == "group_mean")]
        for i in range(len(numbers))
    ]
    return [fmean(values) if values else None for values in others]


def _left_out(row: Row, config: Mapping[str, Any]) -> str:
    """Return why a completion adds nothing to the gradient, or ""."""
    if row["reward"] is None:
        return "dropped: not graded"
    return "masked: cut at the limit" if _is_masked(row, config) else ""


def _is_masked(row: Row, config: Mapping[str, Any]) -> bool:
    return bool(row["truncated"] and config.get("mask_truncated_completions"))


def _why(advantages: Sequence[float], share: float) -> str:
    if not any(advantages):
        return "All advantages of this group are 0, because its rewards are equal: they add nothing to the gradient."
    total = sum(advantages)
    if abs(total) > 1e-3 * sum(map(abs, advantages)):
        return f"The advantages of this group add up to {short(total)}, so its part of the loss need not be near 0."
    return (
        "The loss is near 0 although the model learns, because the advantages of a group add up to 0 and every ratio "
        "is 1 before the weights change; the gradient is not 0, because each completion moves its own tokens by its "
        f"advantage. This group has {share:.0%} of the gradient of the completions in the table of this step."
    )


def _unknown(rows: Sequence[Row], config: Mapping[str, Any], loss_type: str) -> list[str]:
    """Return sentences about what the run has not logged."""
    masks = [name for name, off in MASKS.items() if config.get(name, off) not in (None, off)]
    size = [config.get(name, 1) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    step = size[0] * size[1] * config.get("num_processes", 1)
    known = {
        "The length of each token's gradient, its clipping, KL and correction for the sampler are not logged: a share "
        "is absolute advantage x weight, without them.": True,
        f"Which tokens {', '.join(masks)} left out is not logged.": bool(masks),
        "The tokens include the outputs of tools, which have no gradient.": any(row.get("turns") for row in rows),
        "bnpo divides by the tokens of a micro-batch, which are not logged: the whole step is taken.": (
            loss_type == "bnpo"
        ),
        "loss_type is not recorded: TRL's default is taken.": "loss_type" not in config,
        f"A step trains on {step} completions and the table has {len(rows)}: shares are of the table.": (
            "per_device_train_batch_size" in config and step != len(rows)
        ),
    }
    return [" ".join(sentence for sentence, holds in known.items() if holds)]
