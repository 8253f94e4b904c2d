"""The inputs of reward functions: TRL's columns as grades, gold answers, formats and lengths, one per completion.

The trainer adds the grades, the time limit and the length limit under the reserved keys below (guard.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

from grpo_math.errors import RewardError
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.grading.formats import FORMATS, in_format_for
from grpo_math.grading.where import find, gold_answer

Completion = str | list[dict[str, Any]]
# The arguments and the result of a reward function: one of each for each completion.
Prompts = Sequence[Any]
Completions = Sequence[Completion]
Rewards = list[float | None]
Reward = Callable[..., Rewards]

GOLD_COLUMNS = ("answer", "solution")  # the first that a row has is its gold answer
GOLDS = " or ".join(GOLD_COLUMNS)  # for a message
# The keys of the values that the trainer adds. No column of a user has such a name.
RESERVED = "grpo_math_"
GRADE, GRADE_TIMEOUT, MAX_LENGTH = (f"{RESERVED}{name}" for name in ("grade", "grade_timeout", "max_completion_length"))
# For each completion its group: the length of each completion, and whether it is right (`Sized`).
GROUPS = f"{RESERVED}groups"
Sized = tuple[int, float | None]
DEFAULT_FORMAT = "xml"  # the format that format rewards check if a row names no format
DEFAULT_LIMIT = 1024  # tokens of a completion, if neither a setting nor the trainer gives a limit


def completion_text(completion: Completion, role: str = "assistant") -> str:
    """Return the text of a completion: the string, or the content of the last message with this role.

    >>> completion_text([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "#### 7"}])
    '#### 7'
    """
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") for message in completion if message.get("role", role) == role]
    content = (contents and contents[-1]) or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def completion_grades(name: str, completions: Completions, columns: dict[str, Any]) -> list[Grade]:
    """Return the grades in ``columns``, or grade now. Error messages contain ``name``, the reward function."""
    if columns.get(GRADE) is not None:
        return list(columns[GRADE])
    texts = [completion_text(completion) for completion in completions]
    formats = [row_format({"answer_format": name}) for name in prompt_formats(completions, columns)]
    golds, problems = read_gold_answers(name, columns), columns.get("problem")
    timeout = columns.get(GRADE_TIMEOUT, 5.0)
    return grade_batch(golds, texts, answer_format=formats, problems=problems, timeout=timeout)


def is_right(g: Grade) -> float | None:
    """Return 1 for a correct answer in any form, 0 for a wrong one, None if the answer could not be graded."""
    return None if g.verdict.ungradable else float(g.verdict is Verdict.CORRECT)


def read_gold_answer(row: Mapping[str, Any]) -> str | None:
    """Return the gold answer of a row: ``answer``, else ``solution`` (TRL's name), or None without either.

    >>> read_gold_answer({"answer": 7}), read_gold_answer({"answer": "", "solution": "#### 7"})
    ('7', '#### 7')
    """
    values = (_scalar(row.get(name)) for name in GOLD_COLUMNS)
    # In Python True is a number, too.
    return next((str(v) for v in values if isinstance(v, str | Number) and not isinstance(v, bool) and v != ""), None)


def _scalar(value: Any) -> Any:
    """Return a number that ``with_format("torch")`` made a tensor as numpy's, which prints 0.1 in float32 as 0.1."""
    is_tensor = hasattr(value, "detach") and value.ndim == 0
    return value.detach().cpu().numpy()[()] if is_tensor else value


def read_gold_answers(name: str, columns: dict[str, Any]) -> list[str]:
    """Return the ``answer`` (or TRL's ``solution``) of each row. Raises `RewardError` without these columns.

    >>> read_gold_answers("accuracy", {"answer": [7, None, None], "solution": [None, "8", None]})
    ['7', '8', '']
    """
    available = {column: values for column in GOLD_COLUMNS if (values := columns.get(column)) is not None}
    if not available:
        raise RewardError(
            f"reward function {name} needs the column {GOLDS}: every row of the data must contain its gold answer"
        )
    return [
        read_gold_answer(dict(zip(available, row, strict=True))) or "" for row in zip(*available.values(), strict=True)
    ]


def row_format(row: Mapping[str, Any]) -> str | None:
    """Return the format that a row asks for, or None. A column of the user may have this name and other values.

    >>> row_format({"answer_format": "boxed"}), row_format({"answer_format": "integer"}), row_format({})
    ('boxed', None, None)
    """
    name = row.get("answer_format")
    return name if isinstance(name, str) and name in FORMATS else None


def prompt_formats(completions: Completions, columns: dict[str, Any]) -> list[str | None]:
    """Return the ``answer_format`` of each row, or None if a row has none."""
    formats = columns.get("answer_format")
    if formats is None or isinstance(formats, str):
        return [formats] * len(completions)
    return list(formats)


def in_formats(completions: Completions, columns: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the text of each completion and the format that it must keep to.

    >>> in_formats(["#### 7"], {"answer_format": ["gsm8k"]}), in_formats(["#### 7"], {})
    ([('#### 7', 'gsm8k')], [('#### 7', 'xml')])
    """
    formats = prompt_formats(completions, columns)
    return [
        (completion_text(completion), f or DEFAULT_FORMAT) for completion, f in zip(completions, formats, strict=True)
    ]


def in_requested_format(completions: Completions, columns: dict[str, Any]) -> list[bool]:
    """Return True for each completion that keeps to its format. The gold answer and the problem count, if known.

    >>> columns = {"answer_format": "gsm8k", "answer": ["50"]}
    >>> in_requested_format(["#### 50"], columns), in_requested_format(["#### 48/2 + 26"], columns)
    ([True], [False])
    """
    known = any(columns.get(name) is not None for name in GOLD_COLUMNS)
    gold_answers = read_gold_answers("", columns) if known else [""] * len(completions)
    problems = columns.get("problem") or [None] * len(completions)
    texts = in_formats(completions, columns)
    return [
        in_format_for(gold_answer(gold), text, name, find(text, name).text, str(problem or ""))
        for gold, problem, (text, name) in zip(gold_answers, problems, texts, strict=True)
    ]


def completion_lengths(completions: Completions, columns: dict[str, Any]) -> list[int]:
    """Return the length of each completion in tokens, or in words without TRL's ``completion_ids``."""
    rows = columns.get("completion_ids") or [completion_text(completion).split() for completion in completions]
    return [len(row) for row in rows]


def grouped(keys: Iterable[Any], values: Sequence[Sized]) -> list[list[Sized]]:
    """Return for each value the list of all values with its key.

    >>> grouped("aba", [(3, 1.0), (4, 1.0), (5, 0.0)])
    [[(3, 1.0), (5, 0.0)], [(4, 1.0)], [(3, 1.0), (5, 0.0)]]
    """
    groups: dict[Any, list[Sized]] = {}
    keys = list(keys)
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    return [groups[key] for key in keys]


def column_names(data: Any) -> list[str] | None:
    """Return the columns of the data; None if only its rows show them, which are left to training.

    Does not read a stream, which may be read only once, and does not call the function of ``with_transform``.
    """
    # The function makes other columns than those that are stored.
    is_lazy = getattr(data, "format", {}).get("type") == "custom"
    return None if is_lazy else getattr(data, "column_names", None)
