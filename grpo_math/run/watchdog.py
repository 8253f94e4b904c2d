"""No step for so many minutes: each rank says where it stands, once, and nothing is ended.

One line with the rank, the last step, the phase and the place where the training thread waits; then the Python stack of
each thread. To stderr and to RUN/stacks-rankN.txt. A thread does this, which needs Python's lock; where C code holds
that, faulthandler prints the stacks alone, `GRACE` seconds later.

Does not look at a clock that can be set, and does not know why a rank waits.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

GRACE = 60.0  # seconds
OWNERS = ("grpo_math", "trl", "transformers", "__main__")
# The innermost of these functions on the training thread's stack says the phase; without one it is loading.
PHASES = {
    "_generate_single_turn": "generate",
    "_calculate_rewards": "grade",
    "_generate_and_score_completions": "score",
    "training_step": "update",
    "_inner_training_loop": "update",
    "_save_checkpoint": "checkpoint",
    "save_model": "checkpoint",
    "evaluate": "evaluate",
    "measure": "evaluate",
    "report": "report",
}


class Watchdog:
    """Watches the thread that enters it: whoever makes the steps calls ``step``. ``minutes`` 0: off.

    Raises nothing: a file that cannot be written is a line on stderr.

    >>> with Watchdog(Path("runs/x"), minutes=0) as watchdog:
    ...     watchdog.step(1)
    """

    def __init__(self, run_dir: Path, minutes: float, grace: float = GRACE) -> None:
        self.minutes, self.grace = minutes, grace
        self.rank = int(os.environ.get("RANK", 0))
        self.file = run_dir / f"stacks-rank{self.rank}.txt"
        self.last: int | None = None
        self._steps, self._ended = 0, False
        self._changed = threading.Condition()

    def __enter__(self) -> Watchdog:
        self._watched = threading.get_ident()
        if self.minutes:
            self._later()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ended = True
        self._count()
        faulthandler.cancel_dump_traceback_later()

    def step(self, number: int) -> None:
        self.last = number
        self._count()
        if self.minutes:
            self._later()

    def _count(self) -> None:
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    def _later(self) -> None:
        faulthandler.dump_traceback_later(60 * self.minutes + self.grace, file=2)

    def _watch(self) -> None:
        seen = 0
        while not self._ended:
            with self._changed:
                stepped = self._changed.wait_for(lambda seen=seen: self._steps != seen, 60 * self.minutes)  # type: ignore
            if not stepped:
                faulthandler.cancel_dump_traceback_later()
                self._tell()
                with self._changed:
                    self._changed.wait_for(lambda seen=seen: self._steps != seen)  # type: ignore
            seen = self._steps

    def _tell(self) -> None:
        frames = sys._current_frames()
        text = f"{self._line(frames[self._watched])}\n{stacks(frames)}"
        os.write(2, f"\n{text}".encode())  # at once, since other ranks write too; and first, since the disk may hang
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            os.write(2, f"watchdog: {self.file} cannot be written: {error.strerror}\n".encode())

    def _line(self, frame: FrameType) -> str:
        since = "since the start" if self.last is None else f"since step {self.last}"
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        return (
            f"watchdog: rank {self.rank}: no step for {self.minutes:g} minutes, {since}; phase {phase(frame)}; "
            f"waits at {place}; the stacks of its threads follow, and go to {self.file}"
        )


def phase(frame: FrameType | None) -> str:
    """What the thread of this frame is doing, in terms of a run.

    >>> phase(sys._getframe())
    'loading'
    """
    for place in _callers(frame):
        of_run = str(place.f_globals.get("__name__")).split(".")[0] in OWNERS
        if of_run and place.f_code.co_name in PHASES:
            return PHASES[place.f_code.co_name]
    return "loading"


def stacks(frames: dict[int, FrameType]) -> str:
    """The stack of each thread, innermost call first, without reading a source file: its disk may be what hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in frames.items():
        lines.append(f"Thread {names.get(ident, ident)}:")
        for place in _callers(frame):
            lines.append(f'  File "{place.f_code.co_filename}", line {place.f_lineno} in {place.f_code.co_name}')
    return "\n".join(lines) + "\n"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
