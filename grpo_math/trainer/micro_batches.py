"""Split an optimizer step into micro-batches that fit the token budget, with the weight of each one's loss.

A micro-batch is one forward and one backward pass. Each training step of an optimizer step computes some of them; TRL
computes one. Rows of one prompt stay together, and ranks get near-equal shares (`arrange.py`). The weights
(`losses.weight_of_micro_batch`) keep the gradient of the optimizer step.

Does not move a row to another optimizer step, and does not compute a loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypedDict

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_math.trainer.arrange import arrange, over_steps
from grpo_math.trainer.losses import weight_of_micro_batch
from grpo_math.trainer.rows import Rows, filled, join, lay_out, of_all_ranks, scored, shortest

Plan = list[list[int]]  # micro-batches as row numbers


class MicroBatch(TypedDict):
    """``rows`` that are computed together, and the ``weight`` of their loss. A plain dict, for `torch.load`."""

    rows: Rows
    weight: float | Tensor


@dataclass(frozen=True)
class Splitter:
    """Splits the rows of an update.

    ``whole``: keep TRL's micro-batches, because a term of the loss is a mean or a quantile over one of them.
    ``only_signal``: skip completions whose advantage is zero, because no other term of the loss needs them.
    ``deepspeed``: each training step needs a micro-batch, because offloaded gradients need the first backward pass too.
    """

    accelerator: Any
    loss_type: str
    whole: bool
    only_signal: bool
    deepspeed: bool

    def split(self, of_trl: list[Rows], budget: int) -> list[list[MicroBatch]]:
        """Return the micro-batches of each training step of one optimizer step. ``of_trl``: TRL's, one a step."""
        if self.whole:
            return [[MicroBatch(rows=rows, weight=1.0)] for rows in of_trl]
        n_rows = len(of_trl[0]["advantages"])
        if self.loss_type == "bnpo":
            # This loss divides by the tokens of TRL's micro-batch, so its rows stay in their training step.
            sources, plans = of_trl, [self._plan(rows, n_rows, budget)[0] for rows in of_trl]
        else:
            # Every rank gets the rows of all ranks, because a group may be computed on another rank.
            rows = of_all_ranks(join(of_trl), self.accelerator)
            of_ranks = self._plan(rows, n_rows, budget, self.accelerator.num_processes)
            plan = of_ranks[self.accelerator.process_index]
            # Equally long on all ranks, so that micro-batches of the same number fall into the same training step.
            plan += [[]] * (max(map(len, of_ranks)) - len(plan))
            sources, plans = [rows] * len(of_trl), over_steps(plan, len(of_trl))
        steps = [
            [self._micro_batch(rows, index, size, n_rows) for index, size in zip(plan, sizes, strict=True)]
            for rows, plan, sizes in zip(sources, *self._agreed(plans), strict=True)
        ]
        # The last training step always has a micro-batch: the optimizer needs gradients, even if all are 0.
        if not any(steps):
            steps[-1] = [MicroBatch(rows=shortest(of_trl[-1]), weight=0.0)]
        if self.deepspeed:
            steps = [step or [MicroBatch(rows=shortest(of_trl[0]), weight=0.0)] for step in steps]
        return steps

    def smaller(self, micro_batch: MicroBatch, budget: int) -> list[MicroBatch]:
        """Split a micro-batch into some of at most ``budget`` tokens, with the same weight in total."""
        rows = micro_batch["rows"]
        plan = arrange(*lay_out(rows), budget)[0]
        if len(plan) < 2:
            return [micro_batch]
        smaller = [self._micro_batch(rows, index, len(index), len(rows["advantages"])) for index in plan]
        return [MicroBatch(rows=of["rows"], weight=micro_batch["weight"] * of["weight"]) for of in smaller]

    def _plan(self, rows: Rows, n_rows: int, budget: int, ranks: int = 1) -> list[Plan]:
        """Return the plan of each rank. ``n_rows``: the number of rows of TRL's micro-batch."""
        budget = budget or n_rows * (rows["prompt_ids"].size(1) + rows["completion_ids"].size(1))
        prompts, prompt_tokens, tokens = lay_out(rows)
        if self.only_signal:
            # TRL also takes an advantage for each token from a subclass, (B, T).
            signal = rows["advantages"].reshape(len(tokens), -1).ne(0).any(dim=1).tolist()
            tokens = [n if has else 0 for n, has in zip(tokens, signal, strict=True)]
        return arrange(prompts, prompt_tokens, tokens, budget, ranks)

    def _agreed(self, plans: list[Plan]) -> tuple[list[Plan], list[list[int]]]:
        """Return the plans with empty micro-batches added, and the largest size of each micro-batch on any rank.

        Ranks wait for each other in every forward pass, and TRL gathers a number for each row. So all ranks need the
        same number of micro-batches in a training step, and the same number of rows in each.
        """
        of_ranks = gather_object([[[len(index) for index in plan] for plan in plans]])
        steps = zip(*of_ranks, strict=True)
        sizes = [[max(of_rank) for of_rank in zip_longest(*step, fillvalue=0)] for step in steps]
        return [plan + [[]] * (len(n) - len(plan)) for plan, n in zip(plans, sizes, strict=True)], sizes

    def _micro_batch(self, rows: Rows, index: Sequence[int], size: int, n_rows: int) -> MicroBatch:
        """Return the selected rows, filled up to ``size`` with masked rows, and their weight.

        The weight is that of the selected rows in the loss of TRL's micro-batches of ``n_rows``.
        """
        selected = filled(rows, index, size)
        weight = weight_of_micro_batch(self.loss_type, scored(selected), n_rows, scored(rows).sum())
        return MicroBatch(rows=selected, weight=weight)

    def accumulate(self, micro_batches: list[MicroBatch], loss_of: Callable[[Rows], Tensor], model: Any) -> Tensor:
        """Return the loss of a training step. The caller does the backward pass of the last micro-batch.

        Only that one synchronises ranks, as transformers expects of a training step.
        """
        state, done = self.accelerator.gradient_state, torch.zeros((), device=self.accelerator.device)
        if not micro_batches:
            # transformers calls ``backward`` on the loss of every training step.
            return done.requires_grad_()
        # As in transformers' own training step: the loss is already divided by the accumulation steps.
        options = {"scale_wrt_gas": False} if self.deepspeed else {}
        synchronises = state.sync_gradients
        for micro_batch in micro_batches[:-1]:
            with self.accelerator.no_sync(model):
                loss = loss_of(micro_batch["rows"]) * micro_batch["weight"]
                # accelerate would take the optimizer step of DeepSpeed in a backward pass that synchronises.
                state._set_sync_gradients(False)
                try:
                    self.accelerator.backward(loss, **options)
                finally:
                    state._set_sync_gradients(synchronises)
            done += loss.detach()
        # FSDP2's no_sync ends in synchronising, also within an outer one that does not.
        if self.accelerator.is_fsdp2:
            model.set_requires_gradient_sync(synchronises)
        last = micro_batches[-1]
        return loss_of(last["rows"]) * last["weight"] + done
