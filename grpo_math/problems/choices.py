r"""The option that a gold answer names: by its label, its text, a value equal to it, or its index.

>>> row = {"problem": "What is 3 + 4?", "answer": "7.0", "is_value": False, "options": {"A": "6", "B": "$7$"}}
>>> row = with_options(row, Numbering(are_values=True))
>>> row["problem"], row["answer"]
('What is 3 + 4?\n(A) 6\n(B) $7$', 'B')

A number may be a value or an index. The whole data set decides: `numbering`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, cut
from grpo_math.grading import Verdict
from grpo_math.grading.equal.clean import clean
from grpo_math.grading.equal.compare import compare, value
from grpo_math.problems.columns import normalized
from grpo_math.problems.options import CIRCLED, LABEL, option_index

INDEX_NAME = re.compile(r".*(?:idx|index)|cop|correct_option|answerkey")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
JUDGED = 1000  # gold answers that are compared with their options


def is_index_column(column: str) -> bool:
    """Return True if the name of a column says that its numbers are indices.

    >>> [name for name in ("answer_idx", "meta.correctIndex", "answerKey", "label") if is_index_column(name)]
    ['answer_idx', 'meta.correctIndex', 'answerKey']
    """
    return bool(INDEX_NAME.fullmatch(normalized(column)))


def options_column(
    rows: Iterable[Mapping[str, Any]], file: str, warn: Callable[[str], None] | None = None
) -> str | None:
    """Return the column with the options that indices name, if no column has a usual name; None without such a column.

    Raises `ConfigError` if the gold answers are indices by the name of their column, and their options are not clear.
    ``warn`` gets the line if this name may mean something else. Without ``warn`` there is neither an error nor a line.
    """
    unseen = [(row["answer"], row["read"][1], row["lists"]) for row in rows if not row["options"]]
    # Some of the gold answers are neither an index nor a letter.
    if not unseen or any(lists is None for _, _, lists in unseen):
        return None
    columns = sorted(set.intersection(*({*lists} for _, _, lists in unseen)))
    if len(columns) == 1:
        return columns[0]
    golds, key = [gold for gold, _, _ in unseen], unseen[0][1]
    # A letter may be of options in the problem, and a number that is no index is a value.
    if warn is None or not all(option_index(gold) in range(len(ascii_uppercase)) for gold in golds):
        return None
    options = f"several columns may be their options: {', '.join(columns)}" if columns else "no column is their options"
    reason = (
        f"has gold answers in the column {key!r} that are indices by its name ({', '.join(golds[:3])}), and {options}"
    )
    remedy = f"name the column of options 'options', or give --columns answer=NAME, or answer={key} to keep them"
    if normalized(key).endswith(("idx", "index")):
        raise ConfigError("dataset", file, reason, remedy)
    warn(f"{file} {reason}: {remedy}")
    return None


def with_list(row: dict[str, Any], column: str) -> dict[str, Any]:
    """Return a row with the options of this column, if the row has no others."""
    return {**row, "options": row["options"] or (row["lists"] or {}).get(column, {})}


class Numbering(NamedTuple):
    """How the gold answers of a data set that are numbers name options."""

    are_values: bool  # a number is the value of an option, not an index
    start: int = 0  # the first index


@dataclass(frozen=True)
class NumberOfRow:
    """A gold answer that is a number, and its meaning among the options of its row."""

    index: int | None  # at most the number of options; None if the number cannot be an index
    position: int | None  # of the option that is equal
    is_last: bool  # the index is the number of options, or the labels count from 1
    is_index: bool  # if both fit: by the name of its column, or a number next to texts, as in MMLU


def numbering(rows: Iterable[Mapping[str, Any]], file: str, warn: Callable[[str], None]) -> Numbering:
    """Return how the numbers among the gold answers name options, which only the whole set shows: a 2 alone may be an
    option, or the second or the third.

    Numbers are values if each equals an option, or if one of them cannot be an index and most equal an option. Indices
    count from 1 if the labels do, or if the last option is counted so.
    """
    numbers: list[NumberOfRow] = []
    for row in rows:
        if row["options"] and not row["is_value"] and _is_number(row["answer"]):
            numbers.append(_number_meaning(row, is_judged=len(numbers) < JUDGED))
    judged = numbers[:JUDGED]
    values = sum(one.position is not None for one in judged)
    has_zero, has_last = any(one.index == 0 for one in numbers), any(one.is_last for one in numbers)
    start = int(has_last and not has_zero)
    if any(one.index is None for one in numbers):
        return Numbering(values >= sum(one.index is not None for one in judged), start)
    are_values = values == len(judged) and not any(one.is_index for one in judged)
    differ = any(one.position not in (None, one.index - start) for one in judged if one.index is not None)
    if differ and 2 * values > len(judged):
        taken, other = ("values", "indices") if are_values else ("indices", "values")
        fit = "fit as values of options and as indices"
        warn(f"the gold answers of {file} that are numbers {fit}: read as {taken}, not as {other}; write letters")
    elif numbers and not (are_values or has_zero or has_last):
        reason = "because none is 0 or the number of options"
        warn(f"the gold answers of {file} are read as indices of options from 0, {reason}: write letters")
    return Numbering(are_values, start)


def _number_meaning(row: Mapping[str, Any], is_judged: bool) -> NumberOfRow:
    """Return the meaning of a gold answer. Only if ``is_judged``, it is compared with the options, which takes time."""
    gold, options = row["answer"], row["options"]
    index = option_index(gold)
    is_number_next_to_text = not isinstance(row["written"], str) and any(isinstance(o, str) for o in options.values())
    return NumberOfRow(
        index=index if index in range(len(options) + 1) else None,
        position=next(iter(_equal(gold, options.values())), None) if is_judged else None,
        is_last=index == len(options) or "1" in [*options][:1],
        is_index=is_index_column(row["read"][1]) or is_number_next_to_text,
    )


def with_letters(
    rows: Iterable[dict[str, Any]], numbers: Numbering, file: str, warn: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield each row with the options under its problem, and the letter of an option as its gold answer."""
    n, without = 0, []
    for row in rows:
        read = with_options(row, numbers)
        n += bool(row["options"])
        if row["options"] and read["answer"] not in ascii_uppercase[: len(row["options"])]:
            without.append(f"{row['id']}, {cut(row['answer'])}")
        yield read
    if without:
        message = f"{len(without)} of {n} gold answers of {file} name no option, and stay as they are"
        warn(f"{message}; the first is {without[0]}: write a letter")


def with_options(row: dict[str, Any], numbers: Numbering) -> dict[str, Any]:
    """Return a row with the options under its problem, and the letter of an option as its gold answer."""
    if not row["options"]:
        return row
    labels, texts, problem = [*row["options"]], [*map(str, row["options"].values())], row["problem"]
    gold = row["answer"].translate(CIRCLED)
    index = None if numbers.are_values or row["is_value"] else option_index(gold)
    if index is None:
        position = _position(gold, labels, texts)
    else:
        position = index - numbers.start if index - numbers.start in range(len(texts)) else None
    lines = [f"({letter}) {text}" for letter, text in zip(ascii_uppercase, texts, strict=False)]
    # A problem may contain its options already.
    if not all(_squeezed(line) in _squeezed(problem) for line in lines):
        problem = "\n".join([problem, *lines])
    return {**row, "problem": problem, "answer": gold if position is None else ascii_uppercase[position]}


def _position(gold: str, labels: Sequence[str], texts: Sequence[str]) -> int | None:
    """Return the position of the option with this label, this text or an equal value; None without one.

    >>> golds = ("2", "0.5", "(b)", "2 cm", r"\\text{(B)}", "3", "Option 2")
    >>> [_position(gold, "AB", ["$2$", "1/2"]) for gold in golds]
    [0, 1, 1, 0, 1, None, 1]
    """
    label, is_number = LABEL.fullmatch(TEXT.sub(r"\1", clean(gold)) if "\\" in gold else gold), _is_number(gold)
    # "Option 2" is the second one, and 2 may be a value.
    orders = (ascii_uppercase, "" if is_number else "123456789", labels)
    by_label = {name: position for names in orders for position, name in enumerate(names[: len(texts)])}
    position = by_label.get(label[1].upper()) if label else None
    if gold in by_label and not is_number:
        return position
    if gold in texts:
        return texts.index(gold)
    if position is not None and not is_number:
        return position
    equal = _equal(gold, texts)
    return equal[0] if len(equal) == 1 else position


def _is_number(gold: str) -> bool:
    """Return True for a number, but not for "Option 2"."""
    # Few letters and words have a digit. Reading a text takes longer.
    if not any(map(str.isdigit, gold)) or (gold[0].isalpha() and LABEL.fullmatch(gold)):
        return False
    return value(gold) is not None


def _equal(gold: str, options: Iterable[Any]) -> list[int]:
    """Return the positions of the options that the grader takes for equal to a gold answer."""
    texts = [(place, str(option)) for place, option in enumerate(options)]
    has_digit = any(map(str.isdigit, gold))
    # Few texts of other options have a digit. Comparing takes longer.
    return [
        place
        for place, text in texts
        if has_digit == any(map(str.isdigit, text)) and compare(gold, text)[0] is Verdict.CORRECT
    ]


def _squeezed(text: str) -> str:
    return re.sub(r"\W", "", text).casefold()
