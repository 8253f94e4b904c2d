"""A reward function under guard: what it raises is said in one line, it gets a second try, its numbers are checked.

Does not decide how a run ends: the trainer does, on every rank alike.
"""

import functools
import inspect
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from grpo_math.errors import RewardError, UserError
from grpo_math.rewards.columns import Completion, Reward
from grpo_math.run.own import said_by


def name_of(reward: Any) -> str:
    """The name of a reward function, also of a partial one or of an object that can be called.

    >>> name_of(functools.partial(name_of))
    'name_of'
    """
    function = reward if hasattr(reward, "__name__") else getattr(reward, "func", reward)
    return str(getattr(function, "__name__", type(reward).__name__))


@dataclass
class Mishaps:
    """What befell this rank's reward functions in a rollout: calls that were made again, and what ends the run."""

    retries: int = 0
    error: UserError | None = None


def checked(reward: Reward, mishaps: Mishaps | None = None) -> Reward:
    """The same reward, whose failures are one clear `RewardError` that names it: never an invented zero.

    With ``mishaps``, as in training, a function that raises is called once more with the same arguments, and what would
    be raised then is noted there.

    >>> def broken(prompts, completions, **columns): return [float("nan")]
    >>> checked(broken)([""], [""])
    Traceback (most recent call last):
    ...
    grpo_math.errors.RewardError: reward function broken returned nan for row 0: return a finite number or None
    """
    guard, call = Guard(reward, mishaps), cast("Callable[..., Any]", reward)

    async def later(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        for attempt in guard.attempts({"prompts": prompts, "completions": completions, **columns}):
            with attempt:
                attempt.values = await call(**attempt.arguments)
        return guard.rewards(attempt, len(completions))

    def now(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        for attempt in guard.attempts({"prompts": prompts, "completions": completions, **columns}):
            with attempt:
                attempt.values = call(**attempt.arguments)
        return guard.rewards(attempt, len(completions))

    guarded: Any = later if inspect.iscoroutinefunction(reward) else now
    guarded.__name__ = guarded.__qualname__ = guard.name
    guarded.__doc__ = reward.__doc__
    return guarded


class Attempt:
    """One call with arguments of its own: one that raises leaves no trace in them, nor in what is logged."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.values: Any = None
        self.error: Exception | None = None
        self.logged: list[Callable[[], None]] = []
        self.arguments = {name: [*value] if isinstance(value, list) else value for name, value in arguments.items()}
        for name in ("log_extra", "log_metric"):
            if name in arguments:
                self.arguments[name] = functools.partial(self._hold, arguments[name])

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None

    def _hold(self, log: Callable[..., None], *said: Any, **named: Any) -> None:
        self.logged.append(functools.partial(log, *said, **named))


class Guard:
    """What `checked` knows of one reward function: how often it is called, and what its values have to be."""

    def __init__(self, reward: Reward, mishaps: Mishaps | None) -> None:
        self.name, self.mishaps = name_of(reward), mishaps

    def attempts(self, arguments: dict[str, Any]) -> Iterator[Attempt]:
        """One attempt, and in training a second where the first one failed."""
        first = Attempt(arguments)
        yield first
        if first.error is not None and self.mishaps is not None and not isinstance(first.error, UserError):
            from tqdm import tqdm

            self.mishaps.retries += 1
            said = f"reward function {self.name} raised {said_by(first.error)} at {_place(first.error)}"
            tqdm.write(f"warning: {said}: it is called once more", file=sys.stderr)
            yield Attempt(arguments)

    def rewards(self, attempt: Attempt, count: int) -> list[float | None]:
        """The values of the last attempt; what is wrong with them is raised, or in training noted."""
        try:
            if isinstance(attempt.error, UserError):
                raise attempt.error
            if attempt.error is not None:
                twice = f" twice in a row at {_place(attempt.error)}" if self.mishaps is not None else ""
                said = f"reward function {self.name} raised {said_by(attempt.error)}{twice}"
                raise RewardError(f"{said}: training stops, since a zero here would be invented") from attempt.error
            for log in attempt.logged:
                log()
            return self.verify(attempt.values, count)
        except UserError as error:
            if self.mishaps is None:
                raise
            self.mishaps.error = self.mishaps.error or error
            return [0.0] * count  # that nobody reads: this rank meets the others in the gather before all end

    def verify(self, values: Any, count: int) -> list[float | None]:
        """The values as one finite number or None for each completion; `RewardError` for anything else."""
        try:
            if isinstance(values, dict | set | str):
                raise TypeError
            items = list(values)
        except TypeError:
            raise self._returned(type(values).__name__, "return a list with one number a completion") from None
        if len(items) != count:
            what = f"{len(items)} rewards for {count} completions"
            raise self._returned(what, "return one number or None for each")
        return [self._finite(row, item) for row, item in enumerate(items)]

    def _finite(self, row: int, item: Any) -> float | None:
        if item is None:
            return None
        if hasattr(item, "item") and not isinstance(item, numbers.Number):
            item = item.item()
        is_real = isinstance(item, numbers.Real)
        if is_real and abs(float(item)) < 1e30:  # not NaN; squares of larger ones are not finite in float32 sums
            return float(item)
        what = item if is_real else f"a {type(item).__name__}"
        raise self._returned(f"{what} for row {row}", "return a finite number or None")

    def _returned(self, what: str, remedy: str) -> RewardError:
        return RewardError(f"reward function {self.name} returned {what}: {remedy}")


def _place(error: Exception) -> str:
    """file:line of what raised, where possible in the file of the reward function itself."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    place = next((f for f in reversed(frames) if frames and f.filename == frames[0].filename), None)
    return f"{place.filename}:{place.lineno}" if place else "its call"
