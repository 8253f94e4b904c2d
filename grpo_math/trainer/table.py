"""Columns of TRL's table of completions that explain a row: group, problem, gold answer, verdict, reward, length.

A script may log other columns, so a column may contain several types, or a type that Parquet lacks.

TRL writes the table as ``completions/completions_STEP.parquet``, and sends it to the trackers.
"""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import pyarrow
from accelerate.logging import get_logger
from pyarrow import parquet
from torch import Tensor

from grpo_math.errors import first_line
from grpo_math.grading import Grade
from grpo_math.rewards.inputs import completion_text, read_gold_answer
from grpo_math.system.replaced import replaced

if TYPE_CHECKING:
    from trl import GRPOTrainer

logger = get_logger(__name__)

# The columns of TRL's table, and the parts that contain more columns.
LISTS, PARTS = ("prompt", "completion", "advantages"), ("rewards", "extra")


def completion_columns(
    rows: Sequence[dict[str, Any]],
    groups: Iterable[int],
    grades: Sequence[Grade] | None,
    rewards: Tensor,
    ids: Sequence[Sequence[int]],
    truncated: Sequence[bool],
) -> dict[str, list[Any]]:
    """Return columns with an entry for each completion.

    ``groups`` are the numbers of the completions' groups. ``rewards`` (B,) are weighted sums, NaN if no function gave a
    number. ``ids`` are the completions' tokens. Unknown values are None, so that columns have the same length.

    >>> from grpo_math.grading import Verdict
    >>> grades = [Grade(Verdict.CORRECT, "7", in_format=False, reason="exact")] * 2
    >>> rows, ids = [{"id": "a", "answer": "7"}] * 2, [[5, 6, 2], [5, 6]]
    >>> columns = completion_columns(rows, [4, 4], grades, Tensor([0.0, 1.0]), ids, [False, True])
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
        "problem_id": [problem_name(row) for row in rows],
        "gold": [read_gold_answer(row) for row in rows],
        "verdict": [grade and str(grade.verdict) for grade in graded],
        "extracted": [grade and grade.answer for grade in graded],
        "in_format": [grade and grade.in_format for grade in graded],
        "reward": [None if value != value else value for value in rewards.tolist()],
        "tokens": [len(tokens) for tokens in ids],
        "truncated": list(truncated),
    }


def problem_name(row: dict[str, Any]) -> str:
    """Return the problem's id, or the beginning of its prompt: the rows of a script may have no ids.

    >>> problem_name({"id": 3}), problem_name({"prompt": "What is 3 + 4?"})
    ('3', 'What is 3 + 4?')
    """
    if row.get("id") is not None:
        return str(row["id"])
    return shorten(completion_text(row.get("prompt") or "", role="user"), width=60, placeholder=" ...")


def storable(values: Iterable[Any]) -> list[Any]:
    """Return the values of a column if Parquet can hold them together, else each value as JSON text.

    >>> storable([None, 7, "x+1"]), storable([{}]), storable([7, None]), storable([{(1, 2): 3}])
    ([None, '7', '"x+1"'], ['{}'], [7, None], ['"{(1, 2): 3}"'])
    """
    column = list(values)
    try:
        # pyarrow crashes at a value that contains itself. `json` raises.
        json.dumps(column, default=str, skipkeys=True)
        # Parquet has no empty struct, such as the arguments of a tool call without any.
        table = pyarrow.table({"column": pyarrow.array(column, from_pandas=True)})
        parquet.write_table(table, pyarrow.BufferOutputStream())
        return column
    # pyarrow has no common class for its errors, and an object of a script may raise any.
    except Exception:
        return [value if value is None else json_text(value) for value in column]


def json_text(value: Any) -> str:
    """Return a value as JSON. A value that JSON cannot represent becomes a text."""
    try:
        return json.dumps(value, default=to_python)
    except Exception:
        # `str` could fail, too.
        return json.dumps(reprlib.repr(value))


def to_python(value: Any) -> Any:
    """Return a number of numpy or torch, which a reward function may have logged, as Python's; other values as text."""
    return value.item() if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0 else str(value)


def copied_columns(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the columns of TRL's table."""
    parts = {part: {name: list(values) for name, values in logs[part].items()} for part in PARTS}
    return {**{name: list(logs[name]) for name in LISTS}, **parts}


def as_json(columns: Mapping[str, Any]) -> str:
    """Return columns for a checkpoint. A column of a script may contain what JSON cannot represent."""
    parts = {part: {name: storable(values) for name, values in columns[part].items()} for part in PARTS}
    return json.dumps({**columns, **parts}, default=to_python)


def restore(logs: Any, saved: Mapping[str, Any] | str | None) -> None:
    """Put columns back into TRL's table: those of `copied_columns`, or the JSON of a checkpoint."""
    if not saved:
        return
    columns = json.loads(saved) if isinstance(saved, str) else saved
    for name in LISTS:
        # Into TRL's own columns, which keep only the rows of the last rollout.
        logs[name].extend(columns[name])
    for part in PARTS:
        logs[part].clear()
        for name, values in columns[part].items():
            logs[part][name].extend(values)


def storable_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's table with columns that Parquet can hold, without columns that lack rows."""
    from trl.trainer.utils import strip_images_from_messages

    extra = {name: storable(values) for name, values in logs["extra"].items() if len(values) == len(logs["prompt"])}
    texts = {name: storable(map(strip_images_from_messages, logs[name])) for name in ("prompt", "completion")}
    return {**logs, **texts, "extra": extra}


@contextmanager
def storable_table(trainer: "GRPOTrainer", trackers: Any) -> Iterator[None]:
    """Let TRL's `log` write its table from columns that Parquet can hold, and send it to these ``trackers``.

    An error in the table does not end the run.
    """
    handler, logs, args = trainer.callback_handler, trainer._logs, trainer.args
    call_callbacks = handler.on_log

    def on_log(*arguments: Any) -> Any:
        control = call_callbacks(*arguments)
        # Not earlier: the callbacks may read the script's own values.
        args.report_to = trackers
        if trainer.log_completions and trainer.accelerator.is_main_process:
            trainer._logs = storable_logs(logs)
        return control

    with replaced(trainer, _logs=logs), replaced(args, report_to=args.report_to), replaced(handler, on_log=on_log):
        try:
            yield
        except Exception as error:
            # The table was not written yet, so this is an error of a script's callback.
            if trainer._logs is logs:
                raise
            # A file that was cut cannot be read by the report.
            with suppress(OSError):
                file = f"completions_{trainer.state.global_step:05d}.parquet"
                Path(str(args.output_dir), "completions", file).unlink(missing_ok=True)
            # Nobody asked for the file, so the run continues.
            logger.warning_once(f"the table of completions is not written: {type(error).__name__}: {first_line(error)}")
