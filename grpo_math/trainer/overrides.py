"""Support subclasses of the trainer, and scripts that replace a method, as TRL's trainer does."""

from typing import TYPE_CHECKING

from grpo_math.run.speed_ups import switched_off
from grpo_math.user_functions import is_foreign

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer

SCORING = "_get_per_token_logps_and_entropies"
# Methods that get an update's rows.
ROW_METHODS = (
    *("training_step", "_prepare_inputs", "compute_loss", "_compute_loss", SCORING),
    *("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"),
)


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
