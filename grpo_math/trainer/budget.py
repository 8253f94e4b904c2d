"""The most tokens in one forward and backward pass: halved when memory runs out, and the step is done once more.

Does not cut rows (`parts.py` does).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from grpo_math.errors import OutOfMemory
from grpo_math.trainer.arrange import packed_tokens
from grpo_math.trainer.parts import Cutter
from grpo_math.trainer.rows import lay_out

logger = get_logger(__name__)


class TokenBudget:
    """``tokens``: the budget, 0 for as many as TRL's padded micro-batch has.

    ``cuts``: whether an update can be cut at all; ``alone``: whether this process can do so without others that wait.
    """

    def __init__(self, tokens: int, cuts: bool, alone: bool) -> None:
        self.tokens, self.cuts, self.alone = tokens, cuts, alone
        self.halved_to: int | None = None

    def halve(self, several: int, largest: int, reason: str) -> int:
        """The new budget, half of ``several``: the most tokens of a pass that can be cut (0: none can).

        >>> TokenBudget(0, cuts=True, alone=True).halve(0, 70, "out of memory")
        Traceback (most recent call last):
        ...
        grpo_math.errors.OutOfMemory: out of memory in an update of one completion, 70 tokens with its prompt: ...
        """
        reason = reason.splitlines()[0]
        if not self.cuts:
            place, remedy = "", "lower per_device_train_batch_size, or turn gradient_checkpointing on"
        elif not self.alone:
            place, remedy = "", f"set update_token_budget to {largest // 2}, or turn gradient_checkpointing on"
        elif not several:
            place = "one completion, "
            remedy = "turn gradient_checkpointing on, or lower max_completion_length or max_seq_length_train"
        else:
            self.tokens = self.halved_to = several // 2
            logger.warning(f"Out of memory in an update of {several} tokens: update_token_budget is now {self.tokens}.")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return self.tokens
        tokens = f"{place}{largest} tokens{' with its prompt' if place else ''}"
        raise OutOfMemory(f"out of memory in an update of {tokens}: {remedy} ({reason})")

    def cut(self, steps: Iterable[dict[str, Any]], cutter: Cutter, reason: str) -> None:
        """Cut the parts of these training steps to half of the largest that can be cut."""
        own = list({id(step): step for step in steps}.values())
        tokens = [(packed_tokens(*lay_out(rows)), len(rows["advantages"])) for step in own for rows, _ in step["parts"]]
        budget = self.halve(max((n for n, rows in tokens if rows > 1), default=0), max(tokens)[0], reason)
        for step in own:
            step["parts"] = [small for part in step["parts"] for small in cutter.smaller(part, budget)]


class Redo:
    """An optimizer step is done once more, in smaller parts, where memory runs out in one of its training steps."""

    def __init__(self, accelerator: Any, budget: TokenBudget, cutter: Cutter) -> None:
        self.accelerator, self.budget, self.cutter = accelerator, budget, cutter
        self.running: dict[str, Any] | None = None  # the parts of the training step that is under way
        self.done: list[dict[str, Any]] = []  # those of the optimizer step's training steps that are done

    def step(self, trainer: Any, model: Any, train: Callable[[], Tensor]) -> Tensor:
        """A training step: ``train()``, and again as often as it takes."""
        reason: str | None = None
        self.running = None
        while True:
            try:
                if reason is not None:
                    self._start_again(model, trainer._compute_loss)
                loss = train()
                break
            except torch.OutOfMemoryError as error:
                if self.running is None:  # in generation
                    raise
                reason = str(error)
            # outside of the handler, whose traceback holds the activations; with the steps of later updates
            self.budget.cut([*self.done, *(trainer._buffered_inputs or ())], self.cutter, reason)
        if self.running is not None:
            self.done.append(self.running)
        if self.accelerator.sync_gradients:
            self.done.clear()
        self.running = None
        return loss

    def _start_again(self, model: Any, loss_of: Callable[[Any, dict[str, Any]], Tensor]) -> None:
        """The gradient of this optimizer step's training steps that were done, from zero."""
        model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        running = self.running
        for step in self.done:
            self.accelerator.backward(loss_of(model, step))
        self.running = running
