"""Updates: from TRL's rows of a rollout to the gradient of an optimizer step, and its result.

TRL keeps the rows of a rollout, one dict for each training step. When an optimizer step begins, its rows are planned
into micro-batches, and its settings are read. Each training step computes some of the micro-batches. If memory runs
out, the training steps of the optimizer step are computed again with smaller ones.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.models import get_act_offloading_ctx_manager

from grpo_math.algorithm.loss_inputs import Normalizers, loss_inputs
from grpo_math.algorithm.loss_metrics import LossMetrics, StepResult
from grpo_math.algorithm.losses import Loss, compute_loss
from grpo_math.algorithm.rows import Rows, loss_mask
from grpo_math.generation.names import experts_for_trl
from grpo_math.generation.served_teacher import ServedTeacher
from grpo_math.packing import scoring
from grpo_math.packing.micro_batches import (
    MicroBatch,
    OptimizerStep,
    TokenBudget,
    TrainingStep,
    UpdatePlanner,
    accumulate,
)
from grpo_math.run import metrics
from grpo_math.run.speed_ups import switched_off
from grpo_math.settings.rules import steps_in_backward
from grpo_math.trainer import gradients, largest_batch, tiled_mlp
from grpo_math.trainer.loss_settings import (
    exceeds_trl_loss,
    loss_settings,
    micro_batch_terms,
    refuse_images_with_added_terms,
    update_entropy_coef,
)
from grpo_math.trainer.meter import StepMeter
from grpo_math.trainer.overrides import sees_rows
from grpo_math.user_functions import is_foreign, is_user_function

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer


class Updates:
    """The updates of a trainer. Reads its attributes once in an optimizer step.

    ``trl_scoring`` returns TRL's method of scoring, which a script may have replaced. ``step`` is the optimizer step
    under way, ``result`` that of the last one.
    """

    def __init__(
        self,
        trainer: "TrlTrainer",
        settings: "MathGRPOConfig",
        meter: StepMeter,
        trl_scoring: Callable[[], Callable[..., scoring.Scores]],
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.meter = meter
        self.trl_scoring = trl_scoring
        accelerator, args = self.trainer.accelerator, self.trainer.args
        if args.ddp_find_unused_parameters is None and accelerator.ddp_handler is not None:
            accelerator.ddp_handler.find_unused_parameters = gradients.has_unused_parameters(trainer)
        models = [accelerator.unwrap_model(model) for model in self._models]
        packs = settings.pack_updates and scoring.agree_to_register(
            models,
            args,
            {
                "an image processor": trainer._is_vlm,
                "continuous batching, which has no packed attention": trainer.use_transformers_continuous_batching,
                "an optimizer that steps in each backward pass": (
                    steps_in_backward(args.optim) or gradients.have_hooks(models)
                ),
            },
        )
        for term in micro_batch_terms(trainer) if packs else []:
            switched_off("shared updates", f"{term} is computed over the rows of a micro-batch")
        self.tiled_layers = tiled_mlp.tile_as_configured(models, args, accelerator)
        if trainer._is_vlm:
            refuse_images_with_added_terms(trainer, settings)
        # DeepSpeed collects gradients in its own buffers, even in one process. A failed backward pass is not undone
        # by dropping ``.grad``.
        single = accelerator.num_processes == 1 and not trainer.is_deepspeed_enabled
        self.budget = TokenBudget(settings.max_tokens_per_micro_batch, splits=packs, is_single_process=single)
        self.scorer = scoring.PackedScorer(accelerator, self.budget, models) if packs else None
        self.offload: AbstractContextManager[Any] = (
            get_act_offloading_ctx_manager(self.trainer.model, warn_if_no_head=False)
            if settings.activation_offloading
            else nullcontext()
        )
        self.dry_run_due = largest_batch.dry_run_enabled(settings, accelerator)
        self.reset()

    def reset(self) -> None:
        """Forget an optimizer step that was interrupted."""
        self.step: OptimizerStep | None = None
        self.result = StepResult({})
        # The training steps that are planned together, and the current one. Empty and None with TRL's rows.
        self.window: list[TrainingStep] = []
        self.current: TrainingStep | None = None

    @property
    def _models(self) -> list[Any]:
        return [model for model in (self.trainer.model, self.trainer.ref_model) if isinstance(model, torch.nn.Module)]

    @property
    def _keeps_trl_rows(self) -> bool:
        """True if an update is not planned: it has images, or a script's method gets its rows."""
        # Not in the constructor, because a script may replace a method later.
        return self.trainer._is_vlm or sees_rows(self.trainer)

    @property
    def _keeps_trl_batches(self) -> bool:
        return self.scorer is None or self._keeps_trl_rows or bool(micro_batch_terms(self.trainer))

    def agree_to_pack(self) -> None:
        """Stop packing if packed scores differ from those of TRL's method. All ranks call this."""
        # Not in the constructor, because the model is not on its device yet.
        tokenizer, tf32 = self.trainer._tokenizer, self.trainer.args.tf32
        if self.scorer and not self.scorer.agree_to_pack(self.trl_scoring(), self._models, tokenizer, tf32):
            self.scorer = None

    # An optimizer step: methods in the order in which TRL calls them

    def training_step(self, trl_method: Callable[..., Tensor], model: Any, inputs: Any, *others: Any) -> Tensor:
        """Call TRL's `training_step`. If memory runs out in the update, repeat the optimizer step in smaller parts.

        All ranks call this.
        """
        trainer = self.trainer
        self.agree_to_pack()
        self.budget.splits = not self._keeps_trl_batches
        # Not in the constructor, because `train` prepares the model.
        if self.dry_run_due:
            self.dry_run_due = False
            largest_batch.dry_run(trainer, lambda *rows: self.loss_of(*rows).loss, self.budget, model, inputs)
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
                loss = trl_method(model, inputs, *others)
                break
            except torch.OutOfMemoryError as error:
                # Memory ran out while sampling, or in TRL's loss: there is nothing to split.
                if self.current is None:
                    raise
                # As text, because the error's traceback keeps the activations alive.
                failure = str(error)
            # The later training steps would not fit either.
            self.budget.split([*self._current_step().done, *self.window], self.planner, failure)
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

    def gather_inputs(self, trl_method: Callable[[Any], Any], batch: Any) -> Any:
        """Return TRL's rows of a training step, or our training step. ``trl_method``: TRL's `_prepare_inputs`.

        All ranks call this.
        """
        # Memory ran out: the same training step comes again, in smaller micro-batches.
        if isinstance(batch, TrainingStep):
            return batch
        trainer, args = self.trainer, self.trainer.args
        if not trainer.model.training:
            return trl_method(batch)
        # This many training steps always belong to one optimizer step. Rows change places within these only.
        size = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        first = trainer._step % args.steps_per_generation
        number = first % size
        self.current = None
        if number == 0:
            self.window = []
        inputs = trl_method(batch)
        if number == 0 and not self._keeps_trl_rows:
            self.window = self._gather_window(trainer._buffered_inputs[first : first + size])
        if not self.window:
            return inputs
        self.current = self.window[number]
        return self.current

    def _gather_window(self, trl_batches: list[Rows]) -> list[TrainingStep]:
        """Return the planned training steps. ``trl_batches``: TRL's rows of each. All ranks call this."""
        if "micro_batches" in trl_batches[0]:
            return [TrainingStep.from_state_dict(state) for state in trl_batches]
        trainer = self.trainer
        width = trl_batches[0]["prompt_ids"].size(1) + trl_batches[0]["completion_ids"].size(1)
        packs = self.scorer is not None and self.scorer.agree_on_width(width)
        self.planner = UpdatePlanner(
            trainer.accelerator,
            loss_settings(trainer, self.settings).loss_type,
            keep_trl_batches=self._keeps_trl_batches or not packs,
            skip_zero_advantage=trainer.beta == 0.0 and not is_user_function(self.settings.surrogate),
            deepspeed=trainer.is_deepspeed_enabled,
        )
        return self.planner.gather_planned(trl_batches, self.budget.tokens)

    def compute_loss(self, trl_method: Callable[[Any, Any], Tensor], model: Any, inputs: Any) -> Tensor:
        """Return the loss of a training step, for the last backward pass. ``trl_method``: TRL's `_compute_loss`.

        All ranks call this.
        """
        if not isinstance(inputs, TrainingStep):
            # TRL's loss, unless it lacks a term.
            if self._keeps_trl_rows and not exceeds_trl_loss(self.trainer, self.settings):
                return trl_method(model, inputs)
            # An evaluation, or an update whose rows a method of a script gets.
            rows = {name: value for name, value in inputs.items() if name != "group"}
            inputs = TrainingStep([MicroBatch(rows, 1.0, len(rows["advantages"]))])
        step = self._current_step()
        step.metrics.skipped += inputs.skipped_rows
        step.metrics.skipped_tokens += inputs.skipped_tokens
        loss_of = partial(self._micro_batch_loss, step, model)
        accelerator, deepspeed = self.trainer.accelerator, self.trainer.is_deepspeed_enabled
        loss = accumulate(inputs.micro_batches, loss_of, model, accelerator, deepspeed)
        if not self.trainer.model.training:
            self._reduce_result(step)
        return loss

    def _current_step(self) -> OptimizerStep:
        """Return the optimizer step under way, or begin one. An evaluation has one for each batch."""
        trainer = self.trainer
        # An evaluation may come between the training steps of an optimizer step.
        if self.step is not None and trainer.model.training:
            return self.step
        ranks, settings = trainer.accelerator.num_processes, loss_settings(trainer, self.settings)
        if not trainer.model.training:
            return OptimizerStep(settings, Normalizers(1 / ranks))
        accumulation = trainer.current_gradient_accumulation_steps
        self.step = OptimizerStep(
            settings, Normalizers.for_optimizer_step(ranks, accumulation, trainer.args.steps_per_generation)
        )
        return self.step

    def _micro_batch_loss(self, step: OptimizerStep, model: Any, micro_batch: MicroBatch) -> Tensor:
        """Return the weighted loss of a micro-batch, and add its metrics to those of the step."""
        loss = self.loss_of(model, micro_batch.rows)
        step.metrics.add(loss, loss_mask(micro_batch.rows), micro_batch.completions, micro_batch.weight)
        return loss.loss * micro_batch.weight

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

    def score(
        self,
        trl_method: Callable[..., scoring.Scores],
        *rows: Any,
        group: Tensor | None,
        compute_aux_loss: bool,
        **kwargs: Any,
    ) -> scoring.Scores:
        """Return the scores of rows. ``trl_method``: TRL's `_get_per_token_logps_and_entropies`, with its arguments.

        All ranks call this.
        """
        if isinstance(rows[0], ServedTeacher):
            with self.meter.phase(metrics.SECONDS_TEACHER):
                return rows[0].gather_logps(*rows[1:4]), None, None
        # Offloading intercepts what autograd saves for the backward pass.
        offload = self.offload if torch.is_grad_enabled() else nullcontext()
        config = self.trainer.accelerator.unwrap_model(rows[0]).config.get_text_config()
        kwargs["compute_aux_loss"] = compute_aux_loss
        with offload, experts_for_trl(config) if compute_aux_loss else nullcontext():
            # A script may have replaced TRL's method.
            scorer: Any = self.scorer
            if scorer is not None and not is_foreign(trl_method):
                return scorer(trl_method, *rows, group=group, **kwargs)
            logps, *others = trl_method(*rows, **kwargs)
        # With device_map, the LM head may be on another GPU than the rows.
        device = rows[1].device
        entropies, loss = (value if value is None else value.to(device) for value in others)
        return logps.to(device), entropies, loss

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
        trainer = self.trainer
        result = step.metrics.reduce(trainer.accelerator, step.normalizers.accumulation)
        self.meter.add(result.metrics)
        if not trainer._entropy_bonus_enabled:
            return result
        self.meter.add({metrics.POLICY_LOSS: result.policy_loss})
        if not trainer.model.training:
            return result
        update_entropy_coef(trainer, result.entropy)
        self.meter.add({metrics.ENTROPY_COEF: trainer.entropy_coef})
        return result
