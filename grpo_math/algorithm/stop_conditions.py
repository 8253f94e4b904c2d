"""Distinguish truncated completions from those that a stop string ended. TRL supports end tokens only.

With ``generation_kwargs: {stop: ["</answer>"], ...}`` TRL would log every completion as clipped, and mask all of them
under ``mask_truncated_completions``. `StopConditions` replaces these metrics, and masks instead of TRL.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo_math.algorithm.rows import Rows, gather_masked, loss_mask
from grpo_math.generation.completion import is_truncated
from grpo_math.generation.request import Request
from grpo_math.run import metrics
from grpo_math.system.collectives import Ranks


class StopConditions:
    """Decides whether a completion of a rollout is truncated, as `is_truncated` does for an evaluation.

    ``request``: the recipe's, with its stop ``strings`` and stop ``tokens``. ``ends``: the other token ids that end or
    pad a completion.
    """

    def __init__(self, tokenizer: Any, request: Request, ends: Iterable[int]) -> None:
        self.strings = request.stop
        self.tokens = request.stop_token_ids
        self._tokenizer = tokenizer
        self._ends = {*ends, *self.tokens}

    def is_truncated(self, ids: Sequence[int], mask: Sequence[int]) -> bool:
        """Return True if a limit has ended a completion. ``mask``: 1 for a token of the model, 0 for a tool's."""
        # A stop string of an earlier turn has not ended the last turn.
        start = max((t for t, written in enumerate(mask, 1) if not written), default=0)
        # TRL reads the last token, which may be a tool's.
        return is_truncated(self._tokenizer, ids[start:] or ids[-1:], self._ends, self.strings)

    def gather_metrics(
        self, masks: Sequence[Sequence[int]], truncated: Sequence[bool], ranks: Ranks
    ) -> dict[str, float]:
        """Return the metrics of the ends of all ranks' completions, in place of those that TRL's `_generate` logs.

        ``masks``: as for `is_truncated`. TRL does not count the tokens of tools.
        """
        # TRL's are the same then. Each number that is read waits for the GPU.
        if not self.strings:
            return {}
        ends = list(zip(map(sum, masks), truncated, strict=True))
        lengths, cut = ranks.gather(torch.tensor(ends, device=ranks.device)).unbind(dim=1)
        # TRL logs a length of 0 if no completion has ended.
        ended = lengths[cut == 0].float() if not cut.all() else torch.zeros(1)
        return {
            metrics.TRUNCATED: cut.float().mean().item(),
            metrics.ENDED_MEAN: ended.mean().item(),
            metrics.ENDED_MIN: ended.min().item(),
            metrics.ENDED_MAX: ended.max().item(),
        }

    def gather_masked(self, rows: Rows, ranks: Ranks) -> Rows:
        """Mask the truncated completions, as TRL's ``mask_truncated_completions`` does.

        >>> from types import SimpleNamespace
        >>> tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
        >>> stops = StopConditions(tokenizer, Request(stop=["!"]), ends=[0])
        >>> ids = torch.tensor([[*b"ye", 0], [*b"yes"], [*b"no!"]])
        >>> rows = {"completion_ids": ids, "completion_mask": torch.ones_like(ids)}
        >>> stops.gather_masked(rows, Ranks(0, 1, "cpu", gather=lambda count: count))["completion_mask"].tolist()
        [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
        """
        if not self.strings:
            return rows
        mask, ids = rows["completion_mask"], rows["completion_ids"].tolist()
        written, lengths = loss_mask(rows).tolist(), mask.sum(dim=1).tolist()
        complete = [not self.is_truncated(a[:n], b[:n]) for a, b, n in zip(ids, written, lengths, strict=True)]
        # TRL masks tool_mask too. Only the product of both masks is used.
        return gather_masked(rows, torch.tensor(complete), ranks)
