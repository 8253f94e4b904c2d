"""What TRL's table of completions says of each beside its text, rewards and advantage: so that a row explains itself.

Does not write the table: TRL does, as ``completions/completions_STEP.parquet`` and to the trackers.
"""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from grpo_math.grading import Grade

GOLDS = ("answer", "solution")


def columns_of(
    rows: Sequence[dict[str, Any]],
    grades: Sequence[Grade] | None,
    rewards: Tensor,
    ids: Sequence[Sequence[int]],
    ends: Collection[int | None],
) -> dict[str, list[Any]]:
    """Columns of one entry a completion: which problem, its gold, the verdict and answer, the reward, the length.

    ``rewards`` (B,) are weighted sums, NaN where no function gave a number; ``ids`` the completions' tokens, of which
    one that ends on none of ``ends`` was cut. What the data or the grader do not say has no column.

    >>> from grpo_math.grading import Verdict
    >>> grades = [Grade(Verdict.CORRECT, "7", in_format=False, reason="exact")]
    >>> row = {"id": "a", "answer": "7"}
    >>> columns = columns_of([row, row], grades * 2, Tensor([0.0, 1.0]), [[5, 6, 2], [5, 6]], {2})
    >>> for name, values in columns.items(): print(name, values)
    problem_id ['a', 'a']
    gold ['7', '7']
    verdict ['correct', 'correct']
    extracted ['7', '7']
    in_format [False, False]
    reward [0.0, 1.0]
    tokens [3, 2]
    truncated [False, True]
    """
    columns: dict[str, list[Any]] = {}
    if all(row.get("id") is not None for row in rows):
        columns["problem_id"] = [str(row["id"]) for row in rows]
    for name in GOLDS:
        if "gold" not in columns and all(row.get(name) is not None for row in rows):
            columns["gold"] = [str(row[name]) for row in rows]
    if grades is not None:
        columns["verdict"] = [str(grade.verdict) for grade in grades]
        columns["extracted"] = [grade.answer for grade in grades]
        columns["in_format"] = [grade.in_format for grade in grades]
    columns["reward"] = [None if value != value else value for value in rewards.tolist()]
    columns["tokens"] = [len(tokens) for tokens in ids]
    columns["truncated"] = [not tokens or tokens[-1] not in ends for tokens in ids]
    return columns
