"""The maximum number of tokens per micro-batch. It is halved when memory runs out, and the step is computed again.

Does not split rows: `micro_batches.py` does.
"""

from collections.abc import Callable, Sequence
from itertools import chain
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
    """``setting``: the recipe's budget, 0 for as many tokens as TRL's padded micro-batch has.

    ``splits``: an update can be split at all. ``is_single_process``: no other process waits for this one.
    """

    def __init__(self, setting: int, splits: bool, is_single_process: bool) -> None:
        self.setting, self.splits, self.is_single_process = setting, splits, is_single_process
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

    def split(self, steps: Sequence[dict[str, Any]], splitter: Splitter, reason: str) -> None:
        """Split the micro-batches of these training steps at half of the largest that can be split.

        A step may be given twice: a micro-batch that fits is not split again.
        """
        all_rows = [micro_batch["rows"] for step in steps for micro_batch in step["micro_batches"]]
        sizes = [(packed_tokens(*lay_out(rows)), len(rows["advantages"])) for rows in all_rows]
        several = max((tokens for tokens, completions in sizes if completions > 1), default=0)
        budget = self.halve(several, max(sizes)[0], reason)
        for step in steps:
            smaller = [splitter.smaller(micro_batch, budget) for micro_batch in step["micro_batches"]]
            step["micro_batches"] = list(chain.from_iterable(smaller))


class OutOfMemoryRetry:
    """Computes an optimizer step again, in smaller micro-batches, if memory runs out in one of its training steps.

    An optimizer step consists of several training steps, whose gradients add up. Some parameters may have the gradient
    of the failed training step already. So all gradients are dropped, and the earlier training steps of the same
    optimizer step are computed again, too. ``undo()`` drops the metrics of the last loss, which are logged twice.
    """

    def __init__(self, accelerator: Any, budget: TokenBudget, splitter: Splitter, undo: Callable[[], None]) -> None:
        self.accelerator, self.budget, self.splitter, self.undo = accelerator, budget, splitter, undo
        # Inputs of the current training step, once they are sampled and split.
        self.inputs: dict[str, Any] | None = None
        # Inputs of this optimizer step's earlier training steps.
        self.earlier: list[dict[str, Any]] = []

    def run(
        self,
        training_step: Callable[[], Tensor],
        loss_of: Callable[[dict[str, Any]], Tensor],
        model: Any,
        buffered: Callable[[], Any],
    ) -> Tensor:
        """Run ``training_step`` until it fits into memory.

        It takes its rows from ``inputs`` if these are set. ``buffered()`` returns the inputs of the rollout's training
        steps, ``loss_of`` the loss of one of them.
        """

        def recompute_and_step() -> Tensor:
            # None, not zeros: `FlatGradientBuffer` allocates its buffer only if there are no gradients.
            model.zero_grad(set_to_none=True)
            for inputs in self.earlier:
                self.accelerator.backward(loss_of(inputs))
                # These steps have logged their metrics already.
                self.undo()
            return training_step()

        self.inputs = None
        loss, failure = self._attempt(training_step)
        while failure is not None:
            # The rows of later optimizer steps would not fit either.
            self.budget.split([*self.earlier, *(buffered() or ())], self.splitter, failure)
            loss, failure = self._attempt(recompute_and_step)
        if self.inputs is not None:
            self.earlier.append(self.inputs)
        # The optimizer's step follows: the next training step is the first of another optimizer step.
        if self.accelerator.sync_gradients:
            self.earlier.clear()
        self.inputs = None
        return loss

    def _attempt(self, step: Callable[[], Tensor]) -> tuple[Any, str | None]:
        """Return the loss, or the reason why memory ran out."""
        try:
            return step(), None
        except torch.OutOfMemoryError as error:
            if self.inputs is None:  # while sampling, which has no micro-batches to split
                raise
            self.undo()
            # As text, because the error's traceback keeps the activations alive.
            return None, str(error)
