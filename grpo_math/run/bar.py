"""Progress: a bar in a terminal, a line a minute in a log file."""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 60.0  # between two lines of a log


class Bar(tqdm):
    """tqdm's bar. If standard error is not a terminal: a line every minute, and a last one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not 0, so that a bar that is done within a minute is one line of a log.
        self.printed = time.monotonic()
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        # tqdm's mininterval does not limit refresh(), which transformers calls for each weight that it loads.
        # tqdm's close() disables the bar before it draws the bar a last time.
        closing = self.disable
        if sys.stderr.isatty():
            super().display(msg, pos)
        elif closing or time.monotonic() - self.printed >= SECONDS:
            self.printed = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    def clear(self, *args: Any, **kwargs: Any) -> None:
        # tqdm.write clears every bar with control characters, which a log would keep.
        if sys.stderr.isatty():
            super().clear(*args, **kwargs)
