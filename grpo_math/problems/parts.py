r"""The parts of a problem that have separate columns: a text before the question, and the options under it.

>>> rows = [{"problem": "What is 3 + 4?", "answer": "1", "written": 1, "options": labelled(["6", "7"])}]
>>> row = with_options(rows[0], numbering(rows))
>>> row["problem"], row["answer"]
('What is 3 + 4?\n(A) 6\n(B) 7', 'B')

The layouts are those of published sets. `unread` reports a column in another layout. ``--columns problem=NAME`` keeps
the text before the question out.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from string import ascii_uppercase
from typing import Any, NamedTuple

from grpo_math.problems.columns import normalized
from grpo_math.system.reading import from_cell

BEFORE = ("body", "passage", "context", "paragraph", "article", "story", "scenario", "premise", "background", "table")
# Words in the names of columns that are a part of a problem.
PART = {*BEFORE, "statement", "conditions", "facts", "given", "numbers", "nums", "ctx", "stem"}
# Columns with numbers that are not a part of the problem.
OTHER = {
    *("source", "url", "title", "topic", "solution", "rationale", "explanation", "reasoning", "response", "responses"),
    *("output", "completion", "generation", "generations", "cot", "messages", "code", "equation", "formula"),
}
LISTS = ("options", "choices", "endings", "answer_choices", "answer_options", "answer_option_list", "option_list")
WRONG = re.compile(r"(?:distractor|(?:incorrect|wrong)_(?:answer|option|choice))s?_?\d?")
LABELLED = re.compile(r"(?:^|[\s,;])\(?([A-Za-z])\s*[).:]\s*(?=\S)")  # A) 21, (B) 30
LABEL = re.compile(r"(?i:(?:option|choice|answer)[\s_]*)?\(?([A-Za-z\d])\s*(?:[).:]?|[).:]\s*\S.*)", re.DOTALL)
TEXTS = ("text", "content", "value", "option")  # of an option that is an object
CIRCLED = str.maketrans("①②③④⑤⑥⑦⑧⑨⑩", ascii_uppercase[:10])
ORDERS = (ascii_uppercase, "0123456789", "123456789")
# The labels and the names of columns with an option each: option_a, choice1, opa, A.
NUMBERED = product(("option", "option_", "choice", "choice_", "ending", "ending_"), ORDERS)
OTHER_TONGUES = (
    *("alternativa", "opção", "opcao", "opción", "opcion", "opzione", "antwort", "réponse", "reponse", "proposition"),
    *("вариант", "选项", "選択肢", "보기", "선택지"),
)
TRANSLATED = product((start + gap for start in OTHER_TONGUES for gap in ("", "_")), ORDERS)
LETTERED = product(("answer", "answer_", "opt", "op", ""), ORDERS[:1])
COLUMNS = [{label: start + label.lower() for label in order} for start, order in (*NUMBERED, *TRANSLATED, *LETTERED)]
WORD = re.compile(r"\w+")
INDICES = {str(number): number for number in range(len(ascii_uppercase) + 1)}


def belongs(column: str) -> bool:
    """Return True if a column is a part of a problem by its name."""
    name = normalized(column)
    is_option = name in LISTS or WRONG.fullmatch(name) or any(name in names.values() for names in COLUMNS)
    return bool(is_option or PART & {*name.split("_")})


def unread(column: str, row: Mapping[str, Any]) -> bool:
    """Return True if a column that is not read looks like a part of the problem: by its name and new words, or by a
    sentence with numbers before a problem without any.

    >>> row = {"problem": "How many are left?", "answer": "25", "options": {}}
    >>> others = {"nums": [29, 4], "note": "Omar has 29 beads, he gives 4", "why": "29 - 4 is 25, so 25"}
    >>> [name for name in others if unread(name, {**row, "others": others})]
    ['nums', 'note']
    """
    content, name = row["others"].get(column), normalized(column)
    text = str(content) if isinstance(content, str | list | Mapping) else ""
    new = {*WORD.findall(text)} - {*WORD.findall(row["problem"])}
    # A copy of the problem with its solution is not a part of it.
    if row["problem"] in text or (row["options"] and not PART & {*name.split("_")}):
        return False
    numbers = {word for word in new if word.isdecimal()}
    if belongs(column) and len(name) > 1:
        return len(new) > (0 if name in LISTS or new == numbers else 2)
    is_other = OTHER & {*name.split("_")} or row["answer"] in text or re.search(r"\d", row["problem"])
    return len(new) > 4 and bool(numbers) and not is_other


def with_text_before(row: Mapping[str, Any], question: str) -> str:
    r"""Return a question with the text before it, if the row has that text in a separate column.

    >>> with_text_before({"body": "Omar has 29 beads and gives 4 away."}, "How many are left?")
    'Omar has 29 beads and gives 4 away.\nHow many are left?'
    """
    columns = (row[name] for name in BEFORE if name in row)
    texts = [text for text in columns if isinstance(text, str) and text.strip() not in question]
    return "\n".join([*texts, question])


def options(row: Mapping[str, Any], gold: str) -> dict[str, Any]:
    """Return the options of a row by their labels; {} without options. The row has its columns `by_name`.

    >>> options({"a": 6, "b": 7, "c": 8}, "B"), options({"a": 6, "b": 7, "c": 8}, "8")
    ({'A': 6, 'B': 7, 'C': 8}, {})
    >>> options({"distractor1": "6", "distractor2": "8"}, "7")
    {'A': '6', 'B': '7', 'C': '8'}
    """
    lists, wrongs, layouts = _option_columns(tuple(row))
    if not (lists or wrongs or layouts):
        return {}
    for name in lists:
        if row[name] is not None:
            return labelled(row[name])
    wrong = [row[name] for name in wrongs if row[name]]
    texts = wrong[0] if wrong and isinstance(wrong[0], list) else wrong
    if len(texts) > 1:
        # The options are sorted, so that a position does not reveal the right one.
        return labelled(sorted(map(str, [gold, *texts])))
    contents = [labelled({label: row.get(name) for label, name in names.items()}) for names in layouts]
    longest = max(contents, key=len, default={})
    # Columns a, b and c may be numbers of the problem.
    label = LABEL.fullmatch(gold)
    is_key = gold.upper() in longest or (label and label[1].upper() in longest)
    return {} if "a" in row and "A" not in row and not is_key else longest


@lru_cache(maxsize=1000)
def _option_columns(columns: tuple[str, ...]) -> tuple[list[str], list[str], list[dict[str, str]]]:
    """Return the columns with all options, with a wrong one each, and the layouts with one column per option."""
    layouts = [names for names in COLUMNS if next(iter(names.values())) in columns]
    return [name for name in LISTS if name in columns], [name for name in columns if WRONG.fullmatch(name)], layouts


def labelled(content: Any) -> dict[str, Any]:
    r"""Return options by their labels, from a list, a text, or a mapping; {} if the content is something else.

    >>> same = {"label": ["A", "B"], "text": ["38", "27.6"]}, "a ) 38 , b ) 27.6", "['38', '27.6']", ["A)38", "B)27.6"]
    >>> same = (*same, "① 38 ② 27.6", {"①": "38", "②": "27.6"})
    >>> all(labelled(content) == {"A": "38", "B": "27.6"} for content in same)
    True
    >>> labelled([{"label": "1", "text": "38"}, {"label": "2", "text": "27.6"}]), labelled([38, 27.6]), labelled("38")
    ({'1': '38', '2': '27.6'}, {'A': 38, 'B': 27.6}, {})
    """
    content = from_cell(content)
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, str):
        parts = LABELLED.split(re.sub("([①-⑩])", r" \1) ", content).translate(CIRCLED))
        pairs = zip(parts[1::2], parts[2::2], strict=True)
    elif isinstance(content, Mapping):
        labels, texts = content.get("label"), content.get("text")
        lists = isinstance(labels, list) and isinstance(texts, list) and zip(labels, texts, strict=False)
        pairs = lists or content.items()
    elif isinstance(content, list):
        items = [item[0] if isinstance(item, list) and len(item) == 1 else item for item in content]
        if items and all(isinstance(item, Mapping) for item in items):
            numbered = zip(ascii_uppercase, items, strict=False)
            pairs = (
                (item.get("label", letter), next(filter(None, map(item.get, TEXTS)), "")) for letter, item in numbered
            )
        else:
            from_text = labelled("\n".join(map(str, items)))  # ["A) 21", "B) 30"]
            pairs = from_text.items() or zip(ascii_uppercase, items, strict=False)
    by_label = {
        str(label).strip().upper().translate(CIRCLED): text.strip(" \n,;") if isinstance(text, str) else text
        for label, text in pairs
        if text not in (None, "")
    }
    return by_label if len(by_label) > 1 and any(order.startswith("".join(by_label)) for order in ORDERS) else {}


class Numbering(NamedTuple):
    """How the gold answers of a data set that are numbers name options."""

    are_texts: bool  # a number is the text of an option, not an index
    start: int  # the first index


def numbering(rows: Iterable[Mapping[str, Any]]) -> Numbering:
    """Return how the numbers among the gold answers name options, which only the whole set shows: a 2 alone may be an
    option, or the second or the third.

    Indices count from 1 if the labels do, or if the last option is counted so.
    """
    are_texts, from_one, has_zero = True, False, False
    for row in rows:
        if row["options"] and row["answer"] in INDICES:
            number = INDICES[row["answer"]]
            # The number 2 does not equal the text "2" here.
            are_texts &= row["written"] in row["options"].values()
            from_one |= number == len(row["options"]) or "1" in [*row["options"]][:1]
            has_zero |= number == 0
    return Numbering(are_texts, int(from_one and not has_zero))


def with_options(row: dict[str, Any], numbers: Numbering) -> dict[str, Any]:
    """Return a row with the options under its problem, and the letter of an option as its gold answer."""
    if not row["options"]:
        return row
    texts, problem = [*map(str, row["options"].values())], row["problem"]
    gold = row["answer"].translate(CIRCLED)
    if gold in INDICES and not numbers.are_texts:
        positions = {str(number + numbers.start): number for number in range(len(texts))}
    else:
        letters = ascii_uppercase[: len(texts)]
        positions = {name: number for names in (letters, texts, row["options"]) for number, name in enumerate(names)}
    label = LABEL.fullmatch(gold)
    position = positions.get(gold, positions.get(label[1].upper()) if label else None)
    lines = [f"({letter}) {text}" for letter, text in zip(ascii_uppercase, texts, strict=False)]
    # A problem may contain its options already.
    if not all(_squeezed(line) in _squeezed(problem) for line in lines):
        problem = "\n".join([problem, *lines])
    return {**row, "problem": problem, "answer": gold if position is None else ascii_uppercase[position]}


def _squeezed(text: str) -> str:
    return re.sub(r"\W", "", text).casefold()
