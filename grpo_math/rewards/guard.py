"""A reward function under guard: what it raises is said in one line, it gets a second try, its numbers are checked.

Does not decide how a run ends: the trainer does, on every rank alike.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_math.errors import RewardError, UserError
from grpo_math.rewards.columns import Completion, Reward
from grpo_math.run.redact import one_line


def _name(reward: Any) -> str:
    function = reward if hasattr(reward, "__name__") else getattr(reward, "func", reward)
    return str(getattr(function, "__name__", type(reward).__name__))


@dataclass
class Mishaps:
    """What befell this rank's reward functions in a rollout: calls that were made again, and what ends the run."""

    retries: int = 0
    error: UserError | None = None

    def again(self, name: str, error: Exception) -> None:
        from tqdm import tqdm

        self.retries += 1
        said = f"reward function {name} raised {_raised(error)} at {_place(error)}: it is called once more"
        tqdm.write(f"warning: {said}", file=sys.stderr)

    def ended(self, error: UserError, count: int) -> list[float | None]:
        """Numbers that nobody reads, so that this rank meets the others in the gather of rewards before all end."""
        self.error = self.error or error
        return [0.0] * count


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
    name = _name(reward)

    def verify(values: Any, count: int) -> list[float | None]:
        try:
            if isinstance(values, dict | set | str):
                raise TypeError
            items = list(values)
        except TypeError:
            raise RewardError(
                f"reward function {name} returned {type(values).__name__}: return a list with one number a completion"
            ) from None
        if len(items) != count:
            raise RewardError(
                f"reward function {name} returned {len(items)} rewards for {count} completions: "
                "return one number or None for each"
            )
        return [_finite(name, row, item) for row, item in enumerate(items)]

    def verified(values: Any, count: int) -> list[float | None]:
        try:
            return verify(values, count)
        except RewardError as error:
            return ended(error, count)

    def failed(error: Exception, count: int) -> list[float | None]:
        if isinstance(error, UserError):
            return ended(error, count)
        twice = "" if mishaps is None else f" twice in a row at {_place(error)}"
        said = f"reward function {name} raised {_raised(error)}{twice}"
        ending = RewardError(f"{said}: training stops, since a zero here would be invented")
        ending.__cause__ = error
        return ended(ending, count)

    def ended(error: UserError, count: int) -> list[float | None]:
        if mishaps is None:
            raise error
        return mishaps.ended(error, count)

    def again(error: Exception) -> bool:
        if mishaps is None or isinstance(error, UserError):
            return False
        mishaps.again(name, error)
        return True

    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def later(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
            last = False
            while True:
                own, log = _own({"prompts": prompts, "completions": completions, **columns})
                try:
                    values = await reward(**own)
                except Exception as error:
                    if last or not again(error):
                        return failed(error, len(completions))
                    last = True
                else:
                    log()
                    return verified(values, len(completions))

        later.__name__ = name
        return later  # type: ignore

    def now(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> Any:
        last = False
        while True:
            own, log = _own({"prompts": prompts, "completions": completions, **columns})
            try:
                values = reward(**own)
            except Exception as error:
                if last or not again(error):
                    return failed(error, len(completions))
                last = True
            else:
                log()
                return verified(values, len(completions))

    now.__name__ = now.__qualname__ = name
    now.__doc__ = reward.__doc__
    return now


def _own(arguments: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """Arguments for one call, which a call that raises leaves as they were, and what hands on all that it logged."""
    own = {name: [*value] if isinstance(value, list) else value for name, value in arguments.items()}
    logged: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def held(log: Any) -> Any:
        return lambda *said, **named: logged.append((log, said, named))

    own.update({name: held(own[name]) for name in ("log_extra", "log_metric") if name in own})

    def log() -> None:
        for call, said, named in logged:
            call(*said, **named)

    return own, log


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _place(error: Exception) -> str:
    """file:line of what raised, where possible in the file of the reward function itself."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    place = next((f for f in reversed(frames) if frames and f.filename == frames[0].filename), None)
    return f"{place.filename}:{place.lineno}" if place else "its call"


def _finite(name: str, row: int, item: Any) -> float | None:
    if item is None:
        return None
    if hasattr(item, "item") and not isinstance(item, numbers.Number):
        item = item.item()
    if not isinstance(item, numbers.Real):
        raise RewardError(
            f"reward function {name} returned a {type(item).__name__} for row {row}: return a finite number or None"
        )
    if not abs(float(item)) < 1e30:  # also NaN; squares of larger ones are not finite in float32 sums
        raise RewardError(f"reward function {name} returned {item} for row {row}: return a finite number or None")
    return float(item)
