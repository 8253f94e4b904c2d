"""Waiting for what another process does, and the list of processes."""

from __future__ import annotations

import time
from pathlib import Path


def alive(mark: str) -> list[int]:
    """The processes whose command has ``mark`` among its words; a keeper has it too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def until(true, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
