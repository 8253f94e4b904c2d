"""A watchdog: if no step ends for some minutes, each rank prints the stacks of its threads once. The run continues.

faulthandler prints them from a thread of C, so it works even if C code, such as a collective of NCCL, holds Python's
lock. Does not know why a rank waits.
"""

from __future__ import annotations

import faulthandler
from typing import Any

from transformers import TrainerCallback


class Watchdog(TrainerCallback):
    """Watch a run from the entry of this context on. Each step restarts the timer. ``minutes`` 0: off."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes

    def __enter__(self) -> Watchdog:
        self.restart()
        return self

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()

    def restart(self) -> None:
        if self.seconds:
            # Not sys.stderr: faulthandler needs a file descriptor, and sys.stderr may be replaced.
            faulthandler.dump_traceback_later(self.seconds, file=2)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restart()

    on_train_begin = on_step_end
