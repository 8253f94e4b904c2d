"""Atomic writes: a file is written next to the old one and renamed. Failed writes: the errors of every library.

failures.py reports a write that fails during a run.
"""

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.system.reading import Unreadable, read_json

# torch, safetensors, tokenizers and pyarrow each raise another class. All but torch pass on the system's text.
NO_ROOM = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)]
WRITER_ERROR = re.compile("|".join([*NO_ROOM, "PytorchStreamWriter", "unexpected pos", "iostream error"]))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what has caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def no_room(error: BaseException) -> BaseException | None:
    """Return the cause of an exception if it is a full disk or a read-only file system: the one that names a file, or
    the first one.

    >>> no_room(Exception("No space left on device (os error 28)")), no_room(OSError(errno.EACCES, "Permission denied"))
    (Exception('No space left on device (os error 28)'), None)
    """
    causes = [one for one in reversed([*chain(error)]) if WRITER_ERROR.search(str(one))]
    return max(causes, key=lambda one: bool(getattr(one, "filename", None)), default=None)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in an `OSError` of the block. Python names the file only if it cannot be opened."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def unwritable(folder: Path) -> str | None:
    """Return why no file can be written to a folder, which need not exist yet, or None.

    >>> unwritable(Path(os.devnull) / "x")
    'cannot be written: /dev/null is read-only, or not a folder'
    """
    parent = existing(folder)
    can_write = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    return None if can_write else f"cannot be written: {parent} is read-only, or not a folder"


def require_new(field: str, path: str | Path, kind: str = "file") -> None:
    """Raise `ConfigError` unless the path of the option ``field`` is new and can be written."""
    if Path(path).exists():
        raise ConfigError(field, str(path), "exists", f"name a new {kind}")
    if reason := unwritable(Path(path).parent):
        raise ConfigError(field, str(path), reason, f"name another {kind}")


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `replace_text` does, and create the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def remembered(path: Path, compute: Callable[[], Any]) -> Any:
    """Return the JSON value of a file. Without the file, return what ``compute`` returns, and write the file."""
    # Another process may be writing the file.
    with suppress(Unreadable):
        return read_json(path)
    value = compute()
    # A full disk: the next run computes the value again.
    with suppress(OSError):
        write_json(path, value)
    return value


def replace_text(path: Path, text: str | Iterable[str]) -> None:
    """Write a text as `written_whole` does."""
    with written_whole(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path next to a file, and rename what the block has written there: a kill at any moment leaves the old
    file or the new one."""
    scratch = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            yield scratch
            # Without the flush, a power failure after the rename may leave an empty file under the final name.
            flush(scratch)
            scratch.replace(path)
        except BaseException:
            # A full disk is not filled by a file that nothing uses.
            scratch.unlink(missing_ok=True)
            raise


def flush(path: Path) -> None:
    # fsync needs no write access, and a folder cannot be opened for writing.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
