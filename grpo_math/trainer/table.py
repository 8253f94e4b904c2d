"""Columns of TRL's table of completions that explain a row: group, problem, gold answer, verdict, reward, length.

Does not write the table: TRL and run_files.py do, as ``completions/completions_STEP.parquet``, and TRL sends it to the
trackers.
"""

from collections.abc import Callable, Iterable, Sequence
from textwrap import shorten
from typing import Any

from torch import Tensor

from grpo_math.grading import Grade
from grpo_math.rewards.columns import gold_of, text_of
from grpo_math.trainer.advantages import weighted


def columns_of(
    rows: Sequence[dict[str, Any]],
    groups: Iterable[int],
    grades: Sequence[Grade] | None,
    rewards: Tensor,
    ids: Sequence[Sequence[int]],
    is_truncated: Callable[[Sequence[int]], bool],
) -> dict[str, list[Any]]:
    """Return columns with an entry for each completion.

    ``groups`` are the numbers of the completions' groups. ``rewards`` (B,) are weighted sums, NaN if no function gave a
    number. ``ids`` are the completions' tokens; ``is_truncated`` returns True for those that the limit ended. Unknown
    values are None, so that columns have the same length.

    >>> from grpo_math.grading import Verdict
    >>> grades = [Grade(Verdict.CORRECT, "7", in_format=False, reason="exact")] * 2
    >>> rows, ids = [{"id": "a", "answer": "7"}] * 2, [[5, 6, 2], [5, 6]]
    >>> columns = columns_of(rows, [4, 4], grades, Tensor([0.0, 1.0]), ids, lambda ids: ids[-1] != 2)
    >>> for name, values in columns.items(): print(name, values)
    group [4, 4]
    problem_id ['a', 'a']
    gold ['7', '7']
    verdict ['correct', 'correct']
    extracted ['7', '7']
    in_format [False, False]
    reward [0.0, 1.0]
    tokens [3, 2]
    truncated [False, True]
    """
    graded: Sequence[Grade | None] = grades or [None] * len(rows)
    return {
        "group": list(groups),
        "problem_id": [name_of(row) for row in rows],
        "gold": [gold_of(row) for row in rows],
        "verdict": [grade and str(grade.verdict) for grade in graded],
        "extracted": [grade and grade.answer for grade in graded],
        "in_format": [grade and grade.in_format for grade in graded],
        "reward": [None if value != value else value for value in rewards.tolist()],
        "tokens": [len(tokens) for tokens in ids],
        "truncated": [is_truncated(tokens) for tokens in ids],
    }


def name_of(row: dict[str, Any]) -> str:
    """Return the problem's id, or the beginning of its prompt: the rows of a script may have no ids.

    >>> name_of({"id": 3}), name_of({"prompt": "What is 3 + 4?"})
    ('3', 'What is 3 + 4?')
    """
    if row.get("id") is not None:
        return str(row["id"])
    return shorten(text_of(row.get("prompt") or "", role="user"), width=60, placeholder=" ...")


def add_columns(
    trainer: Any,
    rows: list[dict[str, Any]],
    grades: Sequence[Grade] | None,
    rewards_per_func: Tensor,
    ids: list[list[int]],
    first_group: int,
) -> None:
    """Add the columns of this rank to TRL's table, unless a reward function logs a column of that name.

    ``first_group`` is the number of the rollout's first group: a resampled rollout continues the count.
    """
    # TRL has gathered the rewards of all ranks. It gathers the columns itself, later.
    first = trainer.accelerator.process_index * len(rows)
    of_rank = rewards_per_func[first : first + len(rows)]
    rewards = weighted(of_rank, trainer.reward_weights.to(of_rank.device))
    groups = (first_group + (first + row) // trainer.group_size for row in range(len(rows)))
    columns = columns_of(rows, groups, grades, rewards, ids, trainer.endings.is_truncated)
    for name, values in columns.items():
        if name not in (*trainer._pending_extra_logs, *trainer.reward_func_names):
            trainer._log_completion_extra(name, values)


def replace_advantages(column: Any, values: Sequence[float]) -> None:
    """Replace the advantages of the last rollout in TRL's table, which has those of TRL."""
    for _ in range(min(len(column), len(values))):
        column.pop()
    column.extend(values)
