"""Steps of a trainer's constructor around TRL's.

A check that needs no weights, what TRL's constructor finds changed, and what the loaded model needs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from grpo_math.errors import ConfigError
from grpo_math.generation.sync import adapter_sync
from grpo_math.run.bar import transformers_bars
from grpo_math.system.machine import use_physical_cores
from grpo_math.system.replaced import replaced
from grpo_math.system.user_functions import event_loop
from grpo_math.trainer import float16, gradients
from grpo_math.trainer.loss_settings import without_advice_about_luspo
from grpo_math.trainer.teacher import load_teacher

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer


def refuse_mixed_turns(args: Any, **several_turns: Any) -> None:
    """Raise `ConfigError` for tools or environments with which TRL mixes up the turns of several processes."""
    for name, value in several_turns.items():
        if value and args.use_vllm and args.world_size > 1:
            reason = "needs one process, or no vLLM: TRL mixes up the turns of several processes"
            raise ConfigError(name, value, reason, "train on one GPU")


@contextmanager
def changed_trl(settings: "MathGRPOConfig", args: Any) -> Iterator[None]:
    """Change what TRL's constructor reads, inside this context. TRL has no argument for any of it."""
    with ExitStack() as changes:
        changes.enter_context(adapter_sync(settings.vllm_sync, settings))
        changes.enter_context(transformers_bars(int(PartialState().is_main_process)))
        changes.enter_context(without_advice_about_luspo(settings))
        if settings.reference_model:
            # With beta 0, TRL loads no reference: the teacher takes its place.
            changes.enter_context(replaced(args, beta=0.0))
        yield


def prepare_loaded(trainer: "TrlTrainer", settings: "MathGRPOConfig") -> None:
    """Prepare the model that TRL's constructor has loaded, and the threads that compute it."""
    if trainer.accelerator.device.type == "cpu":
        use_physical_cores()
    if trainer._has_async_funcs:
        # The tools, the rewards, and the checks of rewards before the run may share a client.
        trainer.async_loop = event_loop()
    gradients.keep_4bit_gradients(trainer.model)
    float16.make_adapter_float32(trainer.model, trainer.accelerator)
    if settings.reference_model:
        trainer.beta = trainer.args.beta
        trainer.ref_model = load_teacher(settings, trainer.model, trainer.accelerator)
