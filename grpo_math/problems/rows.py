r"""One raw row of a data set -> {id, problem, answer} and the level, subject and tolerance that it has, all checked.

A row of the user's own data keeps its other columns, as they are.

>>> row = checked({"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}, "my", columns.ACCEPTED)
>>> row["id"], row["problem"], row["answer"]
('my', 'What is 3 + 4?', '7')
>>> checked({"problem": "Why?", "answer": " "}, "my", columns.ACCEPTED)
Traceback (most recent call last):
...
grpo_math.problems.rows.BadRow: ('answer', 'is empty', 'correct the row, or pass --skip_bad_rows')

Does not read files, and builds no prompt.
"""

import re
from collections.abc import Mapping
from numbers import Number
from typing import Any

from grpo_math.grading.equal.compare import value
from grpo_math.grading.formats import FORMATS
from grpo_math.grading.where import gold_answer
from grpo_math.problems import columns
from grpo_math.problems.columns import Columns
from grpo_math.problems.sources import OWN, Source
from grpo_math.reading import EXTRA, Unreadable, from_json

Row = dict[str, Any]

EMPTY_IN_SOURCE = "is empty in the published data"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
LEVEL = re.compile(r"(?:Level )?(\d{1,9})")
SURROGATE = re.compile("[\ud800-\udfff]")
NOT_FINITE = ("nan", "snan", "inf", "-inf", "infinity", "-infinity")  # of a float and a Decimal
NO_GOLD = ("", "proof", "notfound", "null")  # what the column says where there is none, in the sets with gaps
LONGEST_GOLD = 160  # characters of a solution without a mark that is taken for the answer itself
REMEDY = "correct the row, or pass --skip_bad_rows"


class BadRow(Exception):
    """The field, the reason and the remedy of a `DataError`; `read_rows` knows the file and the line."""


def checked(
    raw: bytes | Mapping[str, Any], default_id: str, wanted: Columns, source: Source = OWN, exact: bool = True
) -> Row:
    """Return {id, problem, answer} and the level, subject and tolerance that the row has. Raises `BadRow`.

    Unless ``exact``, a level or a subject of another kind is left out: on the Hub these columns may mean anything.
    """
    fields = parsed(raw) if isinstance(raw, bytes) else raw
    _check(isinstance(fields, Mapping), "row", _kind(fields, "an object"))
    _check(EXTRA not in fields, "row", "has more cells than the file has columns")
    problem_key, prompt = columns.first(fields, "problem", wanted["problem"])
    problem = _asked(prompt, problem_key)
    # A chat, or TRL's column, is a prompt; any other text is a problem that still needs one.
    own = prompt if problem is not prompt or problem_key.lower() == "prompt" else None
    missing = columns.remedy_of(fields, "problem", wanted["problem"])
    _check(isinstance(problem, str), problem_key, _kind(problem, "text"), missing if problem is None else "")
    problem = problem.removeprefix(source.around[0]).removesuffix(source.around[1])
    _check_text(problem, problem_key)
    answer = _answer(fields, wanted, problem, source)
    id_key, identity = columns.first(fields, "id", wanted["id"])
    identity = default_id if identity is None else identity
    _check(isinstance(identity, str | int) and not isinstance(identity, bool), id_key, _kind(identity, "text"))
    row = {"id": str(identity), "problem": problem.strip(), "answer": answer, "own_prompt": own}
    _check_text(row["id"], id_key)
    row |= {**_parts(fields, wanted, exact), **_tolerance(fields, wanted, answer, source)}
    if source is not OWN:  # the other columns of a known set may hold gigabytes, and their names are not the user's
        return row
    asked = {part.partition(".")[0] for part in problem_key.split("+")} & {*columns.MADE}  # prompt, which ours replaces
    return {**row, **{key: value for key, value in fields.items() if key not in {*row, *asked}}}


def parsed(line: bytes) -> Any:
    """Return the value on a line of JSON."""
    try:
        return from_json(line)
    except Unreadable as error:
        raise BadRow("row", f"cannot be read ({error.reason})", f"write one object a line, {REMEDY}") from None


def gsm8k_gold(solution: str) -> str | None:
    r"""Return the number after the last ``####`` of a GSM8K solution, without thousands separators; None without one.

    >>> gsm8k_gold("5 * 425 = <<5*425=2125>>2,125\n#### 2,125"), gsm8k_gold("no marker")
    ('2125', None)
    """
    found = FORMATS["gsm8k"].marker.findall(solution)
    return THOUSANDS.sub("", found[-1].strip()) if found else None


def _asked(problem: Any, key: str) -> Any:
    """Return what the user asks in a chat of one turn, as TRL's data sets have it in ``prompt``."""
    is_chat = isinstance(problem, list) and problem and all(isinstance(m, Mapping) and "content" in m for m in problem)
    if not is_chat:
        return problem
    asked = [message["content"] for message in problem if message.get("role") == "user"]
    _check(len(asked) == 1 and problem[-1].get("role") == "user", key, "is a chat of more than one question")
    return asked[0]


def _answer(fields: Mapping[str, Any], wanted: Columns, problem: str, source: Source) -> str:
    """Return the gold answer that the column of the answer contains."""
    key, answer = columns.first(fields, "answer", wanted["answer"])
    if isinstance(answer, list) and key == "final_answer":  # OlympiadBench's: all of them have to be given
        answer = ", ".join(map(str, answer)) if answer else None
    gap = EMPTY_IN_SOURCE if source.gaps or problem.startswith(source.empty) else ""
    if source.gaps:
        _check(answer is not None and str(answer).strip().lower() not in NO_GOLD, key, EMPTY_IN_SOURCE)
    is_number = isinstance(answer, Number) and not isinstance(answer, bool)  # a Decimal too, as Parquet has them
    missing = columns.remedy_of(fields, "answer", wanted["answer"])
    good = is_number or isinstance(answer, str)
    _check(good, key, _kind(answer, "text or a number"), missing if answer is None else "")
    text = str(answer)
    _check(not is_number or text.lower() not in NOT_FINITE, key, "is not finite")
    _check_text(text, key, gap or "is empty")
    gold, marked = _gold(text, problem, source)
    if key.lower().endswith("solution") and not marked and ("\n" in text or len(text) > LONGEST_GOLD):
        gold = None  # a text that ends in no answer
    lacks = f"has no {source.mark} line" if source.mark else "holds no gold answer"
    _check(bool(gold), key, gap or lacks)
    return str(gold)


def _gold(answer: str, problem: str, source: Source) -> tuple[str | None, bool]:
    """Return the gold answer in a text, and whether a mark shows it: ``#### `` or a box."""
    if FORMATS["boxed"].marker.search(answer) and not source.mark:
        known = (gold for start, gold in source.wrong.items() if problem.startswith(start))
        return next(known, None) or gold_answer(answer), True
    if FORMATS["gsm8k"].marker.search(answer) or source.mark:
        return gsm8k_gold(answer), True
    return answer.strip(), False


def _parts(fields: Mapping[str, Any], wanted: Columns, exact: bool) -> Row:
    """Return the level and the subject that the row has."""
    parts: Row = {}
    for name, take in (("level", _level), ("subject", _subject)):
        key, found = columns.first(fields, name, wanted[name])
        if key in fields:
            try:
                parts[name] = take(found, key)
            except BadRow:
                if exact:
                    raise
    return parts


def _level(level: Any, key: str) -> int | str | None:
    if isinstance(level, str):
        number = LEVEL.fullmatch(level)
        return int(number[1]) if number else None if level == "Level ?" else level
    whole = level is None or (isinstance(level, int) and not isinstance(level, bool))
    _check(whole, key, _kind(level, "a whole number or text"))
    return level


def _subject(subject: Any, key: str) -> str | None:
    _check(isinstance(subject, str | None), key, _kind(subject, "text"))
    return subject


def _tolerance(fields: Mapping[str, Any], wanted: Columns, gold: str, source: Source) -> Row:
    """Return how far from the gold answer a number may be, if the set's authors accept such an answer."""
    number = value(gold) if source.relative is not None or source.absolute is not None else None
    if number is None:
        return {}
    if source.relative is not None:
        return {"tolerance": abs(float(number)) * source.relative}
    said = value(str(columns.first(fields, "tolerance", wanted["tolerance"])[1]))
    return {"tolerance": source.absolute if said is None else abs(float(said))}


def _check(good: bool, field: str, reason: str, first: str = "") -> None:
    if not good:
        raise BadRow(field, reason, f"{first}; {REMEDY}" if first else REMEDY)


def _check_text(text: str, field: str, empty: str = "is empty") -> None:
    _check(bool(text.strip()), field, empty)
    _check(not SURROGATE.search(text), field, "holds half of a surrogate pair, which no tokenizer takes")


def _kind(value: object, wanted: str) -> str:
    if value is None:
        return "is missing"
    kinds = {dict: "an object", list: "a list", bool: "true or false", str: "text", int: "a number", float: "a number"}
    return f"is {kinds.get(type(value), type(value).__name__)}, not {wanted}"
