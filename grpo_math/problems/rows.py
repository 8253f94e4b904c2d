r"""A raw row of a data set -> the checked id, problem and gold answer, and the other columns of the row.

>>> row = checked({"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}, "my", columns.ACCEPTED)
>>> row["id"], row["problem"], row["answer"]
('my', 'What is 3 + 4?', '7')
>>> checked({"problem": "Why?", "answer": " "}, "my", columns.ACCEPTED)
Traceback (most recent call last):
...
grpo_math.problems.rows.BadRow: ('answer', 'is empty', 'correct the row, or pass --skip_bad_rows')
"""

import json
import re
from collections.abc import Mapping
from numbers import Number
from typing import Any

from grpo_math.grading.equal.compare import THOUSANDS, value
from grpo_math.grading.equal.text import repaired
from grpo_math.grading.where import gold_answer
from grpo_math.problems import columns
from grpo_math.problems.sources import OWN, Source
from grpo_math.reading import EXTRA, Unreadable, from_json

Row = dict[str, Any]

LEVEL = re.compile(r"(?:Level )?(\d{1,9})")
PARTS = ("level", "subject", "tolerance")
NO_GOLD = ("", "proof", "notfound", "null", "nan")  # what data sets write if a problem has no answer
LONGEST_GOLD = 160  # characters; a shorter solution without a mark counts as the answer itself
REMEDY = "correct the row, or pass --skip_bad_rows"


class BadRow(Exception):
    """The field, the reason and the remedy of a `DataError`. `datasets.py` adds the file and the line."""


def checked(raw: bytes | Mapping[str, Any], default_id: str, accepted: columns.Columns, source: Source = OWN) -> Row:
    """Return {id, problem, answer, own_prompt, others}. Raises `BadRow`.

    ``own_prompt`` is a chat or TRL's column ``prompt``, else None. ``others`` has the level, subject and tolerance,
    and the unchanged other columns if the data set is not built in.
    """
    try:
        fields = from_json(raw) if isinstance(raw, bytes) else raw
    except Unreadable as error:
        raise BadRow("row", f"cannot be read ({error.reason})", f"write one object a line, {REMEDY}") from None
    _check(isinstance(fields, Mapping), "row", f"is of type {type(fields).__name__}, not an object")
    _check(EXTRA not in fields, "row", "has more cells than the file has columns")
    # A JSON text may name one of two surrogates, which no file, table or tokenizer takes.
    texts = json.dumps(fields, ensure_ascii=False, skipkeys=True, default=lambda _: None)
    _check(not re.search(r"[\ud800-\udfff]", texts), "row", "contains half a character")
    problem_key, prompt = _needed(fields, "problem", accepted)
    problem = _question(prompt, problem_key)
    # A chat, or TRL's column, is a prompt. Any other text is a problem, which needs a prompt.
    own_prompt = prompt if problem is not prompt or problem_key == "prompt" else None
    _check(isinstance(problem, str), problem_key, f"is of type {type(problem).__name__}, not text")
    problem = problem.removeprefix(source.around[0]).removesuffix(source.around[1])
    _check(bool(problem.strip()), problem_key, "is empty")
    answer = _answer(fields, accepted, problem, source)
    _, identity = columns.first(fields, "id", accepted["id"])
    row = {
        "id": default_id if identity is None else str(identity),
        "problem": problem.strip(),
        "answer": answer,
        "own_prompt": own_prompt,
    }
    # The template's prompt replaces a prompt that was read as the problem, so that its column needs no warning.
    asked = {part.partition(".")[0] for part in problem_key.split("+")} & {*columns.MADE}
    left_out = {*row, *PARTS, *asked}
    # The other columns of a built-in set may be gigabytes, and the user did not name them.
    others = {name: fields[name] for name in fields if name not in left_out} if source is OWN else {}
    return {**row, "others": others | _parts(fields, accepted, answer, source)}


def _needed(fields: Mapping[str, Any], field: str, accepted: columns.Columns) -> tuple[str, Any]:
    """Return the column and the value of a field. Raises `BadRow` if the row lacks it."""
    key, content = columns.first(fields, field, accepted[field])
    if content is None:
        raise BadRow(key, "is missing", f"{columns.column_remedy(fields, field, accepted[field])}; {REMEDY}")
    return key, content


def _question(problem: Any, key: str) -> Any:
    """Return the user's message of a chat with one question, which TRL's data sets have in ``prompt``."""
    is_chat = isinstance(problem, list) and problem and all(isinstance(m, Mapping) and "content" in m for m in problem)
    if not is_chat:
        return problem
    questions = [message["content"] for message in problem if message.get("role") == "user"]
    _check(len(questions) == 1 and problem[-1].get("role") == "user", key, "is a chat of more than one question")
    return questions[0]


def _answer(fields: Mapping[str, Any], accepted: columns.Columns, problem: str, source: Source) -> str:
    """Return the gold answer from the answer column."""
    key, answer = _needed(fields, "answer", accepted)
    # A list (OlympiadBench) has several answers of a problem. A completion must give all of them.
    if isinstance(answer, list) and all(isinstance(one, str | int | float) for one in answer):
        answer = ", ".join(gold_answer(str(one)) for one in answer)
    # True is a Number in Python, but not an answer. A Decimal comes from Parquet.
    is_gold = isinstance(answer, str | Number) and not isinstance(answer, bool)
    _check(is_gold, key, f"is of type {type(answer).__name__}, not text or a number")
    # strip() would also remove the form feed that a damaged "\\frac" begins with, so that nothing reports the damage.
    text = str(answer)
    mended = repaired(text)
    text = text.strip() if mended == text else text.rstrip().lstrip(" \n")
    _check(bool(text), key, "is empty")
    of_problem = (gold for start, gold in source.golds.items() if problem.startswith(start))
    gold = next(of_problem, None) or gold_answer(text)
    if gold == mended.strip():
        # Without a mark. Damaged text stays, so that the checks report it; prose does not end in an answer.
        is_prose = key.endswith("solution") and ("\n" in text or len(text) > LONGEST_GOLD)
        gold = "" if is_prose else text
    elif "####" in text and THOUSANDS.fullmatch(gold):
        # A run is resumed with the same gold answers as it began with.
        gold = gold.replace(",", "")
    _check(gold.lower() not in NO_GOLD, key, "contains no gold answer")
    return gold


def _parts(fields: Mapping[str, Any], accepted: columns.Columns, gold: str, source: Source) -> Row:
    """Return the level, the subject and the tolerance that the row has. A value of another type is left out."""
    _, level = columns.first(fields, "level", accepted["level"])
    _, subject = columns.first(fields, "subject", accepted["subject"])
    if number := LEVEL.fullmatch(str(level)):
        level = int(number[1])
    parts = {
        "level": level if isinstance(level, int | str) and level != "Level ?" else None,
        "subject": subject if isinstance(subject, str) else None,
        "tolerance": _tolerance(fields, accepted, gold, source) if source.relative or source.absolute else None,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _tolerance(fields: Mapping[str, Any], accepted: columns.Columns, gold: str, source: Source) -> float | None:
    """Return the accepted distance from the gold answer, in a data set whose authors accept such answers."""
    number = value(gold)
    stated = value(str(columns.first(fields, "tolerance", accepted.get("tolerance", ()))[1]))
    absolute = source.absolute if stated is None else abs(float(stated))
    return None if number is None else abs(float(number)) * source.relative + absolute


def _check(good: bool, field: str, reason: str) -> None:
    if not good:
        raise BadRow(field, reason, REMEDY)
