"""Support subclasses of the trainer, and scripts that replace a method, as TRL's trainer does.

Does not override a method of TRL: `trainer.py` does.
"""

from typing import Any

from accelerate.logging import get_logger

logger = get_logger(__name__)

SCORING = "_get_per_token_logps_and_entropies"
# Methods that get an update's rows.
OF_ROWS = (
    *("training_step", "_prepare_inputs", "compute_loss", "_compute_loss", SCORING),
    *("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"),
)


def sees_rows(trainer: Any, ours: type) -> bool:
    """Return True if a method of a subclass or a script gets the rows of an update.

    Such a method may read or write rows, or compute a mean over them. So it gets TRL's micro-batches unchanged.
    """
    methods = {name: getattr(trainer, name) for name in OF_ROWS}
    others = [
        name for name, method in methods.items() if getattr(method, "__func__", method) is not getattr(ours, name)
    ]
    if others:
        text = f"pack_updates: {type(trainer).__name__} overrides {', '.join(others)}; "
        logger.warning_once(f"{text}each update keeps TRL's rows and TRL's loss, and only its prompts are shared.")
    return bool(others)
