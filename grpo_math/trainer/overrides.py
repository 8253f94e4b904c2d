"""Support subclasses of the trainer, and scripts that replace a method, as TRL's trainer does.

Does not override a method of TRL: `trainer.py` does.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger

from grpo_math.run.replaced import replaced

logger = get_logger(__name__)

SCORING = "_get_per_token_logps_and_entropies"
PACKAGES = ("trl", "transformers", "grpo_math")
# Methods that get an update's rows.
OF_ROWS = ("training_step", "_prepare_inputs", "compute_loss", "_compute_loss", SCORING)


@contextmanager
def results_of(owner: Any, name: str) -> Iterator[list[Any]]:
    """Record the last result of a method, as its caller gets it: a subclass may change what our method returns."""
    method, results = getattr(owner, name), list[Any]()

    def kept(*args: Any, **kwargs: Any) -> Any:
        results[:] = [method(*args, **kwargs)]
        return results[0]

    with replaced(owner, **{name: kept}):
        yield results


def is_foreign(function: Any) -> bool:
    """Return True if a function, or one that it wraps, is not code of TRL, of transformers or of this package.

    >>> is_foreign(sees_rows), is_foreign(lambda: None)
    (False, False)
    >>> is_foreign(print), is_foreign(contextmanager)
    (True, True)
    """
    modules = [getattr(one, "__globals__", {}).get("__name__", "") for one in (function, inspect.unwrap(function))]
    return any(name.partition(".")[0] not in PACKAGES for name in modules)


def sees_rows(trainer: Any) -> bool:
    """Return True if a method of a subclass or a script gets the rows of an update.

    Such a method may read or write rows, or compute a mean over them. So it gets TRL's micro-batches unchanged. A
    script may also replace a method of TRL's class.
    """
    owners = (trainer, *type(trainer).__mro__)
    others = [name for name in OF_ROWS if any(is_foreign(vars(one)[name]) for one in owners if name in vars(one))]
    if others:
        text = f"pack_updates: {type(trainer).__name__} overrides {', '.join(others)}; "
        logger.warning_once(f"{text}each update keeps TRL's rows, and only its prompts are shared.")
    return bool(others)
