"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): fresh prompts replace uniform-verdict groups.

The completions of a uniform-verdict group are all correct or all wrong. Rewards do not decide: a sum of shaped rewards
can differ within such a group, although no completion is more correct than another.

Does not generate: the trainer passes a function that does.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from accelerate.utils import gather_object

from grpo_math.algorithm.rows import Rollout, Rows, gather_rows, join, scored, select
from grpo_math.errors import ConfigError, UserError
from grpo_math.grading import Verdict
from grpo_math.rewards.columns import GOLD_COLUMNS, GOLDS, column_names
from grpo_math.run import metrics


def uniform_groups(right: Sequence[bool | None], size: int) -> list[int]:
    """Return the numbers of the groups of ``size`` completions without a correct or without a wrong one.

    None is a completion that could not be graded, and counts as neither.

    >>> uniform_groups([True, False, True, True, False, None], size=2)
    [1, 2]
    """
    groups = [right[start : start + size] for start in range(0, len(right), size)]
    return [number for number, group in enumerate(groups) if not (True in group and False in group)]


def replacing(right: Sequence[bool | None], fresh: Sequence[bool | None], size: int) -> list[int]:
    """Return which of the completions ``right + fresh`` to train on: mixed groups of ``fresh`` replace uniform ones.

    >>> uniform, mixed = [True, True], [True, False]
    >>> replacing(uniform + mixed + uniform, uniform + mixed, size=2)
    [8, 9, 2, 3, 4, 5]
    >>> replacing(uniform, mixed + mixed, size=2), replacing(mixed, mixed, size=2)
    ([2, 3], [0, 1])
    """
    index = list(range(len(right)))
    uniform = set(uniform_groups(fresh, size))
    good = [number for number in range(len(fresh) // size) if number not in uniform]
    for old, new in zip(uniform_groups(right, size), good, strict=False):
        start = len(right) + new * size
        index[old * size : (old + 1) * size] = range(start, start + size)
    return index


class PromptPool:
    """An endless shuffled stream of the problems, reshuffled after each pass. The position is the whole state.

    >>> rows = [{"prompt": name} for name in "abc"]
    >>> pool = PromptPool(rows, seed=0)
    >>> first = pool.take(2, avoid=[])
    >>> sorted(row["prompt"] for row in first + pool.take(1, avoid=[]))
    ['a', 'b', 'c']
    >>> pool.position = 0
    >>> pool.take(2, avoid=[]) == first
    True
    >>> PromptPool(rows, seed=1).take(1, avoid="ab"), PromptPool(rows[:1], seed=0).take(3, avoid="a")
    ([{'prompt': 'c'}], [{'prompt': 'a'}, {'prompt': 'a'}, {'prompt': 'a'}])
    >>> passes = PromptPool([{"prompt": number} for number in range(10)], seed=0).take(20, avoid=[])
    >>> passes[:10] != passes[10:]
    True
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self.position = 0

    def take(self, n: int, avoid: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the next ``n`` rows. Prompts in ``avoid`` are skipped, unless a whole pass has nothing else."""
        taken: list[dict[str, Any]] = []
        passed = 0
        while len(taken) < n:
            epoch, index = divmod(self.position, len(self.rows))
            self.position += 1
            row = self.rows[_shuffled(len(self.rows), f"{self.seed}/{epoch}")[index]]
            if row["prompt"] in avoid and passed < len(self.rows):
                passed += 1
            else:
                taken.append(row)
        return taken


@lru_cache(maxsize=1)
def _shuffled(n: int, seed: str) -> list[int]:
    # A text as seed gives the same order in every process. Python's `hash` of a text would not.
    return random.Random(seed).sample(range(n), n)


class Resampler:
    """Samples fresh groups of ``group_size`` until no group is uniform, for ``resample_groups`` rounds at most.

    ``data``: the problems to draw from. ``table``: TRL's table of completions.
    """

    def __init__(
        self, resample_groups: int, data: Any, seed: int, group_size: int, table: Mapping[str, Any], accelerator: Any
    ) -> None:
        self.rounds = resample_groups
        self.size = group_size
        self.table = table
        self.accelerator = accelerator
        # Without known columns, the first rollout shows if there are verdicts.
        columns = GOLD_COLUMNS if (names := column_names(data)) is None else names
        if not set(GOLD_COLUMNS) & set(columns) or not hasattr(data, "__len__"):
            reason = f"needs a train_dataset of known length with a column {GOLDS}: groups are judged by verdict"
            raise ConfigError("resample_groups", self.rounds, reason, "leave it at 0")
        self.pool = PromptPool(data, seed)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.pool.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.pool.position = state["position"]

    def gather_replaced(
        self, first: Rollout, inputs: list[dict[str, Any]], sample: Callable[[Any], Rollout]
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to train on, and the metrics of the resampling. All ranks call this.

        ``first`` is the rollout of this rank's ``inputs``; ``sample`` samples and grades a completion of each row.
        Metrics of rewards, verdicts and lengths stay those of ``first``, because the replacements were selected.
        """
        ranks, rank, n = self.accelerator.num_processes, self.accelerator.process_index, len(inputs)
        seen = gather_object([row["prompt"] for row in inputs])
        kept, right, columns = self._gather_completions(first)
        groups = drawn = len(right) // self.size
        # Ranks sample equally many rows: this many groups, or a multiple, can be shared equally among them.
        equal_groups = ranks // math.gcd(ranks, self.size)
        for _ in range(self.rounds):
            uniform = uniform_groups(right, self.size)
            if not uniform:
                break
            # Each rank has the same pool at the same position, so all ranks draw the same prompts.
            fresh = self.pool.take(math.ceil(len(uniform) / equal_groups) * equal_groups, avoid=seen)
            seen += [row["prompt"] for row in fresh]
            drawn += len(fresh)
            rows = [dict(row) for row in fresh for _ in range(self.size)]
            share = len(rows) // ranks
            more, more_right, more_columns = self._gather_completions(sample(rows[rank * share : (rank + 1) * share]))
            index = replacing(right, more_right, self.size)
            kept, right = select(join([kept, more]), index), [(right + more_right)[i] for i in index]
            columns = [[(old + new)[i] for i in index] for old, new in zip(columns, more_columns, strict=True)]
        # The table has a row for each completion that was sampled last, and only the kept ones are trained on. A column
        # has room for one rollout, so these rows replace all others.
        for column, values in zip(_columns(self.table), columns, strict=True):
            column.extend(values)
        rewards = kept.pop("rewards_per_func")
        # The rows have changed, and with them the number that TRL's dapo loss divides by.
        kept["num_items_in_batch"] = scored(kept).sum()
        left = len(uniform_groups(right, self.size))
        counts = {metrics.PROMPTS_DRAWN: drawn, metrics.PROMPTS_KEPT: groups - left}
        rows_of_rank = select(kept, range(rank * n, (rank + 1) * n))
        return Rollout(rows_of_rank, rewards, None), {**counts, metrics.PROMPTS_THROWN_AWAY: drawn - groups}

    def _gather_completions(self, rollout: Rollout) -> tuple[Rows, list[bool | None], list[list[Any]]]:
        """Return the completions of all ranks, group after group: rows with their rewards; whether each is right, None
        if it could not be graded; and the columns of the table of completions."""
        if rollout.verdicts is None:
            reason = f"no row of a step has a gold answer ({GOLDS}), so its completions have no verdict"
            raise UserError(f"resample_groups: {reason}")
        right = [None if verdict.ungradable else verdict == Verdict.CORRECT for verdict in rollout.verdicts]
        rows = {**gather_rows(rollout.rows, self.accelerator), "rewards_per_func": rollout.rewards}
        # TRL appends to its columns, so the last entries are those of this draw.
        return rows, right, [list(column)[-len(right) :] for column in _columns(self.table)]


def _columns(logs: Any) -> list[Any]:
    """Return the columns of TRL's table of completions, each with an entry for every row of a rollout."""
    return [logs["prompt"], logs["completion"], logs["advantages"], *logs["rewards"].values(), *logs["extra"].values()]
