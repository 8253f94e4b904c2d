"""What a command prints reaches its stream, whatever the stream is: a full device, a closed pipe, an ASCII terminal.

Does not know what is printed.
"""

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from grpo_math.errors import UserError

CLOSED = 141  # as a shell has it of a program that SIGPIPE ended


class Closed(Exception):
    """Nobody reads on: the command ends without a word."""

    code = CLOSED


def ready() -> None:
    """No letter is one too many for a stream; a stream that was closed leads nowhere, and not into a run's files."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "r" if not number else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and number:
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def written() -> Iterator[None]:
    """What the block prints has left this process at its end. Raises a `UserError` where stdout cannot be written, or
    a file on a full disk, and `Closed` where stdout's reader has gone."""
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
    """JSON on one line, with other letters than ASCII where stdout can show them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeError:
        return json.dumps(value)
    return text
