"""Streams of text -> the terminal: one below the other, or side by side in columns that fill as they come.

What a model says is shown as text alone: a control character is a picture, and moves no cursor.

Does not generate, and does not know what a model is.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping

from grpo_math.report.viewer import visible

Streams = Mapping[str, Iterator[str]]  # the pieces of an answer, by who gives it
BETWEEN = " │ "
NARROW = 60  # characters of a terminal that cannot hold two columns


def answer(streams: Streams) -> None:
    """Print the answer of each, as it comes: in columns on a terminal that is wide enough."""
    width = shutil.get_terminal_size().columns
    columns = sys.stdout.isatty() and width >= NARROW
    for piece in shown(streams, width, columns):
        print(piece, end="", flush=True)


def converse(ask: Callable[[str], Streams], forget: Callable[[], None]) -> None:
    """Questions from the terminal, each answered, until its end (Ctrl-D); Ctrl-C cuts an answer short."""
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if question == "/new":
            forget()
        elif question:
            try:
                answer(ask(question))
            except KeyboardInterrupt:
                print("\n(cut)")


def shown(streams: Streams, width: int, columns: bool) -> Iterator[str]:
    """What to print, piece by piece, of streams by their names; ``columns``: side by side in ``width`` characters.

    >>> streams = {"base": iter(["It is ", "54."]), "trained": iter(["21 + 34", " = 55", "\\n#### 55"])}
    >>> print("".join(shown(streams, 35, columns=True)).rstrip())
    base             │ trained
    ---------------- │ ----------------
    It is 54.        │ 21 + 34 = 55
                     │ #### 55
    """
    if columns and len(streams) > 1:
        for line in side_by_side(streams, width):
            yield line + "\n"
        return
    for name, stream in streams.items():
        if len(streams) > 1:
            yield f"{name}:\n"
        for piece in stream:
            yield visible(piece)
        yield "\n"


def side_by_side(streams: Streams, width: int) -> Iterator[str]:
    """Lines with a column for each stream: a line comes once no further piece can change it."""
    column = (width - len(BETWEEN) * (len(streams) - 1)) // len(streams)
    yield _row([*streams], column)
    yield _row(["-" * column] * len(streams), column)
    texts, open_ = dict.fromkeys(streams, ""), set(streams)
    printed = 0
    while True:
        lines = {name: wrapped(text, column) for name, text in texts.items()}
        # The last line of a stream that goes on may still grow.
        ready = min((len(lines[name]) - 1 for name in open_), default=max(map(len, lines.values())))
        for number in range(printed, ready):
            yield _row([of_one[number] if number < len(of_one) else "" for of_one in lines.values()], column)
        printed = max(printed, ready)
        if not open_:
            return
        for name in sorted(open_):
            piece = next(streams[name], None)
            if piece is None:
                open_.remove(name)
            else:
                texts[name] += visible(piece)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, none longer than ``width``; all but the last stay as they are when the text goes on.

    >>> wrapped("one two three\\n\\nfour", 8)
    ['one two', 'three', '', 'four']
    """
    parts = text.split("\n")
    return [line for part in parts for line in textwrap.wrap(part, width, break_on_hyphens=False) or [""]]


def _row(cells: list[str], width: int) -> str:
    return BETWEEN.join(cell.ljust(width) for cell in cells).rstrip()
