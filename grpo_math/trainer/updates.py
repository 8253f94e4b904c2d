"""Updates: from TRL's rows of a rollout to the gradient of an optimizer step, and its result.

TRL keeps the rows of a rollout, one dict for each training step. When an optimizer step begins, its rows are planned
into micro-batches, and its settings are read. Each training step computes some of the micro-batches. If memory runs
out, the training steps of the optimizer step are computed again with smaller ones.
"""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from grpo_math.algorithm.loss_inputs import Normalizers, loss_inputs
from grpo_math.algorithm.loss_metrics import LossMetrics, StepResult
from grpo_math.algorithm.losses import Loss, compute_loss
from grpo_math.algorithm.rows import Rows, loss_mask
from grpo_math.packing.altered import LIBRARIES
from grpo_math.packing.micro_batches import MicroBatch, OptimizerStep, TrainingStep, UpdatePlanner, accumulate
from grpo_math.run import metrics
from grpo_math.run.speed_ups import switched_off
from grpo_math.system.collectives import Ranks
from grpo_math.system.user_functions import is_foreign, is_user_function
from grpo_math.trainer import gradients, largest_batch
from grpo_math.trainer.loss_settings import (
    exceeds_trl_loss,
    loss_settings,
    micro_batch_terms,
    refuse_added_terms,
    update_entropy_coef,
)
from grpo_math.trainer.meter import StepMeter
from grpo_math.trainer.row_scorer import RowScorer

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer

logger = get_logger(__name__)
# Methods that get an update's rows.
ROW_METHODS = (
    *("training_step", "_prepare_inputs", "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"),
    *("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"),
)


class Updates:
    """The updates of a trainer. Reads its attributes once in an optimizer step.

    ``step`` is the optimizer step under way, ``result`` that of the last one.
    """

    def __init__(
        self, trainer: "TrlTrainer", settings: "MathGRPOConfig", ranks: Ranks, meter: StepMeter, scorer: RowScorer
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.ranks = ranks
        self.meter = meter
        self.scorer = scorer
        self.budget = scorer.budget
        accelerator = trainer.accelerator
        if trainer.args.ddp_find_unused_parameters is None and accelerator.ddp_handler is not None:
            unused = gradients.has_unused_parameters(trainer.model, trainer.args, ranks.num_processes)
            accelerator.ddp_handler.find_unused_parameters = unused
        if scorer.has_images:
            refuse_added_terms(trainer, settings, "images, of which TRL computes the loss")
            logger.warning("TRL computes the loss, because the model has images.")
        self.dry_run_due = largest_batch.dry_run_enabled(settings, accelerator)
        self.reset()

    def reset(self) -> None:
        """Forget an optimizer step that was interrupted."""
        self.step: OptimizerStep | None = None
        self.result = StepResult({})
        # The training steps that are planned together, and the current one. Empty and None with TRL's rows.
        self.planned: list[TrainingStep] = []
        self.current: TrainingStep | None = None
        self.is_first = True

    @property
    def _keeps_trl_rows(self) -> bool:
        """True if an update is not planned: it has images, or a script's method gets its rows."""
        # Not in the constructor, because a script may replace a method later.
        return self.scorer.has_images or sees_rows(self.trainer)

    @property
    def _keeps_trl_batches(self) -> bool:
        if sees_passes(self.trainer) or self._keeps_trl_rows:
            return True
        return self.scorer.packed is None or bool(micro_batch_terms(self.trainer))

    # An optimizer step: methods in the order in which TRL calls them

    def training_step(self, trl_training_step: Callable[..., Tensor], model: Any, inputs: Any, *others: Any) -> Tensor:
        """Call TRL's `training_step`. If memory runs out in the update, repeat the optimizer step in smaller parts.

        All ranks call this.
        """
        trainer = self.trainer
        # Not before `train`, because a script may unfreeze parameters, in a callback, too.
        if self.is_first:
            self.is_first = False
            gradients.refuse_frozen(trainer, self.settings)
        if self.step is None:
            self.scorer.agree_to_pack()
        splits = not self._keeps_trl_batches
        # Not in the constructor, because `train` prepares the model.
        if self.dry_run_due:
            self.dry_run_due = False
            largest_batch.dry_run(trainer, lambda *rows: self.loss_of(*rows).loss, self.budget, model, inputs, splits)
            self.step = None
        failure: str | None = None
        started = time.perf_counter()
        while True:
            try:
                if failure is not None:
                    self._repeat(model)
                    # TRL measures the last attempt alone.
                    trainer._current_train_step_time += time.perf_counter() - started
                    started = time.perf_counter()
                # TRL's method calls `_prepare_inputs` and `_compute_loss`.
                loss = trl_training_step(model, inputs, *others)
                break
            except torch.OutOfMemoryError as error:
                # Memory ran out while sampling, or in TRL's loss: there is nothing to split.
                if self.current is None:
                    raise
                # As text, because the error's traceback keeps the activations alive.
                failure = str(error)
            # The later training steps would not fit either.
            self.budget.split([*self._current_step().done, *self.planned], self.planner, failure, splits)
            inputs = self.current
        if self.current is not None:
            self._current_step().done.append(self.current)
        # The optimizer's step follows: the next training step is the first of another optimizer step.
        if trainer.accelerator.sync_gradients:
            done = self.step
            self.step = None
            # TRL's loss, or a script's, logs its own metrics.
            self.result = self._reduce_result(done) if done and done.metrics.declared else StepResult({})
        return loss

    def gather_inputs(self, trl_prepare_inputs: Callable[[Any], Any], batch: Any) -> Any:
        """Return TRL's rows of a training step, or our training step. ``trl_prepare_inputs``: TRL's `_prepare_inputs`.

        All ranks call this.
        """
        # Memory ran out: the same training step comes again, in smaller micro-batches.
        if isinstance(batch, TrainingStep):
            return batch
        trainer, args = self.trainer, self.trainer.args
        if not trainer.model.training:
            return trl_prepare_inputs(batch)
        # Before TRL's method, which counts the training step.
        together = planned_together(trainer._step, args.steps_per_generation, args.gradient_accumulation_steps)
        number = together.index(trainer._step % args.steps_per_generation)
        # TRL's method may sample: memory that runs out there is not that of an update.
        self.current = None
        rollout = trainer._buffered_inputs
        inputs = trl_prepare_inputs(batch)
        # A reward function may have changed the model.
        if trainer._buffered_inputs is not rollout:
            self.scorer.agree_to_pack()
        if number == 0:
            rows = [] if self._keeps_trl_rows else [trainer._buffered_inputs[step] for step in together]
            self.planned = self._gather_planned(rows) if rows else []
        self.current = self.planned[number] if self.planned else None
        return self.current or inputs

    def _gather_planned(self, trl_batches: list[Rows]) -> list[TrainingStep]:
        """Return the planned training steps. ``trl_batches``: TRL's rows of each. All ranks call this."""
        trainer = self.trainer
        width = trl_batches[0]["prompt_ids"].size(1) + trl_batches[0]["completion_ids"].size(1)
        packs = self.scorer.packed is not None and self.scorer.packed.agree_on_width(width)
        self.planner = UpdatePlanner(
            self.ranks,
            loss_settings(trainer, self.settings).loss_type,
            keep_trl_batches=self._keeps_trl_batches or not packs,
            skip_zero_advantage=trainer.beta == 0.0 and not is_user_function(self.settings.surrogate),
            deepspeed=trainer.is_deepspeed_enabled,
        )
        return self.planner.gather_planned(trl_batches, self.budget.tokens)

    def compute_loss(self, trl_compute_loss: Callable[[Any, Any], Tensor], model: Any, inputs: Any) -> Tensor:
        """Return the loss of a training step, for the last backward pass. ``trl_compute_loss``: TRL's `_compute_loss`.

        All ranks call this.
        """
        if not isinstance(inputs, TrainingStep):
            # Images, or a method of a script: TRL's loss, unless it lacks a term.
            if is_foreign(trl_compute_loss):
                refuse_added_terms(self.trainer, self.settings, "a patch of GRPOTrainer._compute_loss")
            if self._keeps_trl_rows and not exceeds_trl_loss(self.trainer, self.settings):
                return trl_compute_loss(model, inputs)
            # An evaluation, or an update whose rows a method of a script gets.
            rows = {name: value for name, value in inputs.items() if name != "group"}
            inputs = TrainingStep([MicroBatch(rows, 1.0, len(rows["advantages"]))])
        step = self._current_step()
        step.metrics.skipped += inputs.skipped_rows
        step.metrics.skipped_tokens += inputs.skipped_tokens

        def weighted_loss(micro_batch: MicroBatch) -> Tensor:
            loss = self.loss_of(model, micro_batch.rows)
            step.metrics.add(loss, loss_mask(micro_batch.rows), micro_batch.completions, micro_batch.weight)
            return loss.loss * micro_batch.weight

        accelerator, deepspeed = self.trainer.accelerator, self.trainer.is_deepspeed_enabled
        loss = accumulate(inputs.micro_batches, weighted_loss, model, accelerator, deepspeed)
        if not self.trainer.model.training:
            self._reduce_result(step)
        return loss

    def _current_step(self) -> OptimizerStep:
        """Return the optimizer step under way, or begin one. An evaluation has one for each batch."""
        trainer = self.trainer
        # An evaluation may come between the training steps of an optimizer step.
        if self.step is not None and trainer.model.training:
            return self.step
        ranks, settings = self.ranks.num_processes, loss_settings(trainer, self.settings)
        if not trainer.model.training:
            return OptimizerStep(settings, Normalizers(1 / ranks))
        accumulation = trainer.current_gradient_accumulation_steps
        self.step = OptimizerStep(
            settings, Normalizers.for_optimizer_step(ranks, accumulation, trainer.args.steps_per_generation)
        )
        return self.step

    def loss_of(self, model: Any, rows: Rows) -> Loss:
        """Score rows, and return their loss in the optimizer step under way."""
        trainer, step = self.trainer, self._current_step()
        # Pass `group` only if the rows have it: a subclass may have TRL's signature.
        group = {"group": rows["group"]} if "group" in rows else {}
        logps, entropies, aux_loss = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),
            torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
            rows["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=trainer.aux_loss_enabled,
            **group,
        )
        quantile, entropy_mask = trainer.top_entropy_quantile, None
        if quantile < 1.0:
            entropy_mask = trainer.get_high_entropy_mask(entropies, loss_mask(rows), 1 - quantile)
        inputs = loss_inputs(rows, logps, entropies, step.normalizers, step.settings, entropy_mask, aux_loss)
        return compute_loss(inputs, step.settings)

    def _repeat(self, model: Any) -> None:
        """Compute the earlier training steps of this optimizer step again.

        Some parameters may have the gradient of the failed training step already, so all gradients are dropped.
        """
        model.zero_grad(set_to_none=True)
        step = self._current_step()
        step.metrics = LossMetrics()
        for done in step.done:
            self.trainer.accelerator.backward(self.trainer._compute_loss(model, done))

    def _reduce_result(self, step: OptimizerStep) -> StepResult:
        """Log the metrics of a step's loss, and update the coefficient of the entropy bonus. All ranks call this."""
        trainer, sums = self.trainer, step.metrics
        # Without the completions that PODS masks: nothing of them counts.
        sums.skipped = (sums.completions + sums.skipped) * step.settings.trained_share - sums.completions
        result = sums.reduce(self.ranks, step.normalizers.accumulation)
        self.meter.add(result.metrics)
        self.meter.undefined |= step.metrics.declared.keys() - result.metrics.keys()
        if step.settings.entropy_coef is not None:
            self.meter.add({metrics.POLICY_LOSS: result.policy_loss})
            if trainer.model.training:
                update_entropy_coef(trainer, result.entropy)
                self.meter.add({metrics.ENTROPY_COEF: trainer.entropy_coef})
        return result


def planned_together(step: int, rollout: int, accumulation: int) -> range:
    """Return the training steps that are planned together with number ``step`` of the run, by their numbers in its
    rollout: rows change places within these only.

    A rollout has ``rollout`` training steps, and an optimizer step has ``accumulation``. Both may end within the other,
    but not within the training steps that are planned together.

    >>> [planned_together(step, rollout=6, accumulation=4) for step in (0, 1, 2, 9)]
    [range(0, 2), range(0, 2), range(2, 4), range(2, 4)]
    """
    size = math.gcd(rollout, accumulation)
    first = step % rollout // size * size
    return range(first, first + size)


def sees_rows(trainer: "TrlTrainer") -> bool:
    """Return True if a method of a subclass or a script gets the rows of an update.

    Such a method may read or write rows, or compute a mean over them. So it gets TRL's micro-batches unchanged. A
    script may also replace a method of TRL's class.
    """
    others = [
        name
        for name in ROW_METHODS
        if any(is_foreign(getattr(one, name)) for one in (trainer, *type(trainer).__mro__) if name in vars(one))
    ]
    if others and trainer.grpo_math.settings.pack_updates:
        switched_off("shared updates", f"{type(trainer).__name__} overrides {', '.join(others)}")
    return bool(others)


def sees_passes(trainer: "TrlTrainer") -> bool:
    """Return True if a script has replaced ``accelerator.backward``: it may change the gradient of each pass."""
    replaced = is_foreign(trainer.accelerator.backward, LIBRARIES)
    if replaced and trainer.grpo_math.settings.pack_updates:
        switched_off("shared updates", "a script has replaced accelerator.backward")
    return replaced
