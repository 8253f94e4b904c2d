"""What the main process alone does for every process: one asks a server or reads a file, and all learn what came of it.

Does not start processes (train/launcher.py) nor notice one that is gone (peers.py).
"""

from collections.abc import Callable
from typing import Any

from grpo_math.errors import UserError


def on_main(call: Callable[[], Any]) -> Any:
    """What ``call`` returns on the main process, on every process; a `UserError` of it is raised on all of them.

    Every process has to come here. Any other exception is raised on the main process alone, and the others wait.

    >>> on_main(lambda: 3)
    3
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None]
    if PartialState().is_main_process:
        try:
            outcome = [(None, call())]
        except UserError as error:
            outcome = [(error, None)]
    broadcast_object_list(outcome)
    refused, value = outcome[0]
    if refused is not None:
        raise refused
    return value
