"""Split an optimizer step into micro-batches that fit the token budget, with the weight of each one's loss.

A micro-batch is one forward and one backward pass. Each training step of an optimizer step computes some of them; TRL
computes one. Rows of one prompt stay together, and ranks get near-equal shares (`row_plan.py`). The weights
(`losses.micro_batch_weight`) keep the gradient of the optimizer step. The budget is halved when memory runs out, and
the step is computed again.

A row stays in its optimizer step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor

from grpo_math.algorithm.loss_inputs import Normalizers
from grpo_math.algorithm.loss_metrics import LossMetrics
from grpo_math.algorithm.losses import LossSettings, micro_batch_weight
from grpo_math.algorithm.rows import (
    Rows,
    gather_needed_rows,
    join,
    largest_widths,
    loss_mask,
    masked_row,
    select,
    widths,
)
from grpo_math.errors import OutOfMemory
from grpo_math.packing.pack import Layout, PaddedRows, layout
from grpo_math.packing.row_plan import distribute, packed_tokens, plan_micro_batches
from grpo_math.run.stateful import Stateful
from grpo_math.system.collectives import Ranks

logger = get_logger(__name__)


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together, and the ``weight`` of their loss.

    ``rows`` are TRL's dict, because the settings decide which tensors a rollout has, and scripts may add some: all of
    them move, split and are saved alike. `loss_inputs` reads them. The first ``completions`` rows count.
    """

    rows: Rows
    weight: float
    completions: int

    @classmethod
    def empty(cls, rows: Rows) -> "MicroBatch":
        """Return a masked row, which takes part in the collectives of a micro-batch at the least cost."""
        return cls(masked_row(rows), 0.0, 0)


@dataclass
class TrainingStep:
    """This rank's micro-batches of a training step, and the number of its rows and tokens that are not computed."""

    micro_batches: list[MicroBatch]
    skipped_rows: int = 0
    skipped_tokens: Tensor | int = 0

    @classmethod
    def of(cls, rows: Rows) -> "TrainingStep":
        """Return a training step that computes TRL's micro-batch as it is."""
        return cls([MicroBatch(rows, 1.0, len(rows["advantages"]))])


@dataclass(frozen=True)
class UpdatePlanner:
    """Plans the micro-batches of an optimizer step.

    ``keep_trl_batches``: use TRL's micro-batches, because a term of the loss is a mean or a quantile over a
    micro-batch. ``skip_zero_advantage``: skip completions whose advantage is zero, because no other term of the loss
    needs them. ``deepspeed``: each training step needs a micro-batch, because offloaded gradients need the first
    backward pass too.
    """

    ranks: Ranks
    loss_type: str
    keep_trl_batches: bool
    skip_zero_advantage: bool
    deepspeed: bool

    def gather_planned(self, trl_batches: list[Rows], budget: int) -> list[TrainingStep]:
        """Return the planned training steps of a part of an optimizer step, one for each of ``trl_batches``.

        All ranks call this.
        """
        # bnpo divides by the tokens of TRL's micro-batch: store that count before rows are regrouped.
        trl_batches = [
            {**rows, "micro_batch_tokens": loss_mask(rows).sum().expand(len(rows["advantages"]))}
            for rows in trl_batches
        ]
        kept = [TrainingStep.of(rows) for rows in trl_batches]
        if self.keep_trl_batches:
            return kept
        layouts = [row_layout(rows) for rows in trl_batches]
        if self.skip_zero_advantage:
            # TRL also takes an advantage for each token from a subclass, (B, T). One transfer for all training steps.
            signals = [rows["advantages"].reshape(len(rows["advantages"]), -1).ne(0).any(dim=1) for rows in trl_batches]
            for (_, _, lengths, _), has_signal in zip(layouts, torch.stack(signals).tolist(), strict=True):
                # The length of a completion that is skipped is 0.
                lengths[:] = [n if has else 0 for n, has in zip(lengths, has_signal, strict=True)]
        micro_batches = self._gather_and_split(trl_batches, layouts, budget)
        if micro_batches is None:
            return kept
        steps = []
        for number, (rows, (_, _, lengths, _)) in enumerate(zip(trl_batches, layouts, strict=True)):
            # The last training step always has a micro-batch, also if no completion has a signal: its backward pass
            # synchronises ranks, and the optimizer needs gradients, even if all are 0.
            if not micro_batches[number] and (self.deepspeed or number == len(trl_batches) - 1):
                micro_batches[number] = [MicroBatch.empty(rows)]
            tokens = loss_mask(rows).sum(dim=1)
            # Multiply by a mask: boolean indexing synchronises with the GPU.
            is_skipped = torch.tensor([not length for length in lengths]).to(tokens.device, non_blocking=True)
            steps.append(TrainingStep(micro_batches[number], lengths.count(0), (tokens * is_skipped).sum()))
        return steps

    def smaller(self, micro_batch: MicroBatch, budget: int) -> list[MicroBatch]:
        """Split a micro-batch into smaller ones of at most ``budget`` tokens, with the same weight in total."""
        rows = micro_batch.rows
        plan = plan_micro_batches(*row_layout(rows)[:3], budget)[0]
        if len(plan) < 2:
            return [micro_batch]
        smaller = [self._micro_batch(rows, index, len(rows["advantages"])) for index in plan]
        return [MicroBatch(one.rows, micro_batch.weight * one.weight, one.completions) for one in smaller]

    def _gather_and_split(
        self, trl_batches: list[Rows], layouts: list[Layout], budget: int
    ) -> list[list[MicroBatch]] | None:
        """Return the micro-batches of each training step, of rows of all ranks; equally many on all ranks.

        None if a mask of any rank has a hole: such rows are not packed.
        """
        local, n_rows = join(trl_batches), len(trl_batches[0]["advantages"])
        # Sizes first: a group may be computed on another rank, and only its rows move there.
        ranks = gather_object([(layouts, widths(local))])
        *columns, has_holes = zip(*chain(*(rank_layouts for rank_layouts, _ in ranks)), strict=True)
        if any(has_holes):
            return None
        prompts, prompt_tokens, lengths = (list(chain(*column)) for column in columns)
        wide = largest_widths([rank_widths for _, rank_widths in ranks])
        # The default is the tokens of TRL's padded micro-batch.
        budget = budget or n_rows * (wide["prompt_ids"] + wide["completion_ids"])
        plans = plan_micro_batches(prompts, prompt_tokens, lengths, budget, len(ranks))
        needed = [list(chain(*plan)) for plan in plans]
        rows, positions = gather_needed_rows(local, needed, wide, self.ranks)
        plan = [[positions[row] for row in index] for index in plans[self.ranks.process_index]]
        # Equally long on all ranks, so that micro-batches of the same number fall into the same training step.
        plan += [[]] * (max(map(len, plans)) - len(plan))
        # A rank without rows computes its first row, masked.
        source = rows if positions else local
        return distribute([self._micro_batch(source, index, n_rows) for index in plan], len(trl_batches))

    def _micro_batch(self, rows: Rows, index: Sequence[int], n_rows: int) -> MicroBatch:
        """Return the selected rows with their weight in TRL's micro-batch, which has ``n_rows``."""
        if not index:
            return MicroBatch.empty(rows)  # another rank has rows in this micro-batch
        weight = micro_batch_weight(self.loss_type, len(index), n_rows)
        return MicroBatch(select(rows, index), weight, completions=len(index))


def accumulate(
    micro_batches: list[MicroBatch],
    loss_of: Callable[[MicroBatch], Tensor],
    model: Any,
    accelerator: Any,
    deepspeed: bool,
) -> Tensor:
    """Return the loss of a training step, for the backward pass of its last micro-batch, which the caller does.

    ``loss_of`` returns the weighted loss of a micro-batch. Earlier micro-batches have their backward pass here, without
    synchronising ranks: as transformers expects, a training step synchronises once, at its end.
    """
    state, done = accelerator.gradient_state, torch.zeros((), device=accelerator.device)
    if not micro_batches:
        # transformers calls ``backward`` on the loss of every training step.
        return done.requires_grad_()
    # As in transformers' own training step: the loss is already divided by the accumulation steps.
    options = {"scale_wrt_gas": False} if deepspeed else {}
    synchronises = state.sync_gradients
    for micro_batch in micro_batches[:-1]:
        with accelerator.no_sync(model):
            loss = loss_of(micro_batch)
            # accelerate would take the optimizer step of DeepSpeed in a backward pass that synchronises.
            state._set_sync_gradients(False)
            try:
                accelerator.backward(loss, **options)
            finally:
                state._set_sync_gradients(synchronises)
        done += loss.detach()
    # FSDP2's no_sync turns synchronisation on at its end, even inside an outer no_sync.
    if accelerator.is_fsdp2 and len(micro_batches) > 1:
        model.set_requires_gradient_sync(synchronises)
    return loss_of(micro_batches[-1]) + done


def row_layout(rows: Rows) -> Layout:
    return layout(
        PaddedRows(
            torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),
            torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
            rows["completion_ids"].size(1),
            rows.get("group"),
        )
    )


@dataclass
class TokenBudget(Stateful):
    """The most tokens of a micro-batch. It is halved when memory runs out.

    ``setting``: the recipe's budget, 0 for as many tokens as TRL's padded micro-batch has. ``is_single_process``: no
    other process waits for this one. `Updates` changes it; `PackedScorer` only reads it.
    """

    SAVED = ("halved_to",)

    setting: int
    is_single_process: bool
    halved_to: int | None = None

    @property
    def tokens(self) -> int:
        return self.setting if self.halved_to is None else self.halved_to

    def halve(self, splittable_tokens: int, max_tokens: int, reason: str, splits: bool = True) -> int:
        """Halve the budget and return it.

        ``splittable_tokens``: the most tokens of a micro-batch with several completions, 0 if none has.
        ``max_tokens``: the most tokens of any micro-batch. ``splits``: an update can be split at all. Raises
        `OutOfMemory` with a remedy if no micro-batch can be split.

        >>> TokenBudget(0, is_single_process=True).halve(0, 70, "out of memory")
        Traceback (most recent call last):
        ...
        grpo_math.errors.OutOfMemory: out of memory in an update of one completion, 70 tokens with its prompt: ...
        """
        tokens, reason = f"{max_tokens} tokens", reason.splitlines()[0]
        if not splits:
            remedy = "lower per_device_train_batch_size, or turn gradient_checkpointing on"
        elif not self.is_single_process:
            # The other processes would not compute the step again. They would wait in a collective.
            remedy = f"set max_tokens_per_micro_batch to {max_tokens // 2}, or turn gradient_checkpointing on"
        elif not splittable_tokens:
            tokens = f"one completion, {tokens} with its prompt"
            remedy = "turn gradient_checkpointing on, or lower max_completion_length"
        else:
            self.halved_to = splittable_tokens // 2
            logger.warning(
                f"Out of memory in an update of {splittable_tokens} tokens: max_tokens_per_micro_batch is now "
                f"{self.tokens}."
            )
            torch.cuda.empty_cache()
            return self.tokens
        raise OutOfMemory(f"out of memory in an update of {tokens}: {remedy} ({reason})")


@dataclass
class OptimizerStep:
    """An optimizer step, or a batch of an evaluation: the settings of its loss, its training steps, and its metrics.

    ``plans``: rows are planned into training steps. Without, TRL's rows are computed as they are. A training step is
    in ``planned`` first, then in ``current``, and in ``done`` when it is computed. The gradients of the training steps
    add up. So if memory runs out in one of them, all are computed again.
    """

    settings: LossSettings
    normalizers: Normalizers
    planner: UpdatePlanner
    plans: bool
    planned: list[TrainingStep] = field(default_factory=list)
    current: TrainingStep | None = None
    done: list[TrainingStep] = field(default_factory=list)
    metrics: LossMetrics = field(default_factory=LossMetrics)

    def split(self, budget: TokenBudget, reason: str) -> None:
        """Split the micro-batches of all training steps at half of the largest that can be split.

        The later ones would not fit either.
        """
        steps = [*self.done, *filter(None, [self.current]), *self.planned]
        sizes = [
            (packed_tokens(*row_layout(one.rows)[:3]), len(one.rows["advantages"]))
            for step in steps
            for one in step.micro_batches
        ]
        splittable_tokens = max((tokens for tokens, completions in sizes if completions > 1), default=0)
        tokens = budget.halve(splittable_tokens, max(sizes)[0], reason, splits=not self.planner.keep_trl_batches)
        for step in steps:
            step.micro_batches = list(chain(*(self.planner.smaller(one, tokens) for one in step.micro_batches)))
