r"""One raw row of a data set -> {id, problem, answer} and the level, subject and tolerance that it has, all checked.

>>> row = checked({"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}, "my", columns.ACCEPTED)
>>> row["id"], row["problem"], row["answer"]
('my', 'What is 3 + 4?', '7')
>>> checked({"problem": "Why?", "answer": " "}, "my", columns.ACCEPTED)
Traceback (most recent call last):
...
grpo_math.problems.rows.BadRow: ('answer', 'is empty', 'correct the row, or pass --skip_bad_rows')

Does not read files, and builds no prompt.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from grpo_math.grading.compare import value
from grpo_math.grading.extract import extract_gold
from grpo_math.grading.formats import FORMATS
from grpo_math.problems import columns
from grpo_math.problems.columns import Columns
from grpo_math.problems.sources import SOURCES, Source
from grpo_math.reading import Unreadable, from_json

Row = dict[str, Any]

# MATH's own gaps, by the start of the problem: two boxes are empty; one solution boxes everything but its answer, and
# one box holds half of a formula.
EMPTY_IN_MATH = (
    "For any integer $n>1$, the number of prime numbers greater than $n!+1$",
    "You are given a sequence of $58$ terms; each term has the form $P+n$",
)
WRONG_BOX_IN_MATH = {
    "Let $\\boxed{N}$ mean the number of whole number divisors": "6",
    "What is the largest value of $x$, if $\\frac{x}{5} + \\frac{1}{5x} = \\frac{1}{2}$?": "2",
}
EMPTY_IN_SOURCE = "is empty in the published data"

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
LEVEL = re.compile(r"(?:Level )?(\d{1,9})")
SURROGATE = re.compile("[\ud800-\udfff]")
NO_GOLD = ("", "proof", "notfound", "null")  # what the column says where there is none, in the sets with gaps
LONGEST_GOLD = 160  # characters of a solution without a mark that is taken for the answer itself
REMEDY = "correct the row, or pass --skip_bad_rows"


class BadRow(Exception):
    """The field, the reason and the remedy of a `DataError`; `read_rows` knows the file and the line."""


def checked(
    raw: bytes | Mapping[str, Any], default_id: str, wanted: Columns, name: str | None = None, exact: bool = True
) -> Row:
    """{id, problem, answer} and the level, subject and tolerance that the row has; a bad row raises `BadRow`.

    ``name`` is that of a known set. Unless ``exact``, a level or a subject of another kind is passed over: on the Hub
    these columns may mean anything.
    """
    fields = parsed(raw) if isinstance(raw, bytes) else raw
    source = SOURCES[name] if name else None
    problem_key, problem = columns.first(fields, "problem", wanted["problem"])
    problem = _asked(problem, problem_key)
    missing = columns.remedy_of(fields, "problem", wanted["problem"])
    _check(isinstance(problem, str), problem_key, _kind(problem, "text"), missing if problem is None else "")
    if source and source.around[0]:
        problem = problem.removeprefix(source.around[0]).removesuffix(source.around[1])
    _check_text(problem, problem_key)
    answer_key, answer = _answer(fields, wanted, problem, name, source)
    gold = _gold(answer, problem, name)
    gap = EMPTY_IN_SOURCE if _has_gap(problem, name, source) else ""
    marked = any(FORMATS[kind].marker.search(answer) for kind in ("gsm8k", "boxed"))
    if gold and answer_key.lower().endswith("solution") and not marked:
        gold = gold if "\n" not in gold and len(gold) <= LONGEST_GOLD else None  # a text that ends in no answer
    lacks = f"has no {FORMATS['gsm8k'].tags[0]} line" if name == "gsm8k" else "holds no gold answer"
    _check(bool(gold), answer_key, gap or lacks)
    id_key, identity = columns.first(fields, "id", wanted["id"])
    identity = default_id if identity is None else identity
    _check(isinstance(identity, str | int) and not isinstance(identity, bool), id_key, _kind(identity, "text"))
    row = {"id": str(identity), "problem": problem.strip(), "answer": gold}
    _check_text(row["id"], id_key)
    return {**row, **_parts(fields, wanted, exact), **_tolerance(fields, wanted, str(gold), source)}


def parsed(line: bytes) -> Row:
    """The object on a line of JSON."""
    try:
        fields = from_json(line)
    except Unreadable as error:
        raise BadRow("row", str(error), f"write one object a line, {REMEDY}") from None
    _check(isinstance(fields, dict), "row", _kind(fields, "an object"))
    return fields


def gsm8k_gold(solution: str) -> str | None:
    r"""The number after the last ``####`` of a GSM8K solution, without thousands separators; None where there is none.

    >>> gsm8k_gold("5 * 425 = <<5*425=2125>>2,125\n#### 2,125"), gsm8k_gold("no marker")
    ('2125', None)
    """
    found = FORMATS["gsm8k"].marker.findall(solution)
    return THOUSANDS.sub("", found[-1].strip()) if found else None


def _asked(problem: Any, key: str) -> Any:
    """What the user says in a chat of one turn, as TRL's data sets have it in ``prompt``."""
    is_chat = isinstance(problem, list) and problem and all(isinstance(m, Mapping) and "content" in m for m in problem)
    if not is_chat:
        return problem
    asked = [message["content"] for message in problem if message.get("role") == "user"]
    _check(len(asked) == 1 and problem[-1].get("role") == "user", key, "is a chat of more than one question")
    return asked[0]


def _answer(
    fields: Mapping[str, Any], wanted: Columns, problem: str, name: str | None, source: Source | None
) -> tuple[str, str]:
    """The column of the answer and its text."""
    key, answer = columns.first(fields, "answer", wanted["answer"])
    if isinstance(answer, list) and key == "final_answer":  # OlympiadBench's: all of them have to be given
        answer = ", ".join(map(str, answer)) if answer else None
    gap = EMPTY_IN_SOURCE if _has_gap(problem, name, source) else ""
    if gap and source and source.gaps:
        _check(answer is not None and str(answer).strip().lower() not in NO_GOLD, key, gap)
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    missing = columns.remedy_of(fields, "answer", wanted["answer"])
    good = is_number or isinstance(answer, str)
    _check(good, key, _kind(answer, "text or a number"), missing if answer is None else "")
    _check(not is_number or math.isfinite(answer), key, "is not finite")
    answer = str(answer)
    _check(bool(answer.strip()), key, gap or "is empty")
    _check_text(answer, key)
    return key, answer


def _has_gap(problem: str, name: str | None, source: Source | None) -> bool:
    return bool(source and source.gaps) or (name == "math" and problem.startswith(EMPTY_IN_MATH))


def _gold(answer: str, problem: str, name: str | None) -> str | None:
    if name == "gsm8k" or (FORMATS["gsm8k"].marker.search(answer) and not FORMATS["boxed"].marker.search(answer)):
        return gsm8k_gold(answer)
    if FORMATS["boxed"].marker.search(answer):
        known = (gold for start, gold in WRONG_BOX_IN_MATH.items() if name == "math" and problem.startswith(start))
        return next(known, None) or extract_gold(answer).text
    return answer.strip()


def _parts(fields: Mapping[str, Any], wanted: Columns, exact: bool) -> Row:
    """The level and the subject."""
    parts: Row = {}
    key, level = columns.first(fields, "level", wanted["level"])
    if key in fields:
        try:
            parts["level"] = _level(level)
        except BadRow:
            if exact:
                raise
    key, subject = columns.first(fields, "subject", wanted["subject"])
    if key in fields:
        good = subject is None or isinstance(subject, str)
        _check(good or not exact, key, _kind(subject, "text"))
        parts["subject"] = subject if good else None
    return parts


def _tolerance(fields: Mapping[str, Any], wanted: Columns, gold: str, source: Source | None) -> Row:
    """How far from the gold a number may be, where the set's authors take such an answer."""
    if source is None or (source.absolute is None and source.relative is None):
        return {}
    number = value(gold)
    if number is None:
        return {}
    if source.relative is not None:
        return {"tolerance": abs(float(number)) * source.relative}
    said = value(str(columns.first(fields, "tolerance", wanted["tolerance"])[1]))
    return {"tolerance": source.absolute if said is None else abs(float(said))}


def _check(good: bool, field: str, reason: str, first: str = "") -> None:
    if not good:
        raise BadRow(field, reason, f"{first}; {REMEDY}" if first else REMEDY)


def _check_text(text: str, field: str) -> None:
    _check(bool(text.strip()), field, "is empty")
    _check(not SURROGATE.search(text), field, "holds half of a surrogate pair, which no tokenizer takes")


def _kind(value: object, wanted: str) -> str:
    if value is None:
        return "is missing"
    kinds = {dict: "an object", list: "a list", bool: "true or false", str: "text", int: "a number", float: "a number"}
    return f"is {kinds.get(type(value), type(value).__name__)}, not {wanted}"


def _level(level: Any) -> int | str | None:
    if isinstance(level, str):
        number = LEVEL.fullmatch(level)
        return int(number[1]) if number else None if level == "Level ?" else level
    whole = level is None or (isinstance(level, int) and not isinstance(level, bool))
    _check(whole, "level", _kind(level, "a whole number or text"))
    return level
