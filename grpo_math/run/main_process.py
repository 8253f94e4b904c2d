"""What the main process alone does for every process: one asks a server or reads a file, and all learn what came of it.

Does not start processes (train/launcher.py) nor notice one that is gone (peers.py).
"""

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from grpo_math.errors import UserError, first_line

PAUSE = 0.1  # seconds, the longest between two looks at whether the main process is done
_calls = count()


def on_main(call: Callable[[], Any]) -> Any:
    """What ``call`` returns on the main process, on every process; a `UserError` of it is raised on all of them.

    Every process has to come here. They wait for as long as ``call`` takes: not in a collective, which would end the
    run after ``ddp_timeout``. Any other exception is raised on the main process, and a RuntimeError on the others.

    >>> on_main(lambda: 3)
    3
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state, done = PartialState(), f"grpo_math/on_main/{next(_calls)}"
    outcome: list[Any] = [None]
    failed: Exception | None = None
    if state.is_main_process:
        try:
            outcome = [(None, call())]
        except UserError as error:
            outcome = [(error, None)]
        except Exception as error:
            failed = error
            outcome = [(RuntimeError(f"on the main process: {type(error).__name__}: {first_line(error)}"), None)]
    if state.num_processes > 1:
        _wait_for_main(state, done)
    broadcast_object_list(outcome)
    refused, value = outcome[0]
    if failed is not None:
        raise failed
    if refused is not None:
        raise refused
    return value


def _wait_for_main(state: Any, done: str) -> None:
    """Until the main process has said ``done``, in the store through which the processes have found one another."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, pause = _get_default_store(), 0.001
    if state.is_main_process:
        store.set(done, "1")
    while not store.check([done]):
        time.sleep(pause)
        pause = min(PAUSE, 1.5 * pause)
