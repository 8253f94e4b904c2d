"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): fresh prompts replace uniform-verdict groups.

The completions of a uniform-verdict group are all correct or all wrong. Rewards do not decide: a sum of shaped rewards
can differ within such a group, although no completion is more correct than another.

The trainer passes the function that generates.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_math.algorithm.rollout import Columns, Rollout
from grpo_math.algorithm.rows import Rows, gather_rows, join, loss_mask, select
from grpo_math.errors import ConfigError, RewardError
from grpo_math.grading import Verdict
from grpo_math.rewards.inputs import GOLD_COLUMNS, GOLDS, column_names
from grpo_math.run import metrics
from grpo_math.run.stateful import Stateful
from grpo_math.system.collectives import Ranks


def uniform_groups(correct: Sequence[bool | None], size: int) -> list[int]:
    """Return the numbers of the groups of ``size`` completions without a correct or without a wrong one.

    None is a completion that could not be graded, and counts as neither.

    >>> uniform_groups([True, False, True, True, False, None], size=2)
    [1, 2]
    """
    groups = [correct[start : start + size] for start in range(0, len(correct), size)]
    return [number for number, group in enumerate(groups) if not (True in group and False in group)]


def replacement_index(correct: Sequence[bool | None], fresh: Sequence[bool | None], size: int) -> list[int]:
    """Return which of the completions ``correct + fresh`` to train on: mixed groups of ``fresh`` replace uniform ones.

    >>> uniform, mixed = [True, True], [True, False]
    >>> replacement_index(uniform + mixed + uniform, uniform + mixed, size=2)
    [8, 9, 2, 3, 4, 5]
    >>> replacement_index(uniform, mixed + mixed, size=2), replacement_index(mixed, mixed, size=2)
    ([2, 3], [0, 1])
    """
    index = list(range(len(correct)))
    uniform = set(uniform_groups(fresh, size))
    good = [number for number in range(len(fresh) // size) if number not in uniform]
    for old, new in zip(uniform_groups(correct, size), good, strict=False):
        start = len(correct) + new * size
        index[old * size : (old + 1) * size] = range(start, start + size)
    return index


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, passed: int) -> list[int]:
    """Return n rows in the order of a pass, from 0."""
    # A text as seed gives the same order in every process. Python's `hash` of a text would not.
    return random.Random(f"{seed}/{passed}").sample(range(n), n)


def refuse_ungraded(data: Any, resample_groups: int) -> None:
    """Raise `ConfigError` for data without gold answers, or of unknown length."""
    # Without known columns, the first rollout shows if there are verdicts.
    columns = GOLD_COLUMNS if (names := column_names(data)) is None else names
    if not set(GOLD_COLUMNS) & set(columns) or not hasattr(data, "__len__"):
        raise ConfigError(
            "resample_groups",
            resample_groups,
            f"needs a train_dataset of known length with a column {GOLDS}: problems are judged by verdict",
            "leave it at 0",
        )


class Resampler(Stateful):
    """Samples fresh groups of ``group_size`` until no group is uniform, for ``resample_groups`` rounds at most.

    ``rows``: the problems, an endless stream in a new order in each pass. The position in it is the whole state.

    >>> rows = [{"prompt": name, "answer": "7"} for name in "abcdefghij"]
    >>> resampler = Resampler(1, rows[:3], seed=0, group_size=4, ranks=None)
    >>> first = resampler.draw(2)
    >>> sorted(first + resampler.draw(1))
    [0, 1, 2]
    >>> resampler.position = 0
    >>> resampler.draw(2) == first
    True
    >>> Resampler(1, rows[:3], 1, 4, None).draw(1, avoid="ab")
    [2]
    >>> resampler = Resampler(1, rows[:1], 0, 4, None)
    >>> resampler.draw(3, avoid="a"), resampler.position
    ([0, 0, 0], 5)
    >>> passes = Resampler(1, rows, 0, 4, None).draw(20)
    >>> passes[:10] != passes[10:]
    True
    """

    SAVED = ("position",)

    def __init__(self, resample_groups: int, rows: Any, seed: int, group_size: int, ranks: Ranks) -> None:
        refuse_ungraded(rows, resample_groups)
        self.rounds = resample_groups
        self.rows = rows
        self.seed = seed
        self.size = group_size
        self.ranks = ranks
        self.position = 0

    def draw(self, n: int, avoid: Sequence[Any] = ()) -> list[int]:
        """Return the next ``n`` rows. Prompts in ``avoid`` are skipped, unless two passes have nothing else."""
        taken: list[int] = []
        size = len(self.rows)
        skipped = 0
        while len(taken) < n:
            passed, index = divmod(self.position, size)
            self.position += 1
            row = shuffled(size, self.seed, passed)[index]
            if avoid and self.rows[row]["prompt"] in avoid and skipped < 2 * size:
                skipped += 1
            else:
                taken.append(row)
        return taken

    def gather_replaced(
        self, first: Rollout, inputs: list[dict[str, Any]], sample: Callable[[list[dict[str, Any]], int], Rollout]
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to train on, and the metrics of the resampling. All ranks call this.

        ``first`` is the rollout of this rank's ``inputs``. ``sample`` samples and grades a completion of each row; its
        second argument is the number of the first group.
        Metrics of rewards, verdicts and lengths stay those of ``first``, because the replacements were selected.
        """
        n_ranks, rank, n = self.ranks.num_processes, self.ranks.process_index, len(inputs)
        seen = gather_object([row["prompt"] for row in inputs])
        kept, correct, columns = self._gather_completions(first)
        rewards = first.rewards
        groups = drawn = len(correct) // self.size
        # All ranks sample the same number of rows, so the number of groups must be a multiple of this.
        equal_groups = n_ranks // math.gcd(n_ranks, self.size)
        for _ in range(self.rounds):
            uniform = uniform_groups(correct, self.size)
            if not uniform:
                break
            # Each rank has the same pool at the same position, so all ranks draw the same prompts.
            fresh = self.draw(math.ceil(len(uniform) / equal_groups) * equal_groups, seen)
            seen += [self.rows[row]["prompt"] for row in fresh]
            # A copy for every completion of a group.
            rows = [dict(self.rows[row]) for row in fresh for _ in range(self.size)]
            share = len(rows) // n_ranks
            rollout = sample(rows[rank * share : (rank + 1) * share], drawn)
            fresh_rows, fresh_correct, fresh_columns = self._gather_completions(rollout)
            drawn += len(fresh)
            index = replacement_index(correct, fresh_correct, self.size)
            kept, correct = select(join([kept, fresh_rows]), index), [(correct + fresh_correct)[i] for i in index]
            rewards = torch.cat([rewards, rollout.rewards])[index]
            missing = [None] * len(correct), [None] * len(fresh_correct)
            columns = {
                name: [(columns.get(name, missing[0]) + fresh_columns.get(name, missing[1]))[i] for i in index]
                for name in {**columns, **fresh_columns}
            }
        # The rows have changed, and with them the number that TRL's dapo loss divides by.
        kept["num_items_in_batch"] = loss_mask(kept).sum()
        counts: dict[str, float] = {
            metrics.PROMPTS_DRAWN: drawn,
            metrics.PROMPTS_RETAINED: groups - len(uniform_groups(correct, self.size)),
            metrics.PROMPTS_DISCARDED: drawn - groups,
        }
        tensors = select(kept, range(rank * n, (rank + 1) * n))
        advantages = torch.tensor(columns["", "advantages"], dtype=torch.float32)
        return Rollout(tensors, rewards, advantages, None, columns, first.metrics), counts

    def _gather_completions(self, rollout: Rollout) -> tuple[Rows, list[bool | None], Columns]:
        """Return the completions of all ranks, group after group: rows, whether each is correct (None: not graded), and
        the columns of the table of completions that have an entry for each."""
        if rollout.verdicts is None:
            raise RewardError(
                f"resample_groups: no row of a step has a gold answer ({GOLDS}), so its completions have no verdict"
            )
        correct = [None if verdict.ungradable else verdict == Verdict.CORRECT for verdict in rollout.verdicts]
        rows = gather_rows(rollout.tensors, self.ranks)
        # A script may log too few values, and two reward functions of one name have one column.
        columns = {
            key: values[-len(correct) :] for key, values in rollout.columns.items() if len(values) >= len(correct)
        }
        return rows, correct, columns
