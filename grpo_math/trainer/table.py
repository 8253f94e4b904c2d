"""What TRL's table of completions says of each beside its text, rewards and advantage: so that a row explains itself.

Completions that could not be graded are kept in a file of their own. Does not write the table: TRL does, as
``completions/completions_STEP.parquet`` and to the trackers.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import Tensor

from grpo_math.grading import Grade
from grpo_math.rewards.columns import gold_of, text_of
from grpo_math.run import metrics
from grpo_math.trainer.advantages import weighted


def columns_of(
    rows: Sequence[dict[str, Any]],
    grades: Sequence[Grade] | None,
    rewards: Tensor,
    ids: Sequence[Sequence[int]],
    is_cut: Callable[[Sequence[int]], bool],
) -> dict[str, list[Any]]:
    """Columns of one entry a completion: which problem, its gold, the verdict and answer, the reward, the length.

    ``rewards`` (B,) are weighted sums, NaN where no function gave a number; ``ids`` the completions' tokens, of which
    ``is_cut`` says whether the limit ended them. What the data or the grader do not say is None: columns are
    equally long.

    >>> from grpo_math.grading import Verdict
    >>> grades = [Grade(Verdict.CORRECT, "7", in_format=False, reason="exact")]
    >>> row = {"id": "a", "answer": "7"}
    >>> columns = columns_of([row, row], grades * 2, Tensor([0.0, 1.0]), [[5, 6, 2], [5, 6]], lambda ids: ids[-1] != 2)
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
    graded: Sequence[Grade | None] = grades or [None] * len(rows)
    return {
        "problem_id": [name_of(row) for row in rows],
        "gold": [gold_of(row) for row in rows],
        "verdict": [grade and str(grade.verdict) for grade in graded],
        "extracted": [grade and grade.answer for grade in graded],
        "in_format": [grade and grade.in_format for grade in graded],
        "reward": [None if value != value else value for value in rewards.tolist()],
        "tokens": [len(tokens) for tokens in ids],
        "truncated": [is_cut(tokens) for tokens in ids],
    }


def name_of(row: dict[str, Any]) -> str:
    """The problem's id, or the beginning of its prompt: the rows of a script may have no ids.

    >>> name_of({"id": 3}), name_of({"prompt": "What is 3 + 4?"})
    ('3', 'What is 3 + 4?')
    """
    if row.get("id") is not None:
        return str(row["id"])
    return shorten(text_of(row.get("prompt") or "", role="user"), width=60, placeholder=" ...")


def tell(trainer: Any, rows: list[dict[str, Any]], ids: list[list[int]]) -> None:
    """What explains a completion goes beside it in TRL's table, but where a reward function has that column."""
    # TRL has gathered the rewards of all ranks, and gathers the columns itself later.
    first = trainer.accelerator.process_index * len(rows)
    of_rank = trainer._rewards_per_func[first : first + len(rows)]
    rewards = weighted(of_rank, trainer.reward_weights.to(of_rank.device))
    columns = columns_of(rows, trainer._grades, rewards, ids, trainer.endings.cut)
    for name in columns.keys() - {*trainer._pending_extra_logs, *trainer.reward_func_names}:
        trainer._log_completion_extra(name, columns[name])


def keep_ungradable(trainer: Any, rows: list[dict[str, Any]]) -> None:
    """The golds and texts of all ranks that could not be graded go to ``ungradable.jsonl``, with their step."""
    if rows and trainer.accelerator.is_main_process:
        with open(Path(str(trainer.args.output_dir), "ungradable.jsonl"), "a", encoding="utf-8") as file:
            file.writelines(json.dumps({metrics.STEP: trainer.state.global_step, **row}) + "\n" for row in rows)
