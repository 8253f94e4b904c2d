"""Updates: from TRL's rows of a rollout to the gradient of an optimizer step, and its result.

TRL keeps the rows of a rollout, one dict for each training step. When an optimizer step begins, its settings are read,
and its rows are planned into micro-batches. Each training step computes some of the micro-batches. If memory runs out,
the training steps of the optimizer step are computed again with smaller ones.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
    """The updates of a trainer.

    TRL carries its own rows from `_prepare_inputs` to `_compute_loss`, in training and in evaluation. What is computed
    in their place is in ``step``: the optimizer step under way, or None between two. ``result``: of the last one.
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

    # An optimizer step, in the order in which things happen. TRL calls the methods with an argument ``trl_...``.

    def training_step(self, trl_training_step: Callable[..., Tensor], model: Any, inputs: Any, *others: Any) -> Tensor:
        """Call TRL's `training_step`, which calls `_prepare_inputs` and `_compute_loss`. All ranks call this."""
        if self.step is None:
            self._prepare_models(model, inputs)
        loss = self._compute_within_memory(partial(trl_training_step, model, inputs, *others), model)
        step = self._current_step()
        if step.current is not None:
            step.done.append(step.current)
            step.current = None
        # The optimizer's step follows: the next training step is the first of another optimizer step.
        if self.trainer.accelerator.sync_gradients:
            self.step = None
            # TRL's loss, or a script's, logs its own metrics.
            self.result = self._reduce_result(step) if step.metrics.declared else StepResult({})
        return loss

    def _prepare_models(self, model: Any, inputs: Any) -> None:
        """Check the models before an optimizer step, because a script may have changed them. All ranks call this.

        Before the first one, try the largest micro-batch.
        """
        gradients.refuse_frozen(self.trainer, self.settings)
        self.scorer.agree_to_pack()
        # Not in the constructor, because `train` prepares the model.
        if self.dry_run_due:
            self.dry_run_due = False
            largest_batch.dry_run(
                self.trainer,
                lambda model, rows: self.loss_of(model, rows, self.new_step()).loss,
                self.budget,
                model,
                inputs,
                splits=not self._keeps_trl_batches,
            )

    def _compute_within_memory(self, trl_training_step: Callable[[], Tensor], model: Any) -> Tensor:
        """Return the loss of a training step. If memory runs out, compute the optimizer step again in smaller parts."""
        failure: str | None = None
        started = time.perf_counter()
        while True:
            try:
                if failure is not None:
                    self._compute_done_again(model)
                    # TRL measures the last attempt alone.
                    self.trainer._current_train_step_time += time.perf_counter() - started
                    started = time.perf_counter()
                return trl_training_step()
            except torch.OutOfMemoryError as error:
                # Memory ran out while sampling, or in TRL's loss: there is nothing to split.
                if self.step is None or self.step.current is None:
                    raise
                # As text, because the error's traceback keeps the activations alive.
                failure = str(error)
            self.step.split(self.budget, failure)

    def gather_inputs(self, trl_prepare_inputs: Callable[[Any], Rows], batch: Any) -> Rows:
        """Return TRL's rows of a training step, and plan what is computed. ``trl_prepare_inputs``: TRL's method.

        All ranks call this.
        """
        trainer, args = self.trainer, self.trainer.args
        if not trainer.model.training:
            return trl_prepare_inputs(batch)
        position, rollout = trainer._step % args.steps_per_generation, trainer._buffered_inputs
        # Memory ran out, and the same training step comes again. TRL's method would sample again if it samples here.
        if self.step is not None and self.step.current is not None:
            return rollout[position]
        rows = trl_prepare_inputs(batch)
        # A reward function may have changed the model.
        if trainer._buffered_inputs is not rollout:
            self.scorer.agree_to_pack()
        step = self._current_step()
        if step.plans and not step.planned:
            # Rows stay in their optimizer step and in their rollout. Each of the two may end within the other.
            left = args.gradient_accumulation_steps - len(step.done) % args.gradient_accumulation_steps
            step.planned = self._gather_planned(trainer._buffered_inputs[position : position + left], step)
        step.current = step.planned.pop(0) if step.planned else None
        return rows

    def _current_step(self) -> OptimizerStep:
        """Return the optimizer step under way, or begin one. An evaluation has one for each batch."""
        # An evaluation may come between the training steps of an optimizer step.
        if not self.trainer.model.training:
            return self.new_step()
        if self.step is None:
            self.step = self.new_step()
        return self.step

    def new_step(self) -> OptimizerStep:
        """Return an optimizer step, or a batch of an evaluation, with the trainer's settings as they are now."""
        trainer, settings = self.trainer, loss_settings(self.trainer, self.settings)
        # A batch of an evaluation is a rollout of one training step.
        steps = (
            (trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation)
            if trainer.model.training
            else (1, 1)
        )
        planner = UpdatePlanner(
            self.ranks,
            settings.loss_type,
            keep_trl_batches=self._keeps_trl_batches,
            skip_zero_advantage=settings.beta == 0.0 and not is_user_function(self.settings.surrogate),
            deepspeed=trainer.is_deepspeed_enabled,
        )
        normalizers = Normalizers.for_optimizer_step(self.ranks.num_processes, *steps)
        return OptimizerStep(settings, normalizers, planner, plans=not self._keeps_trl_rows)

    # Not in the constructor, because a script may replace a method later.

    @property
    def _keeps_trl_rows(self) -> bool:
        """True if an update is not planned: it has images, or a script's method gets its rows."""
        return self.scorer.has_images or sees_rows(self.trainer)

    @property
    def _keeps_trl_batches(self) -> bool:
        """True if an update has TRL's micro-batches, which cannot be split."""
        return (
            self._keeps_trl_rows
            or sees_passes(self.trainer)
            or self.scorer.packed is None
            or bool(micro_batch_terms(self.trainer))
        )

    def _gather_planned(self, trl_batches: list[Rows], step: OptimizerStep) -> list[TrainingStep]:
        """Return the planned training steps. ``trl_batches``: TRL's rows of each. All ranks call this."""
        width = trl_batches[0]["prompt_ids"].size(1) + trl_batches[0]["completion_ids"].size(1)
        packs = self.scorer.packed is not None and self.scorer.packed.agree_on_width(width)
        planner = step.planner if packs else replace(step.planner, keep_trl_batches=True)
        return planner.gather_planned(trl_batches, self.budget.tokens)

    def compute_loss(self, trl_compute_loss: Callable[[Any, Rows], Tensor], model: Any, rows: Rows) -> Tensor:
        """Return the loss of a training step, for the last backward pass. ``trl_compute_loss``: TRL's `_compute_loss`.

        All ranks call this.
        """
        step = self._current_step()
        current = step.current
        if current is None:
            # An evaluation, images, or a method of a script: TRL's loss, unless it lacks a term.
            if is_foreign(trl_compute_loss):
                refuse_added_terms(self.trainer, self.settings, "a patch of GRPOTrainer._compute_loss")
            if not step.plans and not exceeds_trl_loss(self.trainer, self.settings):
                return trl_compute_loss(model, rows)
            current = TrainingStep.of({name: value for name, value in rows.items() if name != "group"})
        loss = self._accumulated_loss(model, current, step)
        if not self.trainer.model.training:
            self._reduce_result(step)
        return loss

    def _accumulated_loss(self, model: Any, training_step: TrainingStep, step: OptimizerStep) -> Tensor:
        """Compute the micro-batches of a training step, and return its loss for the last backward pass."""
        step.metrics.skipped += training_step.skipped_rows
        step.metrics.skipped_tokens += training_step.skipped_tokens

        def weighted_loss(micro_batch: MicroBatch) -> Tensor:
            loss = self.loss_of(model, micro_batch.rows, step)
            step.metrics.add(loss, loss_mask(micro_batch.rows), micro_batch.completions, micro_batch.weight)
            return loss.loss * micro_batch.weight

        return accumulate(
            training_step.micro_batches,
            weighted_loss,
            model,
            self.trainer.accelerator,
            self.trainer.is_deepspeed_enabled,
        )

    def loss_of(self, model: Any, rows: Rows, step: OptimizerStep) -> Loss:
        """Score rows, and return their loss in an optimizer step."""
        trainer = self.trainer
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

    def _compute_done_again(self, model: Any) -> None:
        """Compute the earlier training steps of the optimizer step again.

        Some parameters may have the gradient of the failed training step already, so all gradients are dropped.
        """
        model.zero_grad(set_to_none=True)
        step = self._current_step()
        step.metrics = LossMetrics()
        for done in step.done:
            self.trainer.accelerator.backward(self._accumulated_loss(model, done, step))

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
