"""Calls of reward functions: errors in one line that names the function, and checked numbers.

The trainer decides how a run ends, on every rank alike.
"""

import contextlib
import functools
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from grpo_math.errors import RewardError, UserError
from grpo_math.rewards.inputs import RESERVED, Completions, Prompts, Reward, Rewards
from grpo_math.system.signals import Stopped
from grpo_math.system.user_functions import format_exception

TRL_ARGUMENTS = (
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)  # arguments that are not columns
SLOW = 60.0  # seconds after which a warning names a reward function that is still running


def reward_name(reward: Any) -> str:
    """Return the name of a reward function, which may be a partial function or a callable object.

    >>> import functools
    >>> reward_name(functools.partial(reward_name))
    'reward_name'
    """
    function = reward if hasattr(reward, "__name__") else getattr(reward, "func", reward)
    return str(getattr(function, "__name__", type(reward).__name__))


def needed(reward: Any) -> set[str]:
    """Return the names of the parameters of a reward function that have no default.

    >>> sorted(needed(lambda completions, grade, level=1, **columns: []))
    ['completions', 'grade']
    """
    try:
        parameters = inspect.signature(reward).parameters
    # Compiled functions may have no signature.
    except (TypeError, ValueError):
        return set()
    return {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def columns_for(reward: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a reward function gets: those with reserved keys only if the function is ours.

    A function of the user gets a value of the trainer under its plain name, if it has a parameter of that name without
    a default and the data have no such column.

    >>> columns = {"answer": ["7"], "grpo_math_grade": [1], "grpo_math_grade_timeout": 5.0}
    >>> code = (lambda completions, grade, grade_timeout, **more: []).__code__
    >>> columns_for(type(columns_for)(code, {"__name__": "mine"}, argdefs=(1.0,)), columns)
    {'grade': [1], 'answer': ['7']}
    """
    # The module of the code itself: a decorator such as `functools.wraps` copies ``__module__``.
    if str(getattr(reward, "__globals__", {}).get("__name__")).startswith("grpo_math.rewards."):
        return dict(columns)
    needs = needed(reward)
    ours = {name.removeprefix(RESERVED): value for name, value in columns.items() if name.startswith(RESERVED)}
    theirs = {name: value for name, value in columns.items() if not name.startswith(RESERVED)}
    return {**{name: value for name, value in ours.items() if name in needs}, **theirs}


def guarded(
    reward: Any, added: Mapping[str, Any] = MappingProxyType({}), errors: list[UserError] | None = None
) -> Reward:
    """Wrap a reward function: if it fails, one clear `RewardError` names it, and no zero is invented.

    ``added``: the trainer's values, under reserved keys. With ``errors``, as in training, an error is added to that
    list instead of raised, because all ranks have to end together.

    >>> def broken(prompts, completions, **columns): return [float("inf")]
    >>> guarded(broken)([""], [""])
    Traceback (most recent call last):
    ...
    grpo_math.errors.RewardError: reward function broken returned inf for row 0: return a finite number or None
    """
    name = reward_name(reward)

    async def later(prompts: Prompts, completions: Completions, **columns: Any) -> Any:
        more = columns_for(reward, {**columns, **added})
        with _caught(reward, errors, len(completions), more) as rewards:
            values = await reward(prompts=prompts, completions=completions, **more)
            rewards[:] = _verified(name, values, len(completions))
        return rewards

    def now(prompts: Prompts, completions: Completions, **columns: Any) -> Any:
        more = columns_for(reward, {**columns, **added})
        with _caught(reward, errors, len(completions), more) as rewards:
            values = reward(prompts=prompts, completions=completions, **more)
            # Replace the items in place: if the function raises, `_caught` suppresses the error, and zeros are
            # returned.
            rewards[:] = _verified(name, values, len(completions))
        return rewards

    # TRL awaits an object with ``async __call__`` too.
    inner: Any = reward.func if isinstance(reward, functools.partial) else reward
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__)
    wrapped: Any = later if is_async else now
    return wrapped


@contextmanager
def _caught(reward: Any, errors: list[UserError] | None, count: int, columns: Mapping[str, Any]) -> Iterator[Rewards]:
    """Turn what a reward function raises, `sys.exit` included, into an error that names it. Signals pass."""
    # After an error nothing uses these zeros: this rank takes part in the gather of the rewards, then all ranks end.
    rewards: Rewards = [0.0] * count
    try:
        with _watched(reward_name(reward)):
            yield rewards
    # `Stopped` is a `SystemExit` as well, but of a signal and not of the function.
    except Stopped:
        raise
    except (Exception, SystemExit) as error:
        failure = error if isinstance(error, UserError) else _raised(reward, error, columns)
        if errors is None:
            raise failure from failure.__cause__
        errors.append(failure)


@contextmanager
def _watched(name: str) -> Iterator[None]:
    """Warn about a slow reward function. Restore torch's grad mode and default dtype if the function changed them,
    because they affect training."""
    slow = threading.Timer(SLOW, _warn, [f"reward function {name} has been running for {SLOW:g} seconds"])
    # A waiting thread must not keep an ending process alive.
    slow.daemon = True
    torch: Any = sys.modules.get("torch")  # not imported for the check of a recipe
    modes = torch and (torch.is_grad_enabled(), torch.get_default_dtype())
    slow.start()
    try:
        yield
    finally:
        slow.cancel()
        if torch and modes != (torch.is_grad_enabled(), torch.get_default_dtype()):
            torch.set_grad_enabled(modes[0])
            torch.set_default_dtype(modes[1])
            _warn(f"reward function {name} changed torch's grad mode or default dtype: they are restored")


def _raised(reward: Any, error: BaseException, columns: Mapping[str, Any]) -> RewardError:
    reason = f"raised {format_exception(error)} at {_line(error)}"
    remedy = "training stops instead of assuming a reward of 0"
    missing = sorted(needed(reward) - {"prompts", "completions"} - columns.keys())
    names = ", ".join(column for column in columns if column not in TRL_ARGUMENTS and not column.startswith(RESERVED))
    # Not before the call: a decorator may fill a parameter that the signature shows.
    if missing and isinstance(error, TypeError) and "required" in str(error):
        reason = f"needs the column {', '.join(missing)}, and the data have {names or 'none'}"
        remedy = "add the column, or give the parameter a default"
    # As in columns["level"].
    elif names and isinstance(error, KeyError) and error.args and error.args[0] not in columns:
        reason += f", and the data have {names}"
    failure = RewardError(f"reward function {reward_name(reward)} {reason}: {remedy}")
    failure.__cause__ = error
    return failure


def _verified(name: str, values: Any, count: int) -> Rewards:
    """Return one finite number or None for each completion; raise `RewardError` for anything else."""
    if isinstance(values, dict | set | str | bytes | bytearray) or not hasattr(values, "__iter__"):
        raise _returned(name, type(values).__name__, "return a list with one number a completion")
    items = list(values)
    if len(items) != count:
        returned = f"{len(items)} rewards for {count} completions"
        raise _returned(name, returned, "return one number or None for each")
    return [None if item is None else _number(name, row, item) for row, item in enumerate(items)]


def _number(name: str, row: int, item: Any) -> float | None:
    number = item.item() if hasattr(item, "item") else item  # numpy's and torch's
    # TRL accepts any number that Python can convert, such as a Decimal.
    is_real = hasattr(number, "__float__")
    # TRL leaves out a NaN as it leaves out None.
    if is_real and math.isnan(float(number)):
        _warn_about_nan(name)
        return None
    # The squares of larger numbers are not finite in float32 sums.
    if is_real and abs(float(number)) < 1e30:
        return float(number)
    returned = number if is_real else f"a {type(number).__name__}"
    raise _returned(name, f"{returned} for row {row}", "return a finite number or None")


def _returned(name: str, returned: str, remedy: str) -> RewardError:
    return RewardError(f"reward function {name} returned {returned}: {remedy}")


def _warn(warning: str) -> None:
    from tqdm import tqdm

    tqdm.write(f"warning: {warning}", file=sys.stderr)


@functools.cache
def _warn_about_nan(name: str) -> None:
    """Warn once for each name of a function."""
    _warn(f"reward function {name} returned NaN, which counts as None: the completion gets no reward from it")


def _line(error: BaseException) -> str:
    """Return file:line of the last frame in the reward function's own file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, contextlib.__file__)]
    frame = next((f for f in reversed(frames) if f.filename == frames[0].filename), None)
    return f"{frame.filename}:{frame.lineno}" if frame else "its call"
