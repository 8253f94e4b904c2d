"""Progress: a bar in a terminal, a line a minute in a log file."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tqdm import tqdm

SECONDS = 60.0  # between two lines of a log


class Bar(tqdm):
    """tqdm's bar. If standard error is not a terminal: a line every minute, and a last one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not 0: a bar that is done within a minute is one line of a log.
        self.printed = time.monotonic()
        self.printed_n: float | None = None
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        # tqdm's mininterval does not limit refresh(), which transformers calls for each weight that it loads.
        # tqdm's close() disables the bar before it draws the bar a last time.
        closing = self.disable
        if sys.stderr.isatty():
            super().display(msg, pos)
        # Nothing is new for a last line if the line of a minute was printed in the last step.
        elif (closing and self.n != self.printed_n) or time.monotonic() - self.printed >= SECONDS:
            self.printed = time.monotonic()
            self.printed_n = self.n
            print(self, file=sys.stderr, flush=True)

    def clear(self, *args: Any, **kwargs: Any) -> None:
        # tqdm.write clears every bar with control characters, which a log would keep.
        if sys.stderr.isatty():
            super().clear(*args, **kwargs)


@contextmanager
def transformers_bars(most: int) -> Iterator[None]:
    """Draw at most ``most`` bars of transformers, as `Bar`.

    transformers draws a bar for each model of each process, and draws it twice without a terminal.
    """
    from transformers.utils.logging import is_progress_bar_enabled, set_tqdm_hook

    drawn = count()

    def bar(factory: Any, args: Any, kwargs: Any) -> Any:
        return Bar(*args, **{**kwargs, "disable": next(drawn) >= most or not is_progress_bar_enabled()})

    # transformers has a hook for its bars, and no setting that limits their number.
    before = set_tqdm_hook(bar)
    try:
        yield
    finally:
        set_tqdm_hook(before)
