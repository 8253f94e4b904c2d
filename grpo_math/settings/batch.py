"""The arithmetic of a batch: rows per process at a time, and accumulation steps, before an optimizer step.

    prompts x completions of each = rows of a step = processes x rows at a time x accumulation steps

TRL takes the right-hand side, and the user has to compute the left. grpo_math accepts either side. A batch that does
not divide evenly is refused before TRL refuses it; the error gives the nearest valid value.

The caller gives a limit of the rows that fit into memory. fields.py checks types and ranges.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.settings.run_settings import RunSettings


class Batch(NamedTuple):
    """The size of a batch. An optimizer step has ``processes`` x ``rows`` x ``steps`` completions.

    ``rollout`` completions are generated at a time.

    >>> print(Batch(generations=8, processes=2, rows=4, steps=16, rollout=128).line("GPU"))
    16 prompts x 8 completions = 128 = 2 GPUs x 4 rows x 16 steps
    >>> print(Batch(generations=8, processes=1, rows=64, steps=1, rollout=128).line("CPU process"))
    8 prompts x 8 completions = 64 = 1 CPU process x 64 rows x 1 step; 128 completions are generated at a time
    """

    generations: int
    processes: int
    rows: int
    steps: int
    rollout: int

    @property
    def total(self) -> int:
        return self.processes * self.rows * self.steps

    def refuse_few(self, problems: int, name: str, value: object) -> None:
        """Raise `ConfigError` if the problems do not fill a rollout: TRL would drop them, and train for no step."""
        needed = self.rollout // self.generations
        if problems < needed:
            reason = f"leaves {_counted(problems, 'problem')}, and a step takes {needed}"
            raise ConfigError(
                name, value, reason, f"train on more problems, or add --prompts_per_step {max(problems, 1)}"
            )

    def line(self, device: str) -> str:
        """Return the arithmetic as one line. ``device`` is the noun for a process, in the singular."""
        right = " x ".join((_counted(self.processes, device), _counted(self.rows, "row"), _counted(self.steps, "step")))
        left = f"{_counted(self.total / self.generations, 'prompt')} x {self.generations} completions"
        at_a_time = "" if self.rollout == self.total else f"; {self.rollout} completions are generated at a time"
        return f"{left} = {self.total} = {right}{at_a_time}"


def solve(
    prompts: int, generations: int, processes: int, rows_limit: int | None, steps: int | None = None
) -> tuple[int, int]:
    """Return (per_device_train_batch_size, gradient_accumulation_steps) for a step of ``prompts`` x ``generations``.

    Takes the largest number of rows that divides evenly and is at most ``rows_limit``, or the given accumulation
    ``steps``.

    >>> solve(16, 8, processes=2, rows_limit=4)
    (4, 16)
    >>> solve(6, 8, processes=1, rows_limit=10)  # 10 rows do not divide evenly, 8 do
    (8, 6)
    >>> solve(3, 5, processes=2, rows_limit=8)
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: prompts_per_step=3 x 5 completions = 15 rows, which 2 processes cannot share evenly: \
use 4, or start 1, 3, 5 or 15 processes
    """
    total = prompts * generations
    if total % processes:
        # The fewest prompts whose completions the processes can share evenly.
        unit = processes // math.gcd(processes, generations)
        reason = f"x {generations} completions = {total} rows, which {processes} processes cannot share evenly"
        remedy = f"use {nearest(prompts, unit)}, or start {alternatives(divisors(total))} processes"
        raise ConfigError("prompts_per_step", prompts, reason, remedy)
    share = total // processes
    limit = share if rows_limit is None else rows_limit
    choices = [count for count in divisors(share) if share // count <= limit]
    if steps is None:
        steps = choices[0]
    elif steps not in choices:
        parts = f"{_counted(processes, 'process')} x at most {_counted(limit, 'row')}"
        reason = f"cannot make {prompts} prompts x {generations} completions = {total} out of {parts}"
        remedy = f"use {min(choices, key=lambda count: abs(count - steps))}, or leave it out"
        raise ConfigError("gradient_accumulation_steps", steps, reason, remedy)
    return share // steps, steps


def resolve_batch(settings: RunSettings, processes: int) -> Batch:
    """Return the batch that TRL's fields and ``prompts_per_step`` define. Raises `ConfigError` if they contradict.

    With ``prompts_per_step``, an explicit ``per_device_train_batch_size`` is a limit, and explicit
    ``gradient_accumulation_steps`` have to fit.

    >>> resolve_batch(RunSettings({"prompts_per_step": 16, "per_device_train_batch_size": 4}), processes=2)
    Batch(generations=8, processes=2, rows=4, steps=16, rollout=128)
    >>> resolve_batch(RunSettings({"per_device_train_batch_size": 4}), processes=2).line("GPU")
    '1 prompt x 8 completions = 8 = 2 GPUs x 4 rows x 1 step'
    """
    explicit = settings.explicit
    prompts, generations = settings.prompts_per_step, settings.num_generations
    rows, steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if prompts:
        fixed_steps = steps if "gradient_accumulation_steps" in explicit else None
        # If only the steps are set, the rows follow from them: a default is not a limit.
        limit = rows if fixed_steps is None or "per_device_train_batch_size" in explicit else None
        rows, steps = solve(prompts, generations, processes, limit, fixed_steps)
    batch = Batch(generations, processes, rows, steps, processes * rows * steps)
    rollout, per_rollout = settings.generation_batch_size, settings.steps_per_generation
    if rollout is not None and per_rollout is not None:
        reason = f"and steps_per_generation={per_rollout} say the same twice"
        raise ConfigError("generation_batch_size", rollout, reason, "give one")
    # TRL generates a rollout at a time, and splits it into micro-batches: both have to consist of whole groups.
    if rollout is not None:
        unit = batch.total if prompts else math.lcm(processes * rows, generations)
        if rollout % unit:
            whole = "steps" if prompts else f"micro-batches of {processes} x {rows} and groups of {generations}"
            why = f"is not a whole number of {whole}"
            raise ConfigError("generation_batch_size", rollout, why, f"use {nearest(rollout, unit)}")
        return batch._replace(rollout=rollout)
    if per_rollout is not None:
        if prompts and per_rollout % steps and steps % per_rollout:
            why = f"is not a whole number of optimizer steps of {_counted(steps, 'micro-batch')}"
            raise ConfigError("steps_per_generation", per_rollout, why, f"use {nearest(per_rollout, steps)}")
        batch = batch._replace(rollout=processes * rows * per_rollout)
    if batch.rollout % generations:
        name = "gradient_accumulation_steps" if per_rollout is None else "steps_per_generation"
        times = steps if per_rollout is None else per_rollout
        made = f"x {_counted(processes, 'process')} x {name}={times} = {batch.rollout} completions"
        reason = f"{made}, which is not a whole number of groups of {generations}"
        fewer = nearest(rows, generations // math.gcd(generations, processes * times))
        remedy = f"use {fewer}, or {name}={nearest(times, generations // math.gcd(generations, processes * rows))}"
        raise ConfigError("per_device_train_batch_size", rows, reason, remedy)
    return batch


def divides(settings: RunSettings, processes: int) -> bool:
    """Return True if the batch can be divided evenly by a number of processes."""
    with suppress(ConfigError):
        return resolve_batch(settings, processes).processes > 0
    return False


def batch_from(settings: Mapping[str, Any], processes: int) -> Batch:
    """Return the batch of settings that TRL has completed, such as those in config.yaml.

    >>> settings = {"num_generations": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    >>> batch_from({**settings, "generation_batch_size": 32}, processes=2)
    Batch(generations=8, processes=2, rows=4, steps=2, rollout=32)
    """
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size")
    return Batch(settings["num_generations"], processes, *(settings[name] for name in names))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]


def alternatives(numbers: Sequence[int]) -> str:
    """Return numbers as a list in words.

    >>> alternatives([1, 2, 4]), alternatives([2])
    ('1, 2 or 4', '2')
    """
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def nearest(value: int, unit: int) -> int:
    """Return the positive multiple of ``unit`` nearest to ``value``. If two are equally near, return the larger.

    >>> nearest(5, 4), nearest(6, 4), nearest(1, 4)
    (4, 8, 4)
    """
    return max(1, (2 * value + unit) // (2 * unit)) * unit


def _counted(n: float, noun: str) -> str:
    ending = "" if n == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{n:g} {noun}{ending}"
