"""`Parts`: what grpo_math adds to a trainer, under the one name ``trainer.grpo_math``.

All other names of a trainer belong to TRL, and to the subclass of a user.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_math.algorithm.reference import Reference
from grpo_math.algorithm.resample import Resampler
from grpo_math.generation.sync import AdapterGeneration
from grpo_math.packing.micro_batches import TokenBudget
from grpo_math.run import metrics
from grpo_math.system.collectives import Ranks
from grpo_math.trainer.grader import Grader
from grpo_math.trainer.meter import StepMeter
from grpo_math.trainer.nonfinite import NonFiniteSteps
from grpo_math.trainer.rollout_in_progress import RolloutMaker
from grpo_math.trainer.rollout_queue import RolloutQueue, refuse_unknown_requests
from grpo_math.trainer.row_scorer import RowScorer
from grpo_math.trainer.state import RunState, TrainerAttributes
from grpo_math.trainer.updates import Updates

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer


@dataclass(frozen=True)
class Program:
    """What trains: a script, or the run of a recipe, which the same command resumes.

    ``keep_best``: each step whose evaluation is the best so far is saved. ``evaluate_heldout`` evaluates the held-out
    sets, and returns their metrics; None: they are not evaluated during training.
    """

    is_recipe: bool = False
    keep_best: bool = False
    evaluate_heldout: Callable[[], dict[str, float]] | None = None


class Parts:
    """The parts of a trainer, made when TRL's constructor has returned.

    ``trl_scoring`` returns TRL's method of scoring.
    """

    def __init__(
        self, trainer: "TrlTrainer", settings: "MathGRPOConfig", trl_scoring: Callable[[], Callable[..., Any]]
    ) -> None:
        accelerator = trainer.accelerator
        ranks = Ranks(accelerator.process_index, accelerator.num_processes, accelerator.device, accelerator.gather)
        self.settings = settings
        self.program = Program()
        self.meter = StepMeter(
            lambda: trainer._metrics["train" if trainer.model.training else "eval"],
            rollouts_per_step=trainer.args.gradient_accumulation_steps / (trainer.args.steps_per_generation or 1),
        )
        self.nonfinite = NonFiniteSteps(settings.max_nonfinite_steps)
        # DeepSpeed collects gradients in its own buffers, even in one process. A failed backward pass is not undone
        # by dropping ``.grad``.
        single = ranks.num_processes == 1 and not trainer.is_deepspeed_enabled
        budget = TokenBudget(settings.max_tokens_per_micro_batch, is_single_process=single)
        self.scorer = RowScorer(trainer, settings, budget, trainer._tokenizer, trainer._is_vlm, trl_scoring)
        self.updates = Updates(trainer, settings, ranks, self.meter, self.scorer)
        self.reference = _moving_reference(trainer, settings)
        engine: Any = trainer.vllm_generation if trainer.use_vllm else None
        # None if vLLM gets whole weights.
        self.adapters = engine if isinstance(engine, AdapterGeneration) else None
        if settings.staleness:
            refuse_unknown_requests(trainer)
        resampler = None
        if rounds := settings.resample_groups:
            resampler = Resampler(rounds, trainer.train_dataset, trainer.args.seed, trainer.num_generations, ranks)
        self.queue = RolloutQueue(
            trainer,
            resampler,
            self.adapters.prefetch if self.adapters else None,
            lambda: trainer._step,
            lambda prompts: trainer._tokenize_prompts(prompts),
        )
        self.grader = Grader(trainer, ranks, settings.grade_timeout, trainer._tokenizer)
        self.rollouts = RolloutMaker(trainer, settings, ranks, self.meter, self.queue, self.grader)
        # TRL syncs weights within generation. Without a separate phase, the seconds would count there.
        if engine is not None:
            engine.sync_weights = self.meter.phase(metrics.SECONDS_SYNC)(engine.sync_weights)
        flat = [TrainerAttributes(trainer, settings), self.queue.prefetch, self.adapters and self.adapters.sampler]
        named = {"meter": self.meter, "nonfinite": self.nonfinite, "budget": budget, "resampler": resampler}
        self.run = RunState(
            trainer, [*filter(None, flat)], {name: owner for name, owner in named.items() if owner is not None}
        )
        # The options of the optimizer before a checkpoint was loaded.
        self.optimizer_options: list[dict[str, Any]] | None = None


def _moving_reference(trainer: "TrlTrainer", settings: "MathGRPOConfig") -> Reference | None:
    """Return the reference of the KL term if it moves in training, with the callback that moves it."""
    steps = settings.reference_refresh_steps
    if not steps and not trainer.args.sync_ref_model:
        return None
    bare: Any = partial(trainer.accelerator.unwrap_model, keep_torch_compile=False)
    reference = Reference(bare(trainer.model), trainer.ref_model and bare(trainer.ref_model), steps)
    trainer.add_callback(reference)
    return reference
