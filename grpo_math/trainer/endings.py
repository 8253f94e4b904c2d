"""Which completions were cut at the limit, where stop strings or tokens of vLLM's end them too: TRL knows EOS alone.

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
    """What ends a completion of this trainer, beside its limit.

    A stop string that vLLM takes off (it does without ``include_stop_str_in_output``) is not there to be seen: then a
    completion that is shorter than the limit has ended.
    """

    def __init__(self, trainer: Any) -> None:
        asked = trainer.args.generation_kwargs or {}
        strings, tokens = asked.get("stop") or [], asked.get("stop_token_ids") or []
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        self.stops = bool(self.strings or tokens)
        self.masks = self.stops and trainer.mask_truncated_completions
        self._stays = bool(asked.get("include_stop_str_in_output"))
        self._tokenizer, self._limit = trainer._tokenizer, trainer.max_completion_length
        self._ends = {*trainer.eos_token_ids, self._tokenizer.pad_token_id, *tokens}
        self._tail = max((len(string.encode()) for string in self.strings), default=0) + 1
        if self.masks:
            trainer.mask_truncated_completions = False

    def cut(self, ids: Sequence[int]) -> bool:
        """Whether a completion's tokens end on nothing but the limit."""
        if ids and ids[-1] in self._ends:
            return False
        if not ids or not self.strings:
            return True
        if not self._stays:
            return len(ids) >= self._limit
        tail = self._tokenizer.decode(ids[-self._tail :])  # a token has a byte at least
        return not any(string in tail for string in self.strings)

    def count(self, trainer: Any, ids: Sequence[Sequence[int]]) -> None:
        """What TRL has just logged of these completions' endings, of all ranks, is counted anew."""
        if not self.stops:
            return
        own = [[len(tokens), self.cut(tokens)] for tokens in ids]
        every = trainer.accelerator.gather(torch.tensor(own, device=trainer.accelerator.device))
        lengths, cut = every[:, 0], every[:, 1].bool()
        ended = lengths[~cut].float() if not cut.all() else torch.zeros(1)
        logged = trainer._metrics["train" if trainer.model.training else "eval"]
        logged[metrics.TRUNCATED][-1] = cut.float().mean().item()
        figures = {metrics.ENDED_MEAN: ended.mean(), metrics.ENDED_MIN: ended.min(), metrics.ENDED_MAX: ended.max()}
        for name, value in figures.items():
            logged[name][-1] = value.item()

    def mask(self, rows: Rows, accelerator: Any) -> Rows:
        """The rows without the tokens of those that were cut, as TRL's ``mask_truncated_completions`` leaves them."""
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
        left["num_items_in_batch"] = accelerator.gather(scored(left).sum()).sum()
        return left
