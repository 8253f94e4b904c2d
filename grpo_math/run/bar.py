"""Progress: a bar in a terminal, a line a minute in a log file.

Does not count: the caller does.
"""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 60.0  # between two lines of a log


class Bar(tqdm):
    """tqdm's bar. If standard error is not a terminal: a line every minute, and a last one.

    ``{left}`` in a format is the time left, with the ``then`` seconds of work that follow the last step.
    """

    then = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.in_log, self.printed = not sys.stderr.isatty(), time.monotonic()
        super().__init__(*args, **kwargs)

    @property
    def format_dict(self) -> dict[str, Any]:
        shown, done = super().format_dict, self.n - self.initial
        left = self.format_interval(shown["elapsed"] / done * (self.total - self.n) + self.then) if done else "?"
        return {**shown, "left": left}

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not self.in_log:
            super().display(msg, pos)
        elif time.monotonic() - self.printed >= SECONDS:
            self._print()

    def clear(self, *args: Any, **kwargs: Any) -> None:
        # tqdm.write clears every bar with control characters, which a log would keep.
        if not self.in_log:
            super().clear(*args, **kwargs)

    def close(self) -> None:
        if self.in_log and not self.disable:
            self._print()
            self.sp = None  # without a printer tqdm writes nothing more
        super().close()

    def _print(self) -> None:
        self.printed = time.monotonic()
        print(self, file=sys.stderr, flush=True)
