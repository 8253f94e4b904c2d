"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing give way to fresh prompts.

A group whose completions are all right or all wrong has no contrast in correctness. It is judged by verdict: a shaped
sum of rewards can differ within such a group, and would make it look as if there were something to learn.

Does not generate: the trainer hands in TRL's method that does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accelerate.utils import gather_object

from grpo_math.errors import ConfigError, UserError
from grpo_math.grading import Verdict
from grpo_math.rewards.columns import GOLD_COLUMNS, GOLDS
from grpo_math.run import metrics
from grpo_math.trainer.rows import Rows, join, of_all_ranks, scored, select


class Scored(NamedTuple):
    """Completions of all ranks, group by group: an entry of each for every completion."""

    rows: Rows  # with ``rewards_per_func`` (B, F) among TRL's tensors
    right: list[bool | None]  # None: could not be graded
    columns: list[list[Any]]  # of the table of completions

    def picked(self, more: Scored, index: list[int]) -> Scored:
        """The completions of these numbers, of the two one after the other."""
        columns = [[(old + new)[i] for i in index] for old, new in zip(self.columns, more.columns, strict=True)]
        rows = select(join([self.rows, more.rows]), index)
        return Scored(rows, [(self.right + more.right)[i] for i in index], columns)


def uniform_groups(right: Sequence[bool | None], size: int) -> list[int]:
    """The numbers of the groups of ``size`` completions that are not both right and wrong; None could not be graded.

    >>> uniform_groups([True, False, True, True, False, None], size=2)
    [1, 2]
    """
    groups = [right[start : start + size] for start in range(0, len(right), size)]
    return [number for number, group in enumerate(groups) if not (True in group and False in group)]


def replacing(right: Sequence[bool | None], fresh: Sequence[bool | None], size: int) -> list[int]:
    """Which of the completions ``right + fresh`` to go on with: groups of ``fresh`` in the place of uniform ones.

    >>> replacing([True, True, True, False], [False, False, False, True], size=2)
    [6, 7, 2, 3]
    """
    index = list(range(len(right)))
    uniform = set(uniform_groups(fresh, size))
    good = [number for number in range(len(fresh) // size) if number not in uniform]
    for old, new in zip(uniform_groups(right, size), good, strict=False):
        start = len(right) + new * size
        index[old * size : (old + 1) * size] = range(start, start + size)
    return index


class PromptPool:
    """The problems in an order of their own, without end: reshuffled after each pass. Its position is one number.

    >>> pool = PromptPool([{"prompt": name} for name in "abc"], seed=0)
    >>> first = pool.take(2, avoid=[])
    >>> sorted(row["prompt"] for row in first + pool.take(1, avoid=[]))
    ['a', 'b', 'c']
    >>> pool.position = 0
    >>> pool.take(2, avoid=[]) == first
    True
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed, self.position = rows, seed, 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, n: int, avoid: Sequence[Any]) -> list[dict[str, Any]]:
        """The next ``n`` rows. Prompts in ``avoid`` are passed over, unless a whole pass has nothing else."""
        taken: list[dict[str, Any]] = []
        passed = 0
        while len(taken) < n:
            row = self._next()
            if row["prompt"] in avoid and passed < len(self.rows):
                passed += 1
            else:
                taken.append(row)
        return taken

    def _next(self) -> dict[str, Any]:
        epoch, index = divmod(self.position, len(self.rows))
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        self.position += 1
        return self.rows[self._order[1][index]]


class Resampler:
    """Draws until no group is uniform, for ``rounds`` at most. Its `PromptPool` is kept in checkpoints."""

    def __init__(self, problems: Any, seed: int, rounds: int) -> None:
        columns = getattr(problems, "column_names", None) or ()
        if not set(GOLD_COLUMNS) & set(columns) or not hasattr(problems, "__len__"):
            reason = f"needs a train_dataset of known length with a column {GOLDS}: groups are judged by verdict"
            raise ConfigError("resample_groups", rounds, reason, "leave it at 0")
        self.pool, self.rounds = PromptPool(problems, seed), rounds

    def __call__(
        self, trainer: Any, output: Rows, inputs: list[dict[str, Any]], generate: Callable[[Any], Rows]
    ) -> Rows:
        """Return the rows of this rank to train on. ``generate`` samples and grades a completion of each given row.

        What is logged of rewards, verdicts and lengths stays that of the first draw: what replaces it was chosen.
        """
        group, n, ranks = trainer._group, len(inputs), trainer.accelerator.num_processes
        rank, logs = trainer.accelerator.process_index, trainer._logs
        seen, kept = gather_object([row["prompt"] for row in inputs]), _last_sampled(trainer, output)
        groups = drawn = len(kept.right) // group
        # Ranks sample equally many rows: this many groups, or a multiple, can be shared equally among them.
        equal_groups = ranks // math.gcd(ranks, group)
        for _ in range(self.rounds):
            uniform = uniform_groups(kept.right, group)
            if not uniform:
                break
            fresh = self.pool.take(math.ceil(len(uniform) / equal_groups) * equal_groups, avoid=seen)
            seen += [row["prompt"] for row in fresh]
            drawn += len(fresh)
            rows = [dict(row) for row in fresh for _ in range(group)]
            share = len(rows) // ranks
            with trainer.meter.only_seconds():
                more = _last_sampled(trainer, generate(rows[rank * share : (rank + 1) * share]))
            kept = kept.picked(more, replacing(kept.right, more.right, group))
        if trainer.ahead is not None:
            trainer.ahead.send(drawn=True)
        left = len(uniform_groups(kept.right, group))
        counts = {metrics.PROMPTS_DRAWN: drawn, metrics.PROMPTS_KEPT: groups - left}
        trainer._log({**counts, metrics.PROMPTS_THROWN_AWAY: drawn - groups})
        # TRL's table has a row for each completion that was sampled last: put back those that are trained on.
        for column, values in zip(_columns(logs), kept.columns, strict=True):
            column.clear()
            column.extend(values)
        trainer._rewards_per_func = kept.rows.pop("rewards_per_func")
        # The rows have changed, and with them the number that TRL's dapo loss divides by.
        kept.rows["num_items_in_batch"] = scored(kept.rows).sum()
        return select(kept.rows, range(rank * n, (rank + 1) * n))


def _last_sampled(trainer: Any, output: Rows) -> Scored:
    """The completions of all ranks that were sampled last, with what the trainer keeps of them beside ``output``."""
    if trainer._grades is None:
        raise UserError(f"resample_groups: no row of a step has a gold ({GOLDS}), so its completions have no verdict")
    right = gather_object([None if g.verdict.ungradable else g.verdict == Verdict.CORRECT for g in trainer._grades])
    rows = {**of_all_ranks(output, trainer.accelerator), "rewards_per_func": trainer._rewards_per_func}
    return Scored(rows, right, [list(column)[-len(right) :] for column in _columns(trainer._logs)])


def _columns(logs: Any) -> list[Any]:
    """The columns of TRL's table of completions, each with an entry for every row of a rollout."""
    return [logs["prompt"], logs["completion"], logs["advantages"], *logs["rewards"].values(), *logs["extra"].values()]
