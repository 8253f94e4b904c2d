"""Build the inputs of a micro-batch's loss from its rows, with the divisors of an optimizer step's losses.

An example: a rollout of 32 tokens on 2 ranks, which serves 2 optimizer steps of 2 training steps. A rank's share of an
optimizer step is then 8 tokens, in 2 micro-batches. This micro-batch has a completion of 3 tokens and one of 1. Every
token has the loss -1.

>>> import torch
>>> from grpo_math.algorithm.losses import compute_loss
>>> mask, zeros = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.zeros(2, 3)
>>> rows = {"completion_mask": mask, "advantages": torch.ones(2), "num_items_in_batch": torch.tensor(32)}
>>> rows["prompt_weight"] = torch.full((2,), 1 / 32)  # one prompt with all 32 tokens
>>> normalizers = Normalizers.for_optimizer_step(ranks=2, accumulation=2, steps_per_rollout=4)
>>> def loss(loss_type, aux_loss=None, **others):
...     settings = LossSettings(loss_type=loss_type, max_completion_length=8, **others)
...     inputs = loss_inputs(rows, zeros, zeros + 0.5, normalizers, settings, aux_loss=aux_loss)
...     return compute_loss(inputs, settings).loss.item()
>>> loss("dapo")  # 4 tokens by the rank's share: 4 / (32 / 4)
-0.5
>>> loss("prompt_mean")  # 4 tokens of weight 1/32 by the share: 4 / 32 / (1 / 4)
-0.5
>>> loss("grpo")  # a mean of 1 over the completions by the accumulation: 1 / 2
-0.5
>>> loss("dr_grpo")  # 4 tokens by 2 completions of at most 8, by the accumulation: 4 / (2 * 8) / 2
-0.125
>>> loss("grpo", trained_share=0.5)  # half of the completions are masked: 1 / 0.5 / 2
-1.0
>>> loss("dapo", entropy_coef=0.5)  # less 0.5 times the entropy of 0.5, by the accumulation
-0.625
>>> loss("dapo", aux_loss=torch.tensor(1.0), router_aux_loss_coef=0.5)  # and 0.5 * 1 / 2 more
-0.25
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_math.algorithm import correction
from grpo_math.algorithm.losses import LossInputs, LossSettings
from grpo_math.algorithm.rows import Rows, loss_mask


@dataclass(frozen=True)
class Normalizers:
    """Divisors of the losses of one rank in an optimizer step, besides the number of a micro-batch's rows.

    ``share``: the part of a rollout's tokens that one rank trains on in an optimizer step. ``accumulation``: the number
    of TRL's micro-batches in the step.
    """

    share: float = 1.0
    accumulation: int = 1

    @classmethod
    def for_optimizer_step(cls, ranks: int, accumulation: int, steps_per_rollout: int) -> "Normalizers":
        """Return the divisors of an optimizer step with ``accumulation`` of the training steps of a rollout.

        >>> Normalizers.for_optimizer_step(ranks=2, accumulation=2, steps_per_rollout=4)
        Normalizers(share=0.25, accumulation=2)
        """
        return cls(1 / ranks * accumulation / steps_per_rollout, accumulation)


def loss_inputs(
    rows: Rows,
    logps: Tensor,
    entropies: Tensor,
    normalizers: Normalizers,
    settings: LossSettings,
    entropy_mask: Tensor | None = None,
    aux_loss: Tensor | None = None,
) -> LossInputs:
    """Return the inputs of the loss of rows with these log-probs and entropies (B, T)."""
    mask, advantages = loss_mask(rows), rows["advantages"]
    old_logps = rows.get("old_per_token_logps", logps.detach())
    sampling_logps = rows.get("sampling_per_token_logps")
    corrects = settings.vllm_importance_sampling_correction
    sampler_ratio = rows.get("importance_sampling_ratio") if corrects or settings.surrogate == "vespo" else None
    if settings.on_policy and corrects and sampler_ratio is not None and sampling_logps is not None:
        # TRL scored the old log-probs in other rows, and in 16 bits the rows of a batch move log-probs. The policy
        # is still the one that was scored, so these log-probs are the old ones, and the ratio is exactly 1.
        scored, old_logps = old_logps, logps.detach()
        weights = correction.sampler_weights(old_logps, sampling_logps, mask, settings)
        # A script may have changed the weights. `where`, because an `if` would wait for the GPU.
        expected = correction.sampler_weights(scored, sampling_logps, mask, settings)
        changed = ((sampler_ratio != expected) * mask).any()
        old_logps, sampler_ratio = torch.where(changed, scored, old_logps), torch.where(changed, sampler_ratio, weights)
    return LossInputs(
        logps=logps,
        old_logps=old_logps,
        advantages=advantages if advantages.dim() > 1 else advantages[:, None],
        mask=mask,
        entropies=entropies,
        ref_logps=rows["ref_per_token_logps"] if settings.beta != 0.0 else None,
        sampling_logps=sampling_logps,
        sampler_ratio=sampler_ratio,
        entropy_mask=entropy_mask,
        aux_loss=aux_loss,
        micro_batch_tokens=rows["micro_batch_tokens"][:, None] if "micro_batch_tokens" in rows else None,
        # num_items_in_batch counts the tokens of the rollout.
        tokens_per_step=rows["num_items_in_batch"].clamp(min=1) * normalizers.share,
        row_weights=rows["prompt_weight"][:, None] / normalizers.share if settings.loss_type == "prompt_mean" else 1.0,
        accumulation=normalizers.accumulation,
        # TRL takes an advantage for each token from a subclass.
        advantages_of_tokens=advantages.dim() > 1,
    )
