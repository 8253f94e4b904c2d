"""The maximum number of tokens per micro-batch. It is halved when memory runs out, and the step is computed again.

micro_batches.py splits the rows.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from accelerate.logging import get_logger

from grpo_math.errors import OutOfMemory
from grpo_math.packing.micro_batches import Splitter, TrainingStep, row_layout
from grpo_math.packing.plan import packed_tokens

logger = get_logger(__name__)


class TokenBudget:
    """``setting``: the recipe's budget, 0 for as many tokens as TRL's padded micro-batch has.

    ``splits``: an update can be split at all. ``is_single_process``: no other process waits for this one.
    """

    def __init__(self, setting: int, splits: bool, is_single_process: bool) -> None:
        self.setting = setting
        self.splits = splits
        self.is_single_process = is_single_process
        self.halved_to: int | None = None

    @property
    def tokens(self) -> int:
        return self.setting if self.halved_to is None else self.halved_to

    def state_dict(self) -> dict[str, int | None]:
        return {"halved_to": self.halved_to}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        self.halved_to = state["halved_to"]

    def halve(self, several: int, largest: int, reason: str) -> int:
        """Halve the budget and return it.

        ``several``: the most tokens of a micro-batch with several completions, 0 if none has. ``largest``: the most
        tokens of any micro-batch. Raises `OutOfMemory` with a remedy if no micro-batch can be split.

        >>> TokenBudget(0, splits=True, is_single_process=True).halve(0, 70, "out of memory")
        Traceback (most recent call last):
        ...
        grpo_math.errors.OutOfMemory: out of memory in an update of one completion, 70 tokens with its prompt: ...
        """
        tokens, reason = f"{largest} tokens", reason.splitlines()[0]
        if not self.splits:
            remedy = "lower per_device_train_batch_size, or turn gradient_checkpointing on"
        elif not self.is_single_process:
            # The others would not compute the step again. They would wait in a collective.
            remedy = f"set max_tokens_per_micro_batch to {largest // 2}, or turn gradient_checkpointing on"
        elif not several:
            tokens = f"one completion, {tokens} with its prompt"
            remedy = "turn gradient_checkpointing on, or lower max_completion_length"
        else:
            self.halved_to = several // 2
            logger.warning(
                f"Out of memory in an update of {several} tokens: max_tokens_per_micro_batch is now {self.tokens}."
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return self.tokens
        raise OutOfMemory(f"out of memory in an update of {tokens}: {remedy} ({reason})")

    def split(self, steps: Sequence[TrainingStep], splitter: Splitter, reason: str) -> None:
        """Split the micro-batches of these training steps at half of the largest that can be split.

        A step may be given twice: a micro-batch that fits is not split again.
        """
        all_rows = [micro_batch.rows for step in steps for micro_batch in step.micro_batches]
        sizes = [(packed_tokens(*row_layout(rows)), len(rows["advantages"])) for rows in all_rows]
        several = max((tokens for tokens, completions in sizes if completions > 1), default=0)
        budget = self.halve(several, max(sizes)[0], reason)
        for step in steps:
            step.micro_batches = list(chain(*(splitter.smaller(one, budget) for one in step.micro_batches)))
