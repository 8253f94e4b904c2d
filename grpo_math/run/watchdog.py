"""A watchdog: if no step ends for some minutes, each rank prints the stacks of its threads once. The run continues.

A thread prints the line with the rank and the last step, and writes the stacks to RUN/stacks-rankN.txt. It needs
Python's lock. faulthandler does not, so it prints the stacks to stderr even if C code holds the lock.

Does not use a clock that can be set, and does not know why a rank waits.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Watchdog(TrainerCallback):
    """Watch a run from the entry of this context on. Each step restarts the timer. ``minutes`` 0: off.

    >>> with Watchdog(Path("runs/x"), minutes=0) as watchdog:
    ...     watchdog.again("since step 1")
    """

    timer: threading.Timer | None = None

    def __init__(self, run_dir: Path, minutes: float) -> None:
        self.minutes, self.rank = minutes, int(os.environ.get("RANK", 0))
        self.file = run_dir / f"stacks-rank{self.rank}.txt"

    def __enter__(self) -> Watchdog:
        self.again("since the start")
        return self

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self.timer:
            self.timer.cancel()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.again(f"since step {state.global_step}")

    on_step_end = on_train_begin

    def again(self, since: str) -> None:
        """Restart the timer."""
        self.__exit__()
        if self.minutes:
            self.timer = threading.Timer(60 * self.minutes, self._tell, [since])
            self.timer.daemon = True
            self.timer.start()
            faulthandler.dump_traceback_later(60 * self.minutes + 1, file=2)  # after the line

    def _tell(self, since: str) -> None:
        stall = f"watchdog: rank {self.rank}: no step for {self.minutes:g} minutes, {since}"
        # In one write, because other ranks write too; and first, because the disk may hang.
        os.write(2, f"\n{stall}; the stacks of its threads follow, and go to {self.file}\n".encode())
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a", encoding="utf-8") as file:
                print(stall, file=file, flush=True)
                faulthandler.dump_traceback(file)
        except OSError as error:
            os.write(2, f"watchdog: {self.file} cannot be written: {error.strerror}\n".encode())
