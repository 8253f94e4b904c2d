"""Score the rows of a trainer's rollouts and updates: packed, or as TRL does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from trl.models import get_act_offloading_ctx_manager

from grpo_math.generation.names import experts_for_trl
from grpo_math.packing import scoring
from grpo_math.packing.altered import model_state, runs_script
from grpo_math.packing.micro_batches import TokenBudget
from grpo_math.packing.pack import PaddedRows
from grpo_math.run.speed_ups import switched_off
from grpo_math.system.collectives import agree_on_all
from grpo_math.system.user_functions import is_foreign
from grpo_math.trainer import tiled_mlp
from grpo_math.trainer.loss_settings import micro_batch_terms

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer


class RowScorer:
    """Prepares the models of a trainer, and scores rows with them.

    ``trl_scoring`` returns TRL's method of scoring, which a script may have replaced. ``packed``: None if rows are
    scored as TRL does. ``budget``: the tokens of a packed pass, which `Updates` changes.
    """

    def __init__(
        self,
        trainer: "TrlTrainer",
        settings: "MathGRPOConfig",
        budget: TokenBudget,
        tokenizer: Any,
        has_images: bool,
        trl_scoring: Callable[[], Callable[..., scoring.Scores]],
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.trl_scoring = trl_scoring
        self.budget = budget
        self.tokenizer = tokenizer
        self.has_images = has_images
        self.packed = self._agree_on_scorer()
        for term in micro_batch_terms(trainer) if self.packed else []:
            switched_off("shared updates", f"{term} is computed over the rows of a micro-batch")
        self.tiled = tiled_mlp.tile_as_configured(self._models, trainer.args, trainer.accelerator)
        # The state of the models for which packing and tiles were decided.
        self.decided_for: list[Any] | None = None
        self.offload: AbstractContextManager[Any] = (
            get_act_offloading_ctx_manager(trainer.model, warn_if_no_head=False)
            if settings.activation_offloading
            else nullcontext()
        )

    @property
    def _models(self) -> list[Any]:
        return [model for model in (self.trainer.model, self.trainer.ref_model) if isinstance(model, torch.nn.Module)]

    def _agree_on_scorer(self) -> scoring.PackedScorer | None:
        """Return a scorer of packed rows, or None if the settings or the models do not support it."""
        trainer, args = self.trainer, self.trainer.args
        models = [trainer.accelerator.unwrap_model(model) for model in self._models]
        hindrances = {
            "an image processor": self.has_images,
            "continuous batching, which has no packed attention": trainer.use_transformers_continuous_batching,
            "an optimizer that steps in each backward pass": self.settings.steps_in_backward,
            # It may act once in each pass, or look at all rows of it.
            "a hook or a forward method of a script": any(any(map(runs_script, model.modules())) for model in models),
        }
        if not self.settings.pack_updates or not scoring.agree_to_register(models, args, hindrances):
            return None
        return scoring.PackedScorer(trainer.accelerator, self.budget, models)

    def agree_to_pack(self) -> None:
        """Decide if rows are packed, and MLPs tiled. Decide again if a script has changed a model. All ranks call this.

        Packed scores must not differ from those of TRL's method. A look at all modules of a model takes as long as
        sampling a token: call this only where a script may have run.
        """
        # Not in the constructor, because the model is not on its device yet.
        if agree_on_all(self.decided_for == model_state(self._models)):
            return
        for mlp in self.tiled:
            mlp.decide()
        self.packed = self._agree_on_scorer()
        if self.packed and not self.packed.agree_to_pack(self.trl_scoring(), self._models, self.tokenizer):
            self.packed = None
        # Registering has changed the models, too.
        self.decided_for = model_state(self._models)

    def score(
        self, trl_score: Callable[..., scoring.Scores], model: Any, rows: PaddedRows, **options: Any
    ) -> scoring.Scores:
        """Return the scores of rows. ``trl_score``: TRL's `_get_per_token_logps_and_entropies`, with its ``options``.

        All ranks call this.
        """
        # Offloading intercepts what autograd saves for the backward pass.
        offload = self.offload if torch.is_grad_enabled() else nullcontext()
        experts: AbstractContextManager[Any] = nullcontext()
        # Only here, because unwrapping a model takes milliseconds.
        if options["compute_aux_loss"]:
            experts = experts_for_trl(self.trainer.accelerator.unwrap_model(model).config.get_text_config())
        with offload, experts:
            # A script may have replaced TRL's method.
            if self.packed is not None and not is_foreign(trl_score):
                return self.packed(trl_score, model, rows, **options)
            logps, *others = trl_score(model, *rows.arguments, **options)
        # With device_map, the LM head may be on another GPU than the rows.
        device = rows.ids.device
        entropies, loss = (value if value is None else value.to(device) for value in others)
        return logps.to(device), entropies, loss
