"""TRL's micro-batches of an optimizer step -> the parts that are computed together, and what the loss of each weighs.

A part is a forward and a backward pass. Rows with one prompt come together, filled up to the token budget and shared
out among ranks (`arrange.py`); the weights (`losses.weight_of_part`) keep the step's gradient what it was.

Does not move a row to another optimizer step, and knows no loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_math.trainer.arrange import arrange, over_steps
from grpo_math.trainer.losses import weight_of_part
from grpo_math.trainer.rows import Rows, filled, join, lay_out, of_all_ranks, scored, shortest

Part = tuple[Rows, Any]  # rows that are computed together, and the factor of their loss


@dataclass(frozen=True)
class Cutter:
    """How the rows of an update may be cut.

    ``whole``: not at all, since a term of the loss is a mean or a quantile over TRL's very micro-batch.
    ``only_signal``: completions whose advantage is zero leave, since no other term of the loss moves a weight.
    ``deepspeed``: each training step needs a part, since offloaded gradients need the first backward pass, too.
    """

    accelerator: Any
    loss_type: str
    whole: bool
    only_signal: bool
    deepspeed: bool

    def parts(self, micro_batches: list[Rows], budget: int) -> list[list[Part]]:
        """TRL's micro-batches of one optimizer step -> the parts to compute in each of its training steps.

        Every rank gets the same number of parts, since each is a forward and a backward pass that the others wait for.
        The last step has one in any case: the optimizer has to see gradients, if only of 0.
        """
        if self.whole:
            return [[(rows, 1.0)] for rows in micro_batches]
        n_rows, ranks = len(micro_batches[0]["advantages"]), self.accelerator.num_processes
        if self.loss_type == "bnpo":  # divides by the tokens of TRL's micro-batch, which stays together
            sources = micro_batches
            of_steps = [[(rows, index) for index in self._plan(rows, n_rows, budget)[0]] for rows in sources]
        else:
            rows = of_all_ranks(join(micro_batches), self.accelerator)
            sources = [rows] * len(micro_batches)
            plan = self._plan(rows, n_rows, budget, ranks)
            own = [(rows, index) for index in plan[self.accelerator.process_index]]
            own += [(rows, [])] * (max(map(len, plan)) - len(own))
            of_steps = over_steps(own, len(micro_batches))
        sizes = gather_object([[[len(index) for _, index in parts] for parts in of_steps]])
        steps: list[list[Part]] = []
        for step, (rows, parts) in enumerate(zip(sources, of_steps, strict=True)):
            largest = [max(of_ranks) for of_ranks in zip_longest(*(rank[step] for rank in sizes), fillvalue=0)]
            own = parts + [(rows, [])] * (len(largest) - len(parts))
            steps.append([self._part(*part, n, n_rows) for part, n in zip(own, largest, strict=True)])
        if not any(steps):
            steps[-1] = [(shortest(micro_batches[-1]), 0.0)]
        if self.deepspeed:
            steps = [parts or [(shortest(micro_batches[0]), 0.0)] for parts in steps]
        return steps

    def smaller(self, part: Part, budget: int) -> list[Part]:
        """A part -> parts of at most ``budget`` tokens, which weigh as much together."""
        rows, weight = part
        plan = arrange(*lay_out(rows), budget)[0]
        if len(plan) < 2:
            return [part]
        own = [self._part(rows, index, len(index), len(rows["advantages"])) for index in plan]
        return [(smaller, weight * share) for smaller, share in own]

    def _plan(self, rows: Rows, n_rows: int, budget: int, ranks: int = 1) -> list[list[list[int]]]:
        """The micro-batches of each rank, as numbers of ``rows``; ``n_rows`` is how many TRL's micro-batch has."""
        budget = budget or n_rows * (rows["prompt_ids"].size(1) + rows["completion_ids"].size(1))
        prompts, prompt_tokens, tokens = lay_out(rows)
        if self.only_signal:
            signal = rows["advantages"].reshape(len(tokens), -1).ne(0).any(dim=1).tolist()
            tokens = [n if has else 0 for n, has in zip(tokens, signal, strict=True)]
        return arrange(prompts, prompt_tokens, tokens, budget, ranks)

    def _part(self, rows: Rows, index: list[int], size: int, n_rows: int) -> Part:
        """Some rows, and what their loss weighs in the loss of the micro-batches of ``n_rows`` that they came from.

        Filled up to ``size``: TRL gathers a number of each row, as many from every rank.
        """
        part = filled(rows, index, size)
        return part, weight_of_part(self.loss_type, scored(part), n_rows, scored(rows).sum())

    def added_up(self, parts: list[Part], loss_of: Callable[[Rows], Tensor], model: Any) -> Tensor:
        """The loss of a training step. The backward pass of its last part is left to the caller, and synchronises."""
        state, done = self.accelerator.gradient_state, torch.zeros((), device=self.accelerator.device)
        if not parts:
            return done.requires_grad_()
        # As in transformers' own training step: the loss is already divided by the accumulation steps.
        options = {"scale_wrt_gas": False} if self.deepspeed else {}
        synchronises = state.sync_gradients
        for rows, weight in parts[:-1]:
            with self.accelerator.no_sync(model):
                loss = loss_of(rows) * weight
                state._set_sync_gradients(False)
                try:
                    self.accelerator.backward(loss, **options)
                finally:
                    state._set_sync_gradients(synchronises)
            done += loss.detach()
        if self.accelerator.is_fsdp2:  # whose no_sync ends in synchronising, within an outer one that does not, too
            model.set_requires_gradient_sync(synchronises)
        rows, weight = parts[-1]
        return loss_of(rows) * weight + done
