"""Agreement among processes: all processes call these functions, and all get the same result.

train/launcher.py starts processes, and failures.py notices that one has ended.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from grpo_math.errors import UserError, first_line

PAUSE = 0.02  # seconds between two checks of how many processes are done
# A key in the store is never deleted, so each wait has its own. Every process makes the same calls.
_waits = count()


@dataclass(frozen=True)
class Ranks:
    """The processes of a training, as one of them sees them. The names are accelerate's.

    ``gather`` takes a tensor of each process, and returns them joined, in the order of the processes. All ranks call
    it.
    """

    process_index: int
    num_processes: int
    device: Any
    gather: Callable[[Any], Any]

    def local(self, n: int) -> slice:
        """Return the place of this process's ``n`` rows in the rows of all processes, in their order.

        >>> Ranks(2, 4, "cpu", gather=None).local(3)
        slice(6, 9, None)
        """
        return slice(self.process_index * n, (self.process_index + 1) * n)


def broadcast_from_main(call: Callable[[], Any]) -> Any:
    """Call on the main process, and return the result on every process. A `UserError` is raised on all of them.

    Every process has to call this function. The others wait for as long as ``call`` takes, but not in a collective,
    which would end the run after ``ddp_timeout``. Any other exception is raised on the main process, and a RuntimeError
    on the others.

    >>> broadcast_from_main(lambda: 3)
    3
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state = PartialState()
    outcome: list[Any] = [None, None]
    failed: Exception | None = None
    if state.is_main_process:
        try:
            outcome = [call(), None]
        except Exception as error:
            failed = error
            # Not every library's exception can be pickled. The other processes get its text.
            other = RuntimeError(f"on the main process: {type(error).__name__}: {first_line(error)}")
            outcome = [None, error if isinstance(error, UserError) else other]
    # All processes come here after an error too: otherwise the other processes would wait forever.
    _wait_until_done(state.is_main_process, 1)
    broadcast_object_list(outcome)
    if problem := failed or outcome[1]:
        raise problem
    return outcome[0]


def gather_when_done(call: Callable[[], Any]) -> list[Any]:
    """Call on every process, and return the results of all, in the order of the processes, on each of them.

    For calls that take some processes longer than ``ddp_timeout``: no process waits in a collective. An exception is
    raised on its own process alone. Nobody notices a machine that vanishes during the calls.

    >>> gather_when_done(lambda: 3)
    [3]
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    result = call()
    _wait_until_done(True, PartialState().num_processes)
    return gather_object([result])


def agree_on_first(value: str | None) -> str | None:
    """Return the first process's text that is not empty, on all processes.

    For facts that one process discovers: if it stopped alone, the others would wait in their next collective.
    """
    from accelerate.utils import gather_object

    return next(filter(None, gather_object([value])), None)


def agree_on_all(value: bool) -> bool:
    """Return True on all processes if ``value`` is true on each of them."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather

    state = PartialState()
    # A tensor would make a single process wait for its GPU.
    return value if state.num_processes == 1 else bool(gather(torch.tensor([value], device=state.device)).all())


def agree_on_largest(number: int) -> int:
    """Return the largest number of all processes on each of them: what each needs, or the code of a signal."""
    from accelerate.utils import gather_object

    return max(gather_object([number]))


def _wait_until_done(is_done: bool, expected: int) -> None:
    """Wait until ``expected`` processes are done. Every process calls this, and ``is_done`` if it is one of them."""
    from accelerate import PartialState

    if PartialState().num_processes == 1:
        return
    from torch.distributed.distributed_c10d import _get_default_store

    store, key = _get_default_store(), f"grpo_math/done/{next(_waits)}"
    # Not store.wait(), which raises after the store's timeout.
    while store.add(key, int(is_done)) < expected:
        is_done = False
        time.sleep(PAUSE)
