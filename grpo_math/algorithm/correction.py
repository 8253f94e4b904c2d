"""The correction between sampler and trainer: its weights, and metrics of those that are dropped or fade with length.

vLLM and the trainer give a token slightly different log-probs. TRL corrects for it: it multiplies a token's loss by
exp(trainer's log-prob - vLLM's), or a whole completion's by exp of the sum, and truncates or drops a weight above 3.
Under noise of `sigma` nats per token a sum over T tokens has a spread of sigma * sqrt(T), so a long completion can lose
most of its gradient in the sequence modes while a short one keeps all of it. The mean over the tokens has a spread of
sigma / sqrt(T): our mode `GEOMETRIC` drops a completion by its mean, at any length.
"""

import math

import torch
from torch import Tensor

from grpo_math.algorithm.losses import LossSettings
from grpo_math.algorithm.rows import Rows, loss_mask
from grpo_math.run import metrics
from grpo_math.system.collectives import Ranks

GEOMETRIC = "geometric_mask"


def log_ratios(logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> Tensor:
    """Return the trainer's log-probs minus the sampler's (B, T), 0 for a token that does not count or is unknown.

    >>> log_ratios(torch.zeros(1, 3), torch.tensor([[-1.0, float("nan"), -1.0]]), torch.tensor([[1, 1, 0]]))
    tensor([[1., 0., 0.]])
    """
    return torch.nan_to_num(logps - sampling_logps, nan=0.0) * mask


def sampler_ratio(differences: Tensor, mode: str, low: float | None, high: float | None) -> Tensor:
    """Return TRL's weights of tokens (B, T), or of completions (B, 1) in a sequence mode.

    ``differences`` (B, T) are `log_ratios`.
    ``mode`` is ``vllm_importance_sampling_mode``; ``low`` and ``high`` are its bounds.

    >>> differences = torch.tensor([[0.0, 2.0]])
    >>> sampler_ratio(differences, "token_truncate", 1.5, 3.0)
    tensor([[1.5000, 3.0000]])
    >>> sampler_ratio(differences, "sequence_mask", None, 3.0)
    tensor([[0.]])
    >>> sampler_ratio(differences, "token_mask", 1.0, 1.0)
    tensor([[1., 0.]])
    """
    level, action = mode.split("_")
    ratio = (differences.sum(dim=1, keepdim=True) if level == "sequence" else differences).exp()
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    if action == "truncate":
        return ratio.clamp(*bounds)
    return ratio.masked_fill((ratio < bounds[0]) | (ratio > bounds[1]), 0.0)


def sampler_weights(logps: Tensor, sampling_logps: Tensor, mask: Tensor, settings: LossSettings) -> Tensor:
    """Return the weights of ``vllm_importance_sampling_mode``, as `sampler_ratio`.

    In the mode geometric_mask a completion is kept if the geometric mean of its tokens' ratios is within the bounds.

    >>> logps, zeros, mask = torch.tensor([[0.008, -0.004], [0.03, 0.0]]), torch.zeros(2, 2), torch.ones(2, 2)
    >>> sampler_weights(logps, zeros, mask, LossSettings(vllm_importance_sampling_mode="geometric_mask"))
    tensor([[1.],
            [0.]])
    """
    differences = log_ratios(logps, sampling_logps, mask)
    bounds = settings.vllm_importance_sampling_clip_min, settings.vllm_importance_sampling_clip_max
    if settings.vllm_importance_sampling_mode != GEOMETRIC:
        return sampler_ratio(differences, settings.vllm_importance_sampling_mode, *bounds)
    mean = (differences.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()
    return ((mean >= settings.geometric_mask_low) & (mean <= settings.geometric_mask_high)).to(differences.dtype)


def gather_metrics(rows: Rows, ranks: Ranks) -> dict[str, float]:
    """Return the metrics of a rollout's correction, over the completions of all ranks, which all call this.

    ``rows`` have `old_per_token_logps` and `sampling_per_token_logps` (B, T), and TRL's `importance_sampling_ratio`,
    (B, T) or, in a sequence mode, (B, 1). vLLM gives no log-prob for some tokens (NaN); TRL's weight is then 1.

    >>> from types import SimpleNamespace
    >>> zeros, one = torch.zeros(2, 4), SimpleNamespace(gather=lambda rows: rows)
    >>> rows = {"completion_mask": torch.ones(2, 4), "old_per_token_logps": zeros, "sampling_per_token_logps": zeros}
    >>> weighted = {**rows, "importance_sampling_ratio": torch.tensor([[1.0], [0.0]])}
    >>> gather_metrics(weighted, one)["sampling/dropped_tokens"]
    0.5
    >>> short = {**weighted, "completion_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])}
    >>> gather_metrics(short, one)[metrics.WEIGHT_BY_LENGTH[0]]
    1.0
    >>> gather_metrics(rows, one), gather_metrics({**weighted, "completion_mask": zeros}, one)
    ({}, {})
    """
    if "importance_sampling_ratio" not in rows:
        return {}
    mask = loss_mask(rows).float()
    differences = log_ratios(rows["old_per_token_logps"], rows["sampling_per_token_logps"], mask)
    weights = rows["importance_sampling_ratio"].float() * mask
    # TRL's mask modes set a weight outside the bounds to exactly 0.
    dropped = (weights == 0) * mask
    # (B of all ranks, 4): all sums in one gather.
    sums = ranks.gather(torch.stack([column.sum(dim=1) for column in (mask, weights, dropped, differences)], dim=1))
    # A completion that is masked as a whole has no tokens to divide by.
    tokens, weights, dropped, differences = sums[sums[:, 0] > 0].unbind(dim=1)
    if not len(tokens):
        return {}
    means = weights / tokens
    by_length = tokens.argsort(stable=True).tensor_split(len(metrics.WEIGHT_BY_LENGTH))
    quarters = zip(metrics.WEIGHT_BY_LENGTH, by_length, strict=True)
    return {
        metrics.DROPPED_TOKENS: (dropped.sum() / tokens.sum()).item(),
        metrics.DROPPED_COMPLETIONS: (dropped == tokens).float().mean().item(),
        # Kish's effective sample size, as a share of the completions: 1 if all weights are equal.
        metrics.EFFECTIVE_SHARE: (means.sum() ** 2 / (len(means) * (means**2).sum()).clamp(min=1e-12)).item(),
        # The standard deviation of one token's log-ratio, if the log-ratios of a completion are independent.
        metrics.LOGP_SUM_SPREAD: ((differences**2).sum() / tokens.sum()).sqrt().item(),
        **{name: means[quarter].mean().item() for name, quarter in quarters if len(quarter)},
    }
