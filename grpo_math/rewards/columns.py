"""What reward functions read: TRL's columns as grades, golds, formats and lengths, one an entry for each completion.

Does not turn any of it into a number (rules.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_math.errors import RewardError
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.grading.formats import in_format

Completion = str | list[dict[str, Any]]
Reward = Callable[..., list[float | None]]

DEFAULT_FORMAT = "xml"  # the format that format rewards look for where a row names none
DEFAULT_MAX_LENGTH = 1024  # tokens, where neither a setting nor the trainer names a limit


def text_of(completion: Completion) -> str:
    """The text of a completion: itself, or what the last assistant message says.

    >>> text_of([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "#### 7"}])
    '#### 7'
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content)
    return ""


# ------------------------------------------------------------------------------------------------------------ columns


def _right(g: Grade) -> bool:
    return g.verdict is Verdict.CORRECT


def _within_format(name: str, completions: Sequence[Completion], columns: dict[str, Any]) -> list[float | None]:
    """The rule that an answer only counts within the format; only a gold that cannot be graded excuses a broken one."""
    if any(f != name for f in _formats(completions, columns)):  # the grades at hand were made for another format
        columns = {**columns, "answer_format": name, "grade": None}
    rewards: list[float | None] = []
    for completion, g in zip(completions, _grades(name, completions, columns), strict=True):
        if g.verdict is Verdict.BAD_GOLD:
            rewards.append(None)
        elif not in_format(text_of(completion), name):
            rewards.append(0.0)
        else:
            rewards.append(None if g.verdict.ungradable else float(_right(g)))
    return rewards


def _grades(name: str, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Grade]:
    given = columns.get("grade")
    if given is not None:
        return list(given)
    return grade_batch(
        _golds(name, columns),
        [text_of(completion) for completion in completions],
        answer_format=_formats(completions, columns),
        timeout=_setting(columns, "grade_timeout") or 5.0,
    )


def _golds(name: str, columns: dict[str, Any]) -> list[str]:
    golds = columns.get("answer", columns.get("solution"))
    if golds is None:
        raise RewardError(f"reward function {name} needs the column answer: every row of the data must hold its gold")
    return ["" if gold is None else str(gold) for gold in golds]


def _gold_text(gold: str) -> str:
    from grpo_math.grading.extract import extract_gold

    return extract_gold(gold).text or ""


def _formats(completions: Sequence[Completion], columns: dict[str, Any]) -> list[str | None]:
    formats = columns.get("answer_format")
    if formats is None or isinstance(formats, str):
        return [formats] * len(completions)
    return list(formats)


def _setting(columns: dict[str, Any], name: str) -> Any:
    """A setting of the run: a number, or, as TRL passes it on, a column of the same number."""
    value = columns.get(name)
    return value[0] if isinstance(value, list) and value else value


def _lengths(completions: Sequence[Completion], columns: dict[str, Any]) -> list[int]:
    """Tokens where TRL passes ``completion_ids``; words where nobody does."""
    ids = columns.get("completion_ids")
    if ids is not None:
        return [len(row) for row in ids]
    return [len(text_of(completion).split()) for completion in completions]
