"""The user's errors, and findings: each names the field, the value, the reason and the remedy, on one line.

`cli.py` prints them after ``error:`` and exits with 2 (with 1 for a `PushError`); no traceback is shown. Each is also
the built-in exception that a Python caller would expect.

An error inside this package is a bug, and shows its traceback.
"""

import copyreg
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from grpo_math.redact import HIDDEN, is_secret, without_secrets

SHOWN = 200  # characters of a value
LONGEST = 2000  # characters of a printed error


def cut(value: object) -> str:
    """Return the repr of a value in at most 200 characters.

    >>> cut(-1), len(cut("x" * 10**7)), cut(10**5000), cut("http://ada:secret@host")
    ('-1', 200, 'a value of thousands of digits or brackets', "'http://***@host'")
    """
    try:
        # A tuple is shown as itself.
        text = repr(without_secrets(value) if isinstance(value, dict | list) else value)[:LONGEST]
    except (ValueError, RecursionError):
        return "a value of thousands of digits or brackets"
    text = re.sub("://.*@", "://***@", text)  # a user and a password before the host
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


# error: the run learns nothing or gets worse. warning: it learns less than possible. info: normal, explained.
LEVELS = ("error", "warning", "info")


class Finding(NamedTuple):
    """A problem of a run, of its data or of its rewards, which does not end the command.

    ``message`` contains symptom, numbers and cause. ``remedy`` ends in a line for the recipe; it is empty if there is
    nothing to change. ``check`` names the check.

    >>> Finding("warning", "completions are cut: 31%", "max_completion_length: 512", "truncation").line()
    'warning: completions are cut: 31%. Remedy: max_completion_length: 512 (truncation)'
    """

    level: str
    message: str
    remedy: str = ""
    check: str = ""

    def line(self) -> str:
        """Return the finding as a line for a terminal."""
        remedy = f". Remedy: {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.message}{remedy} ({self.check})"


class UserError(Exception):
    """An error that the user can correct. ``str(error)`` is one line. Subclasses can be pickled too.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(ConfigError("beta", -1, "is negative", "give 0 or more")))
    ConfigError('beta=-1 is negative: give 0 or more')
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Skip __init__: an exception is unpickled from its message, but a subclass takes other arguments.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(UserError, ValueError):
    """A setting that cannot work, found before any weight is loaded.

    >>> print(ConfigError("baseline", "mean", "is not a baseline", "use group_mean, leave_one_out or none"))
    baseline='mean' is not a baseline: use group_mean, leave_one_out or none

    The value of a secret field is hidden:

    >>> ConfigError("hub_token", "hf_x", "is wrong", "log in").value, cut({"token": "hf_x", "dtype": "auto"})
    ('***', "{'dtype': 'auto'}")
    """

    def __init__(self, field: str, value: object, reason: str, remedy: str) -> None:
        self.field = field
        self.value = HIDDEN if is_secret(field) else value
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{field}={cut(self.value)} {reason}: {remedy}")


class DataError(UserError, ValueError):
    """A row of a data file that cannot be used.

    >>> print(DataError("my.jsonl", 3, "answer", "is missing", "every row needs the gold answer"))
    my.jsonl:3: answer is missing: every row needs the gold answer
    """

    def __init__(self, file: object, line: int, field: str, reason: str, remedy: str) -> None:
        self.file = file
        self.line = line
        self.field = field
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{file}:{line}: {field} {reason}: {remedy}")


class RewardError(UserError, RuntimeError):
    """A reward function that raised, or that returned something that is not a reward."""


class OutOfMemory(UserError):
    """An update that does not fit in memory, however it is split."""


class WriteError(UserError):
    """A file of the run that could not be written, on any rank."""


class PushError(UserError):
    """A push that failed because of the Hub or the network. Nothing is lost, and the same push can be tried again."""


def with_type(error: UserError, original: BaseException | None) -> UserError:
    """Return an error that is also of the original's type, with its attributes: a script may catch that type.

    >>> both = with_type(RewardError("one line"), TimeoutError(110, "no answer"))
    >>> isinstance(both, RewardError), isinstance(both, TimeoutError), str(both), both.errno
    (True, True, 'one line', 110)
    """
    kind = type(original)
    if not isinstance(original, Exception) or isinstance(error, kind):
        return error
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__str__": Exception.__str__}
    try:
        both: Any = kind.__new__(type(kind.__name__, (type(error), kind), names), *original.args)
        if isinstance(original, OSError):
            OSError.__init__(both, *original.args)
    # Any class of a script or a library: its metaclass may refuse, and its constructor may need more.
    except Exception:
        return error
    both.__dict__.update(vars(original))
    both.args = error.args
    both.__cause__ = original
    return cast(UserError, both)


def nearest_name(word: object, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that is spelled most like a word; None if none is much like it."""
    import difflib

    # The word is cut, because difflib's time grows with the square of the length.
    return next(iter(difflib.get_close_matches(str(word)[:100], [*names], n=1, cutoff=cutoff)), None)


def require_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``; the nearest choice comes first in the remedy.

    >>> require_choice("surrogate", "clip", ("clip", "reinforce"))
    >>> require_choice("surrogate", "reinforced", ("clip", "reinforce"))
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: surrogate='reinforced' is not known: did you mean 'reinforce'? (clip, reinforce)
    """
    if value in choices:
        return
    # By its letters, leave_one_out is too different from leave.
    near = next((choice for choice in choices if choice.startswith(f"{value}_")), nearest_name(value, choices))
    hint = f"did you mean {near!r}? ({', '.join(choices)})" if near else f"use one of {', '.join(choices)}"
    raise ConfigError(field, value, "is not known", hint)


@contextmanager
def as_config_error(field: str, value: object, reason: str, remedy: str) -> Iterator[None]:
    """Turn any exception in the block into a `ConfigError`. The exception, or its cause, follows the reason.

    >>> with as_config_error("split", "train[", "is not a valid part of a split", "write train[200:]"):
    ...     raise KeyError("train[")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: split='train[' is not a valid part of a split (KeyError: 'train['): write train[200:]
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # A library wraps the reason: "An error occurred", or a field of config.json with a wrong value.
        inner = error.__cause__ or error
        if type(inner).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            raise
        reason = f"{reason} ({type(inner).__name__}: {first_line(inner)})"
        raise ConfigError(field, value, reason, remedy) from None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception, cut at 200 characters, or its type name if the message is empty.

    >>> first_line(ValueError("no such file\\nTraceback ...")), first_line(KeyError())
    ('no such file', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def printed(error: BaseException) -> str:
    r"""Return the printed form of an error: one line of at most 2,000 characters, `escaped`.

    >>> print(printed(UserError("a\nb\x1b[31m is not a file")))
    a\nb\x1b[31m is not a file
    """
    text = str(error)
    # Keep the end of the text: it is the remedy.
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} ... {text[-190:]}"
    return escaped(text)


def escaped(text: str, keep: str = "") -> str:
    r"""Return a text with codes for its unprintable characters, such as cursor movements, except those to ``keep``.

    >>> print(escaped("a\nb\x1b[2J"))
    a\nb\x1b[2J
    """

    def shown(match: re.Match[str]) -> str:
        letter = match[0]
        return letter if letter.isprintable() or letter in keep else repr(letter)[1:-1]

    return re.sub("[^ -~]", shown, text)
