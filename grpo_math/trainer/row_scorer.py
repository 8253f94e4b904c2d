"""Score the rows of a trainer's rollouts and updates: packed, as TRL does, or by a teacher on a server."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.models import get_act_offloading_ctx_manager

from grpo_math.generation.names import experts_for_trl
from grpo_math.generation.served_teacher import ServedTeacher
from grpo_math.packing import scoring
from grpo_math.packing.micro_batches import TokenBudget
from grpo_math.run import metrics
from grpo_math.run.speed_ups import switched_off
from grpo_math.system.user_functions import is_foreign
from grpo_math.trainer import gradients, tiled_mlp
from grpo_math.trainer.loss_settings import micro_batch_terms
from grpo_math.trainer.meter import StepMeter

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer


class RowScorer:
    """Prepares the models of a trainer, and scores rows with them.

    ``trl_scoring`` returns TRL's method of scoring, which a script may have replaced. ``packed``: None if rows are
    scored as TRL does. ``budget``: the tokens of a packed pass.
    """

    def __init__(
        self,
        trainer: "TrlTrainer",
        settings: "MathGRPOConfig",
        meter: StepMeter,
        trl_scoring: Callable[[], Callable[..., scoring.Scores]],
    ) -> None:
        self.trainer = trainer
        self.meter = meter
        self.trl_scoring = trl_scoring
        accelerator, args = trainer.accelerator, trainer.args
        models = [accelerator.unwrap_model(model) for model in self._models]
        packs = settings.pack_updates and scoring.agree_to_register(
            models,
            args,
            {
                "an image processor": trainer._is_vlm,
                "continuous batching, which has no packed attention": trainer.use_transformers_continuous_batching,
                "an optimizer that steps in each backward pass": settings.steps_in_backward
                or gradients.have_hooks(models),
            },
        )
        for term in micro_batch_terms(trainer) if packs else []:
            switched_off("shared updates", f"{term} is computed over the rows of a micro-batch")
        tiled_mlp.tile_as_configured(models, args, accelerator)
        # DeepSpeed collects gradients in its own buffers, even in one process. A failed backward pass is not undone
        # by dropping ``.grad``.
        single = accelerator.num_processes == 1 and not trainer.is_deepspeed_enabled
        self.budget = TokenBudget(settings.max_tokens_per_micro_batch, splits=packs, is_single_process=single)
        self.packed = scoring.PackedScorer(accelerator, self.budget, models) if packs else None
        self.offload: AbstractContextManager[Any] = (
            get_act_offloading_ctx_manager(trainer.model, warn_if_no_head=False)
            if settings.activation_offloading
            else nullcontext()
        )

    @property
    def _models(self) -> list[Any]:
        return [model for model in (self.trainer.model, self.trainer.ref_model) if isinstance(model, torch.nn.Module)]

    def agree_to_pack(self) -> None:
        """Stop packing if packed scores differ from those of TRL's method. All ranks call this."""
        # Not in the constructor, because the model is not on its device yet.
        tokenizer, tf32 = self.trainer._tokenizer, self.trainer.args.tf32
        if self.packed and not self.packed.agree_to_pack(self.trl_scoring(), self._models, tokenizer, tf32):
            self.packed = None

    def score(
        self, trl_method: Callable[..., scoring.Scores], *rows: Any, group: Tensor | None, **kwargs: Any
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
        with offload, experts_for_trl(config) if kwargs["compute_aux_loss"] else nullcontext():
            packed: Any = self.packed
            # A script may have replaced TRL's method.
            if packed is not None and not is_foreign(trl_method):
                return packed(trl_method, *rows, group=group, **kwargs)
            logps, *others = trl_method(*rows, **kwargs)
        # With device_map, the LM head may be on another GPU than the rows.
        device = rows[1].device
        entropies, loss = (value if value is None else value.to(device) for value in others)
        return logps.to(device), entropies, loss
