"""Standard output and error of a command: its answer, its messages, and characters that a terminal lacks."""

import io
import logging
import os
import sys
import warnings
from typing import Any, NamedTuple

CLOSED = 141  # the exit code that a shell reports for a program that SIGPIPE ended


class Answer(NamedTuple):
    """The answer of a command: ``json`` with --json, else ``text``. The exit code is 1 unless ``yes``."""

    json: dict[str, Any]
    text: str
    yes: bool = True


def ready() -> None:
    """Escape characters that the terminal or file cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def quiet() -> None:
    """Silence messages of libraries that would disturb the progress bar. Call this before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # transformers warns about names that it changed itself.
    warnings.simplefilter("ignore", FutureWarning)
    # bitsandbytes suggests a kernel from the Hub.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # DeepSpeed reports on stdout that it finds no GPU. Stdout is for the answer, which --json makes a JSON object.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator" not in str(record.msg))


def say(label: str, text: str) -> None:
    """Print one line on stderr."""
    print(f"{label:<8} {text}", file=sys.stderr, flush=True)
