"""Log-probs and entropies (B, T) as TRL's method gives them, from packed rows.

Rows go in padded and come out padded (`packing.py`); in between, each prompt is computed once and no padding is.

Does not hold a token budget of its own: `budget.TokenBudget` is shared with the update.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import Tensor

from grpo_math.trainer import attention
from grpo_math.trainer.arrange import arrange
from grpo_math.trainer.budget import TokenBudget
from grpo_math.trainer.packing import layout, pack, unpack

logger = get_logger(__name__)

WORTH_PACKING = 0.97  # a packed row with more of the padded tokens than this is scored as TRL does
Scores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probs, entropies, and TRL's auxiliary loss


def set_up(models: list[Any], images: bool, continuous_batching: bool) -> bool:
    """Switch the policy, and the reference where there is one, to the packed attention; False where one has none."""
    adapters = [adapter for model in models if is_peft_model(model) for adapter in model.peft_config.values()]
    hindrances = {
        "an image processor": images,
        "a prompt-learning adapter": any(adapter.is_prompt_learning for adapter in adapters),
        "continuous batching to generate with, which has no packed attention": continuous_batching,
    }
    models = [model.get_base_model() if is_peft_model(model) else model for model in models]
    for model in models:
        reason = next((reason for reason, there in hindrances.items() if there), attention.unsupported(model.config))
        if reason:
            logger.warning(f"pack_updates: {type(model).__name__} has {reason}; rows are scored unpacked.")
            return False
    attention.register()
    for model in models:
        model.set_attn_implementation(attention.NAME)
        model.base_model.register_forward_hook(attention.only_scored, with_kwargs=True)
    return True


class PackedScorer:
    """Called as TRL's ``_get_per_token_logps_and_entropies`` is, with that method, ``plain``, before the rest."""

    def __init__(self, accelerator: Any, budget: TokenBudget) -> None:
        self.accelerator, self.budget = accelerator, budget

    def __call__(
        self,
        plain: Callable[..., Scores],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        **kwargs: Any,
    ) -> Scores:
        """0 where there is padding."""
        logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        entropies = torch.zeros_like(logps)
        for index in self._batches(input_ids, attention_mask, logits_to_keep, batch_size):
            at = torch.tensor(index, device=input_ids.device)
            ids, mask = input_ids[at], attention_mask[at]
            row = pack(ids, mask, logits_to_keep)
            # Not one token to score, while other ranks may wait for this forward pass; or next to none to save.
            if row is None or row.input_ids.numel() > WORTH_PACKING * ids.numel():
                scores = plain(model, ids, mask, logits_to_keep, compute_entropy=compute_entropy, **kwargs)
                own: list[Any] = list(scores[:2])
            else:
                with self.accelerator.autocast():
                    outputs = model(
                        input_ids=row.input_ids,
                        position_ids=row.position_ids,
                        # A mask in four dimensions is taken as it is: transformers builds none, and ours needs none.
                        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
                        shift_labels=row.shift_labels,
                        fused_lm_head=True,
                        packed_groups=row.groups,
                        scored_index=row.scored_index,
                    )
                own = [unpack(outputs.log_probs, row), unpack(outputs.entropy, row) if compute_entropy else None]
            logps = logps.index_put((at,), own[0].to(logps.dtype))
            if compute_entropy:
                entropies = entropies.index_put((at,), own[1].to(logps.dtype))
        return logps, entropies if compute_entropy else None, None

    def _batches(
        self, input_ids: Tensor, attention_mask: Tensor, completion_length: int, batch_size: int | None
    ) -> list[list[int]]:
        """The rows of each forward pass. A part of the update is one; other rows are filled to the token budget, in as
        many passes on every rank."""
        if torch.is_grad_enabled():
            return [list(range(len(input_ids)))]
        prompts, prompt_tokens, tokens = layout(input_ids, attention_mask, completion_length)
        budget = self.budget.tokens or (batch_size or len(tokens)) * input_ids.size(1)
        batches = arrange(prompts, prompt_tokens, tokens, budget)[0] or [[0]]
        passes = int(self.accelerator.gather(torch.tensor([len(batches)], device=input_ids.device)).max())
        return batches + batches[-1:] * (passes - len(batches))
