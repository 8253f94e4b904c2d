"""Tells completions that were cut at the limit from those that a stop string or token ended. TRL knows EOS alone.

With ``generation_kwargs: {stop: ["</answer>"], ...}`` TRL would log every completion as clipped, and mask each under
``mask_truncated_completions``. `Endings` counts anew what TRL has logged, and masks in its place.

Does not end a completion: vLLM does.
"""

from collections.abc import Sequence
from typing import Any

import torch

from grpo_math.run import metrics
from grpo_math.trainer.rows import Rows, scored


class Endings:
    """The ends of this trainer's completions, besides the limit.

    vLLM takes a stop string off unless ``include_stop_str_in_output`` is set. So a completion that is shorter than the
    limit has ended, whatever its last tokens are.
    """

    def __init__(self, trainer: Any) -> None:
        options = trainer.args.generation_kwargs or {}
        tokens = options.get("stop_token_ids") or []
        self.stops = bool(options.get("stop") or tokens)
        self.masks = self.stops and trainer.mask_truncated_completions
        self._limit = trainer.max_completion_length
        self._ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id, *tokens}
        # TRL would mask every completion that does not end with EOS.
        if self.masks:
            trainer.mask_truncated_completions = False

    def cut(self, ids: Sequence[int]) -> bool:
        """Return True if nothing but the limit has ended a completion."""
        if ids and ids[-1] in self._ends:
            return False
        return not self.stops or len(ids) >= self._limit

    def count(self, trainer: Any, ids: Sequence[Sequence[int]]) -> None:
        """Count what TRL has just logged of the ends of all ranks' completions again."""
        if not self.stops:
            return
        ends = [[len(tokens), self.cut(tokens)] for tokens in ids]
        of_all = trainer.accelerator.gather(torch.tensor(ends, device=trainer.accelerator.device))
        # The same figures as TRL's `_generate` logs, over all ranks.
        lengths, cut = of_all[:, 0], of_all[:, 1].bool()
        ended = lengths[~cut].float() if not cut.all() else torch.zeros(1)
        logged = trainer._metrics["train" if trainer.model.training else "eval"]
        logged[metrics.TRUNCATED][-1] = cut.float().mean().item()
        figures = {metrics.ENDED_MEAN: ended.mean(), metrics.ENDED_MIN: ended.min(), metrics.ENDED_MAX: ended.max()}
        for name, value in figures.items():
            logged[name][-1] = value.item()

    def mask(self, rows: Rows, accelerator: Any) -> Rows:
        """Mask the completions that were cut, as TRL's ``mask_truncated_completions`` does."""
        if not self.masks:
            return rows
        mask = rows["completion_mask"]
        lengths = zip(rows["completion_ids"].tolist(), mask.sum(dim=1).tolist(), strict=True)
        kept = [not self.cut(ids[:length]) for ids, length in lengths]
        keep = torch.tensor(kept, device=mask.device)[:, None].to(mask.dtype)
        left = dict(rows)
        for name in ("completion_mask", "tool_mask"):
            if name in rows:
                left[name] = rows[name] * keep
        # TRL's losses of type dapo divide by this number, which counts the tokens of all ranks.
        left["num_items_in_batch"] = accelerator.gather(scored(left).sum()).sum()
        return left
