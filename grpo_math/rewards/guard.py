"""Calls of reward functions: errors in one line that names the function, a second try, and checked numbers.

Does not decide how a run ends: the trainer does, on every rank alike.
"""

import contextlib
import inspect
import numbers
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from grpo_math.errors import RewardError, UserError
from grpo_math.rewards.columns import Completion, Reward
from grpo_math.run.signals import Stopped
from grpo_math.run.user_functions import said_by

SLOW = 60.0  # seconds after which a warning names a reward function that is still running


def name_of(reward: Any) -> str:
    """Return the name of a reward function, which may be a partial function or a callable object.

    >>> import functools
    >>> name_of(functools.partial(name_of))
    'name_of'
    """
    function = reward if hasattr(reward, "__name__") else getattr(reward, "func", reward)
    return str(getattr(function, "__name__", type(reward).__name__))


def is_async(reward: Any) -> bool:
    """Return True if calls of the reward are awaited, by TRL's rule. An object with ``async __call__`` counts too.

    >>> async def later(completions, **columns): ...
    >>> is_async(later), is_async(name_of)
    (True, False)
    """
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


@dataclass
class RewardContext:
    """Shared by the reward functions of one rank: ``columns`` that the trainer adds to TRL's, how many calls were
    repeated in this rollout, and the error that ends the run."""

    columns: dict[str, Any] = field(default_factory=dict)
    retries: int = 0
    error: UserError | None = None


def checked(reward: Reward, context: RewardContext | None = None) -> Reward:
    """Wrap a reward function: if it fails, one clear `RewardError` names it, and no zero is invented.

    With ``context``, as in training, its columns are added, and a function that raises is called once more with the
    same arguments. The error of the second call is stored in the context instead of raised, because all ranks have to
    end together.

    >>> def broken(prompts, completions, **columns): return [float("nan")]
    >>> checked(broken)([""], [""])
    Traceback (most recent call last):
    ...
    grpo_math.errors.RewardError: reward function broken returned nan for row 0: return a finite number or None
    """
    function = cast("Callable[..., Any]", reward)

    async def later(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        call = _Call(name_of(reward), context)
        while call.tries:
            with call.attempt():
                call.values = await function(prompts=prompts, completions=completions, **{**columns, **call.columns})
        return call.rewards(len(completions))

    def now(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        call = _Call(name_of(reward), context)
        while call.tries:
            with call.attempt():
                call.values = function(prompts=prompts, completions=completions, **{**columns, **call.columns})
        return call.rewards(len(completions))

    guarded: Any = later if is_async(reward) else now
    guarded.__name__ = guarded.__qualname__ = name_of(reward)
    guarded.__doc__ = reward.__doc__
    return guarded


class _Call:
    """One call of a reward function. ``tries``: how often the function may still be called."""

    values: Any = None
    error: BaseException | None = None

    def __init__(self, name: str, context: RewardContext | None) -> None:
        self.name, self.context = name, context
        self.tries = 1 if context is None else 2
        self.columns = context.columns if context else {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Catch what the function raises, `sys.exit` included. Signals pass."""
        self.error = None
        try:
            with _watched(self.name):
                yield
            self.tries = 0
        except Stopped:
            raise
        except UserError as error:  # a second call would not help
            self.error, self.tries = error, 0
        except (Exception, SystemExit) as error:
            self.error, self.tries = error, self.tries - 1
            if self.context is not None and self.tries:
                self.context.retries += 1
                _warn(f"reward function {self.name} raised {said_by(error)} at {_line(error)}: it is called once more")

    def rewards(self, count: int) -> list[float | None]:
        """Return the values of the last attempt. An error is raised, or stored in training."""
        try:
            if isinstance(self.error, UserError):
                raise self.error
            if self.error is not None:
                twice = f" twice in a row at {_line(self.error)}" if self.context is not None else ""
                message = f"reward function {self.name} raised {said_by(self.error)}{twice}"
                raise RewardError(f"{message}: training stops instead of assuming a reward of 0") from self.error
            return _verified(self.name, self.values, count)
        except UserError as error:
            if self.context is None:
                raise
            self.context.error = self.context.error or error
            return [0.0] * count  # never used: this rank meets the others in the gather before all end


@contextmanager
def _watched(name: str) -> Iterator[None]:
    """Warn about a slow reward function. Restore torch's grad mode and default dtype if the function changed them,
    because they affect training."""
    slow = threading.Timer(SLOW, _warn, [f"reward function {name} has been running for {SLOW:g} seconds"])
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


def _verified(name: str, values: Any, count: int) -> list[float | None]:
    """Return one finite number or None for each completion; raise `RewardError` for anything else."""
    if isinstance(values, dict | set | str) or not hasattr(values, "__iter__"):
        raise _returned(name, type(values).__name__, "return a list with one number a completion")
    items = list(values)
    if len(items) != count:
        returned = f"{len(items)} rewards for {count} completions"
        raise _returned(name, returned, "return one number or None for each")
    return [None if item is None else _number(name, row, item) for row, item in enumerate(items)]


def _number(name: str, row: int, item: Any) -> float:
    number = item.item() if hasattr(item, "item") else item  # numpy's and torch's
    is_real = isinstance(number, numbers.Real)
    if is_real and abs(number) < 1e30:  # not NaN; the squares of larger ones are not finite in float32 sums
        return float(number)
    returned = number if is_real else f"a {type(number).__name__}"
    raise _returned(name, f"{returned} for row {row}", "return a finite number or None")


def _returned(name: str, returned: str, remedy: str) -> RewardError:
    return RewardError(f"reward function {name} returned {returned}: {remedy}")


def _warn(warning: str) -> None:
    from tqdm import tqdm

    tqdm.write(f"warning: {warning}", file=sys.stderr)


def _line(error: BaseException) -> str:
    """Return file:line of the last frame in the reward function's own file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, contextlib.__file__)]
    frame = next((f for f in reversed(frames) if f.filename == frames[0].filename), None)
    return f"{frame.filename}:{frame.lineno}" if frame else "its call"
