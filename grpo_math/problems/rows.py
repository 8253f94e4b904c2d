r"""A raw row of a data set -> the checked id, problem and gold answer, and the other columns of the row.

>>> def of_columns(names): return columns.layout(names, columns.ACCEPTED)
>>> row = parse_row({"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}, "my", of_columns)
>>> row["id"], row["problem"], row["answer"]
('my', 'What is 3 + 4?', '7')
>>> parse_row({"problem": "Why?", "answer": " "}, "my", of_columns)
Traceback (most recent call last):
...
grpo_math.problems.rows.BadRow: ('answer', 'is empty', 'correct the row, or pass --skip_bad_rows')
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from numbers import Number
from typing import Any

from grpo_math.grading import Verdict
from grpo_math.grading.equal.compare import THOUSANDS, compare, value
from grpo_math.grading.equal.text import repaired
from grpo_math.grading.where import gold_answer
from grpo_math.problems import choices, columns, parts
from grpo_math.problems import options as choice
from grpo_math.problems.missing import column_remedy
from grpo_math.problems.prompts import CHAT_TOKENS
from grpo_math.problems.sources import DEFAULT_SOURCE, SOURCES, Source
from grpo_math.system.reading import Unreadable, from_cell, from_json
from grpo_math.system.table_files import FAULT

Row = dict[str, Any]

CHAT = re.compile(r"""\s*(?:\[\s*)?\{\s*['"](?:role|content|from|value|type)['"]\s*:""")
HALF = re.compile(r"[\ud800-\udfff]")
AS_TEXT = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=lambda _: None)
TRAINING_COLUMNS = {*columns.TRAINING_COLUMNS}
LEVEL = re.compile(r"(?:Level )?(\d{1,9})")
AROUND = [source.around for source in SOURCES.values() if any(source.around)]
LARGEST = Fraction(10**300)  # near the largest float
PARTS = ("level", "subject", "tolerance")
# Instead of an answer, with what pandas and spreadsheets write.
NO_GOLD = (
    *("", "proof", "notfound", "null", "none", "nan", "na", "n/a", "tbd", "?", "-"),
    *("<na>", "#n/a", "#ref!", "#value!", "#name?", "#num!", "#null!", "#div/0!"),
)
LONGEST_GOLD = 160  # characters; a shorter solution without a mark counts as the answer itself
NO_CHOICE: Row = {"options": {}, "lists": None}
REMEDY = "correct the row, or pass --skip_bad_rows"


class BadRow(Exception):
    """The field, the reason and the remedy of a `DataError`. `datasets.py` adds the file and the line."""


def parse_row(
    raw: bytes | Mapping[str, Any],
    default_id: str,
    layout_of: Callable[[tuple[str, ...]], columns.Layout],
    source: Source = DEFAULT_SOURCE,
    as_is: bool = False,
) -> Row:
    """Return {id, problem, answer, own_prompt, others, read, written, is_value, options, lists}. Raises `BadRow`.

    ``own_prompt`` is a chat, TRL's column ``prompt`` or a text with a chat template, else None. ``others`` has the
    level, subject and tolerance, and the unchanged other columns if the data set is not built in. ``options`` belong
    under the problem. ``read``: the columns of problem and answer. ``written``: the content of the answer's column.
    ``is_value``: the gold answer is not an index of an option. ``lists``: the columns that may be the options of an
    index; None if the gold answer is not one, or if its options are known. With ``as_is`` a chat may have turns.
    """
    try:
        fields = from_json(raw) if isinstance(raw, bytes) else raw
    except Unreadable as error:
        raise BadRow("row", f"cannot be read ({error.reason})", f"write one object a line, {REMEDY}") from None
    _check(isinstance(fields, Mapping), "row", f"is of type {type(fields).__name__}, not an object")
    _check(FAULT not in fields, "row", fields.get(FAULT, ""))
    # A JSON text may name one of two surrogates, which no file, table or tokenizer takes.
    if not isinstance(raw, bytes) or rb"\ud" in raw or rb"\uD" in raw or b"\xed" in raw:  # how a line would contain one
        _check(not HALF.search(AS_TEXT.encode(fields)), "row", "contains half a character")
    layout = layout_of(tuple(fields))
    named = layout.by_name(fields)
    problem_key, prompt = _needed(named, "problem", layout, fields)
    # A table stores a chat as text.
    if isinstance(prompt, str) and CHAT.match(prompt):
        prompt = from_cell(prompt)
        reason = "is a chat that a table stored as text, and that cannot be read"
        _check(not isinstance(prompt, str), problem_key, reason)
    problem = _question(prompt, problem_key, as_is)
    _check(isinstance(problem, str), problem_key, f"is of type {type(problem).__name__}, not text")
    # A chat, TRL's column and a text with a chat template are prompts. Any other text needs a prompt.
    is_prompt = problem is not prompt or problem_key == "prompt" or CHAT_TOKENS.search(problem)
    # A copy of a set under another name has the same instructions around its problems.
    for before, after in AROUND:
        problem = problem.removeprefix(before).removesuffix(after)
    _check(bool(problem.strip()), problem_key, "is empty")
    if problem is prompt and len(layout.accepted["problem"]) > 1:
        problem = parts.with_text_before(named, problem)
    answer_key, written = _needed(named, "answer", layout, fields)
    answer = _gold(answer_key, written, problem, source)
    _, identity = layout.first(named, "id")
    left_out = _left_out(problem_key)
    # The other columns of a built-in set may be gigabytes, and the user did not name them.
    others = {name: fields[name] for name in fields if name not in left_out} if source is DEFAULT_SOURCE else {}
    return {
        "id": default_id if identity is None else str(identity),
        "problem": problem.strip(),
        "answer": answer,
        "own_prompt": prompt if is_prompt else None,
        "others": others | _parts(named, layout, answer, source),
        "read": (problem_key, answer_key),
        **(_choice(named, answer, written, problem_key, answer_key) if source is DEFAULT_SOURCE else NO_CHOICE),
    }


def _choice(named: Mapping[str, Any], gold: str, written: Any, problem_key: str, answer_key: str) -> Row:
    """Return the options of a row, and whether its gold answer may be the index of one."""
    options = choice.options(named, gold)
    is_unseen = not options and (choices.is_index_column(answer_key) or choice.option_letter(gold))
    return {
        "written": written,
        "is_value": choice.has_wrong_options(named) or _is_marked(written, gold),
        "options": options,
        "lists": choice.option_lists(named, gold, problem_key) if is_unseen else None,
    }


def _is_marked(written: Any, gold: str) -> bool:
    """Return True if the gold answer is a part of the text in its column, such as a box, and not of a list."""
    return isinstance(written, str) and gold != written.strip() and isinstance(from_cell(written), str)


@lru_cache(maxsize=1000)
def _left_out(problem_key: str) -> set[str]:
    """Return the columns that are not among the other columns of a row."""
    # The template's prompt replaces a prompt that was read as the problem, so that its column needs no warning.
    prompt_columns = {part.partition(".")[0] for part in problem_key.split("+")} & TRAINING_COLUMNS
    return {"id", "problem", "answer", "own_prompt", *PARTS, *prompt_columns}


def _needed(named: Mapping[str, Any], field: str, layout: columns.Layout, fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the column and the value of a field. Raises `BadRow` if the row lacks it."""
    key, content = layout.first(named, field)
    if content is None:
        if present := layout.present[field]:
            raise BadRow(present[0], "is null", REMEDY)
        names = layout.accepted[field]
        key = names[0] if len(names) == 1 else field
        raise BadRow(key, "is missing", f"{column_remedy([fields], field, layout.accepted)}; {REMEDY}")
    return key, content


def _question(problem: Any, key: str, as_is: bool) -> Any:
    """Return the last message of the user in a chat, which TRL's data sets have in ``prompt``."""
    is_chat = isinstance(problem, list) and problem and all(isinstance(m, Mapping) and "content" in m for m in problem)
    if not is_chat:
        return problem
    questions = [message["content"] for message in problem if message.get("role") == "user"]
    _check(bool(questions), key, "is a chat without a question")
    if not as_is and [message.get("role") for message in problem if message.get("role") != "system"] != ["user"]:
        remedy = f"set prompt_template: as_is, which keeps them, {REMEDY}"
        raise BadRow(key, "is a chat of more than one turn, which the prompt template would drop", remedy)
    parts = questions[-1]
    is_text = isinstance(parts, list) and all(isinstance(part, Mapping) and "text" in part for part in parts)
    return "\n".join(part["text"] for part in parts) if is_text else parts


def _gold(key: str, answer: Any, problem: str, source: Source) -> str:
    """Return the gold answer in the content of the answer column."""
    cells = from_cell(answer)
    # A list (OlympiadBench) has several answers of a problem. A completion must give all of them, but one value once.
    # Numbers in brackets may be an interval.
    types = str if isinstance(answer, str) else str | int | float
    if isinstance(cells, list) and all(isinstance(one, types) for one in cells):
        golds = [gold_answer(str(one)) for one in cells]
        is_one = len(golds) > 1 and all(compare(golds[0], one)[0] is Verdict.CORRECT for one in golds[1:])
        answer = golds[0] if is_one else ", ".join(golds)
    # True is a Number in Python, but not an answer. A Decimal comes from Parquet.
    is_gold = isinstance(answer, str) or (isinstance(answer, Number) and not isinstance(answer, bool))
    _check(is_gold, key, f"is of type {type(answer).__name__}, not text or a number")
    _check(not isinstance(answer, float) or abs(answer) < math.inf, key, "contains no gold answer")
    # strip() would also remove the form feed that a damaged "\\frac" begins with, so that nothing reports the damage.
    text = str(answer)
    repaired_text = repaired(text)
    text = text.strip() if repaired_text == text else text.rstrip().lstrip(" \n")
    _check(bool(text), key, "is empty")
    of_problem = (gold for start, gold in source.gold_answers.items() if problem.startswith(start))
    gold = next(of_problem, None) or gold_answer(text)
    if gold == repaired_text.strip():
        # The answer has no mark. Damaged text stays, so that the checks report it; prose does not end in an answer.
        is_prose = key.endswith("solution") and ("\n" in text or len(text) > LONGEST_GOLD)
        gold = "" if is_prose else text
    elif "####" in text and THOUSANDS.fullmatch(gold):
        # A run is resumed with the same gold answers as it began with.
        gold = gold.replace(",", "")
    _check(gold.lower() not in NO_GOLD, key, "contains no gold answer")
    return gold


def _parts(named: Mapping[str, Any], layout: columns.Layout, gold: str, source: Source) -> Row:
    """Return the level, the subject and the tolerance that the row has. A value of another type is left out."""
    (_, level), (_, subject) = layout.first(named, "level"), layout.first(named, "subject")
    if number := LEVEL.fullmatch(str(level)):
        level = int(number[1])
    parts = {
        "level": level if isinstance(level, int | str) and level != "Level ?" else None,
        "subject": subject if isinstance(subject, str) else None,
        "tolerance": _tolerance(named, layout, gold, source) if source.relative or source.absolute else None,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _tolerance(named: Mapping[str, Any], layout: columns.Layout, gold: str, source: Source) -> float | None:
    """Return the accepted distance from the gold answer, in a data set whose authors accept such answers."""
    number = value(gold)
    of_row = value(str(layout.first(named, "tolerance")[1]))
    absolute = source.absolute if of_row is None else float(min(abs(of_row), LARGEST))
    return None if number is None else float(min(abs(number), LARGEST)) * source.relative + absolute


def _check(good: bool, field: str, reason: str) -> None:
    if not good:
        raise BadRow(field, reason, REMEDY)
