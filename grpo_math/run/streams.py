"""Standard output and error of a command: a full device, a closed pipe, an ASCII terminal.

Does not know what is printed.
"""

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from grpo_math.errors import UserError

CLOSED = 141  # as a shell has it of a program that SIGPIPE ended


class Answer(NamedTuple):
    """What a command answers: ``json`` with --json, else ``text``. The exit code is 1 unless ``yes``."""

    json: dict[str, Any]
    text: str
    yes: bool = True


class Closed(Exception):
    """Nobody reads on: the command ends without a word."""

    code = CLOSED


def ready() -> None:
    """Escape characters that the terminal or file cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def written() -> Iterator[None]:
    """Flush stdout at the end of the block. Raises `Closed` if the reader of stdout has ended.

    Raises `UserError` if stdout, or a file on a full disk, cannot be written.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        if error.errno == errno.EPIPE:
            raise Closed from None
        raise UserError(
            f"stdout, or a file, cannot be written ({error.strerror}): make room, or send it elsewhere"
        ) from None


def json_text(value: Any) -> str:
    """Return JSON on one line. A stdout that cannot encode a letter gets its escape, which is JSON too."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeError:
        return json.dumps(value)
    return text


def say(label: str, text: str) -> None:
    """Print one line on stderr."""
    print(f"{label:<8} {text}", file=sys.stderr, flush=True)
