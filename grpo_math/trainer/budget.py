"""The most tokens in one forward and backward pass: halved when memory runs out, and the step is done again.

Does not split rows: `micro_batches.py` does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from grpo_math.errors import OutOfMemory
from grpo_math.trainer.arrange import packed_tokens
from grpo_math.trainer.micro_batches import Splitter
from grpo_math.trainer.rows import lay_out

logger = get_logger(__name__)


class TokenBudget:
    """``tokens``: the budget, 0 for as many as TRL's padded micro-batch has.

    ``splits``: an update can be split at all. ``alone``: no other process waits for this one.
    """

    def __init__(self, tokens: int, splits: bool, alone: bool) -> None:
        self.tokens, self.splits, self.alone = tokens, splits, alone
        self.halved_to: int | None = None

    def halve(self, several: int, largest: int, reason: str) -> int:
        """The new budget: half of ``several``, the most tokens of a pass with several completions (0: there is none).

        ``largest``: the most tokens of any pass.

        >>> TokenBudget(0, splits=True, alone=True).halve(0, 70, "out of memory")
        Traceback (most recent call last):
        ...
        grpo_math.errors.OutOfMemory: out of memory in an update of one completion, 70 tokens with its prompt: ...
        """
        reason = reason.splitlines()[0]
        subject = ""
        if not self.splits:
            remedy = "lower per_device_train_batch_size, or turn gradient_checkpointing on"
        elif not self.alone:
            remedy = f"set update_token_budget to {largest // 2}, or turn gradient_checkpointing on"
        elif not several:
            subject = "one completion, "
            remedy = "turn gradient_checkpointing on, or lower max_completion_length or max_seq_length_train"
        else:
            self.tokens = self.halved_to = several // 2
            logger.warning(f"Out of memory in an update of {several} tokens: update_token_budget is now {self.tokens}.")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return self.tokens
        tokens = f"{subject}{largest} tokens{' with its prompt' if subject else ''}"
        raise OutOfMemory(f"out of memory in an update of {tokens}: {remedy} ({reason})")

    def split(self, steps: Iterable[dict[str, Any]], splitter: Splitter, reason: str) -> None:
        """Split the micro-batches of these training steps at half of the largest that can be split."""
        # A training step that is done is still among the buffered ones, and must be split once.
        steps = list({id(step): step for step in steps}.values())
        micro_batches = [rows for step in steps for rows, _ in step["micro_batches"]]
        sizes = [(packed_tokens(*lay_out(rows)), len(rows["advantages"])) for rows in micro_batches]
        several = max((tokens for tokens, completions in sizes if completions > 1), default=0)
        budget = self.halve(several, max(sizes)[0], reason)
        for step in steps:
            step["micro_batches"] = [
                part for whole in step["micro_batches"] for part in splitter.smaller(whole, budget)
            ]


class Redo:
    """Does an optimizer step again, in smaller micro-batches, when memory runs out in one of its training steps."""

    def __init__(self, accelerator: Any, budget: TokenBudget, splitter: Splitter) -> None:
        self.accelerator, self.budget, self.splitter = accelerator, budget, splitter
        self.running: dict[str, Any] | None = None  # the inputs of the training step that is under way
        self.done: list[dict[str, Any]] = []  # the inputs of this optimizer step's earlier training steps

    def step(self, trainer: Any, model: Any, train: Callable[[], Tensor]) -> Tensor:
        """Run ``train()``, a training step, until it fits into memory."""

        def replay_and_train() -> Tensor:
            self._replay(model, trainer._compute_loss)
            return train()

        self.running = None
        loss, failure = self._attempt(train)
        while failure is not None:
            # The rows of later optimizer steps are buffered by now. They would not fit either.
            self.budget.split([*self.done, *(trainer._buffered_inputs or ())], self.splitter, failure)
            loss, failure = self._attempt(replay_and_train)
        if self.running is not None:
            self.done.append(self.running)
        if self.accelerator.sync_gradients:
            self.done.clear()
        self.running = None
        return loss

    def _attempt(self, train: Callable[[], Tensor]) -> tuple[Any, str | None]:
        """The loss, or why memory ran out: as text, because the error's traceback keeps the activations alive."""
        try:
            return train(), None
        except torch.OutOfMemoryError as error:
            if self.running is None:  # in generation, which has no micro-batches
                raise
            return None, str(error)

    def _replay(self, model: Any, loss_of: Callable[[Any, dict[str, Any]], Tensor]) -> None:
        """Compute the gradient of this optimizer step's earlier training steps again, from zero."""
        model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        # `loss_of` sets `running` to the step that is replayed. Memory can run out there too, and the step under way
        # must still be the one that is trained next.
        running = self.running
        try:
            for step in self.done:
                self.accelerator.backward(loss_of(model, step))
        finally:
            self.running = running
