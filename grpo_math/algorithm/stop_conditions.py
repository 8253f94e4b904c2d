"""Distinguish truncated completions from those that a stop string or stop token ended. TRL supports EOS only.

With ``generation_kwargs: {stop: ["</answer>"], ...}`` TRL would log every completion as clipped, and mask all of them
under ``mask_truncated_completions``. `StopConditions` corrects the metrics, and masks instead of TRL.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo_math.algorithm.rows import Rows, loss_mask
from grpo_math.generation.request import Request
from grpo_math.run import metrics


class StopConditions:
    """Decides whether a completion is truncated.

    ``request``: the recipe's, with its stop strings, stop tokens and limit. ``ends``: the token ids that end or
    pad a completion. ``exist``: a stop string or stop token may end a completion.

    >>> from grpo_math.generation.request import request_from
    >>> request = request_from({"generation_kwargs": {"eos_token_id": 7}, "max_completion_length": 8})
    >>> conditions = StopConditions(request, ends=[2])
    >>> conditions.is_truncated([5, 7]), conditions.is_truncated([5] * 8)
    (False, True)

    vLLM removes a stop string unless ``include_stop_str_in_output`` is set. So with stop strings a completion below the
    limit is complete, with any last token.
    """

    def __init__(self, request: Request, ends: Iterable[int]) -> None:
        self.exist = bool(request.stop or request.stop_token_ids)
        self._limit = request.max_new_tokens
        self._ends = {*ends, *request.stop_token_ids}

    def is_truncated(self, ids: Sequence[int]) -> bool:
        """Return True if the limit has ended a completion."""
        if ids and ids[-1] in self._ends:
            return False
        return not self.exist or len(ids) >= self._limit

    def gather_metrics(
        self, ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]] | None, accelerator: Any
    ) -> dict[str, float]:
        """Return the corrected values of the metrics that TRL's `_generate` logs of all ranks' completions.

        ``masks``: 1 for a token of the model, 0 for a tool's, which TRL does not count. None without tools.
        """
        if not self.exist:
            return {}
        written = map(len, ids) if masks is None else map(sum, masks)
        ends = [[length, self.is_truncated(tokens)] for length, tokens in zip(written, ids, strict=True)]
        lengths, truncated = accelerator.gather(torch.tensor(ends, device=accelerator.device)).unbind(dim=1)
        # TRL logs a length of 0 if no completion has ended.
        ended = lengths[truncated == 0].float() if not truncated.all() else torch.zeros(1)
        return {
            metrics.TRUNCATED: truncated.float().mean().item(),
            metrics.ENDED_MEAN: ended.mean().item(),
            metrics.ENDED_MIN: ended.min().item(),
            metrics.ENDED_MAX: ended.max().item(),
        }

    def gather_masked(self, rows: Rows, accelerator: Any) -> Rows:
        """Mask the truncated completions, as TRL's ``mask_truncated_completions`` does."""
        if not self.exist:
            return rows
        mask = rows["completion_mask"]
        lengths = zip(rows["completion_ids"].tolist(), mask.sum(dim=1).tolist(), strict=True)
        complete = [not self.is_truncated(ids[:length]) for ids, length in lengths]
        # TRL masks tool_mask too. Only the product of both masks is used.
        rows = {**rows, "completion_mask": mask * torch.tensor(complete, device=mask.device)[:, None]}
        # TRL's dapo loss divides by the tokens of all ranks.
        return {**rows, "num_items_in_batch": accelerator.gather(loss_mask(rows).sum()).sum()}
