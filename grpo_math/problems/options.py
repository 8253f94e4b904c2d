r"""The options of a problem of multiple choice, by their labels: in one column, or in a column each.

The layouts are those of published sets. choices.py finds the option that a gold answer names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from numbers import Number
from string import ascii_uppercase
from typing import Any

from grpo_math.problems.columns import ABOUT, normalized
from grpo_math.system.reading import from_cell

# Words in the names of columns that are neither options nor another part of a problem.
OTHER = {
    *ABOUT,
    *("solution", "reasoning", "response", "responses", "output", "completion", "generation", "generations", "cot"),
    *("messages", "code", "equation", "formula", "tags", "topics", "categories", "keywords", "skills", "steps"),
    "hints",
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
# Ten labels: "answers" is not the option S.
COLUMNS = [
    {label: start + label.lower() for label in order[:10]} for start, order in (*NUMBERED, *TRANSLATED, *LETTERED)
]
INDEX = re.compile(r"\(?(\d\d?)(?:\.0)?\)?")  # pandas writes 2.0 for an index next to an empty cell


def has_wrong_options(row: Mapping[str, Any]) -> bool:
    """Return True if the options of a row are its gold answer and the texts of wrong ones."""
    lists, wrongs, _ = _option_columns(tuple(row))
    return bool(wrongs) and all(row[name] is None for name in lists)


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
    >>> same = (*same, [{"key": "B", "body": "27.6", "right": True}, {"key": "A", "body": "38", "right": False}])
    >>> all(labelled(content) == {"A": "38", "B": "27.6"} for content in same)
    True
    >>> labelled([{"label": "1", "text": "38"}, {"label": "2", "text": "27.6"}]), labelled([38, 27.6]), labelled("38")
    ({'1': '38', '2': '27.6'}, {'A': 38, 'B': 27.6}, {})
    """
    content = from_cell(content)
    if isinstance(content, Mapping) and all(isinstance(part, list) for part in content.values()):
        content = [dict(zip(content, cells, strict=True)) for cells in zip(*content.values(), strict=False)]
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, str):
        parts = LABELLED.split(re.sub("([①-⑩])", r" \1) ", content).translate(CIRCLED))
        pairs = zip(parts[1::2], parts[2::2], strict=True)
    elif isinstance(content, Mapping):
        pairs = content.items()
    elif isinstance(content, list):
        items = [item[0] if isinstance(item, list) and len(item) == 1 else item for item in content]
        if len(items) > len(ascii_uppercase):
            return {}
        if items and all(isinstance(item, Mapping) for item in items):
            pairs = _object_pairs(items)
        else:
            from_text = labelled("\n".join(map(str, items)))  # ["A) 21", "B) 30"]
            pairs = from_text.items() or zip(ascii_uppercase, items, strict=False)
    by_label = {
        str(label).strip().upper().translate(CIRCLED): text.strip(" \n,;") if isinstance(text, str) else text
        for label, text in pairs
        if text not in (None, "")
    }
    if len(by_label) < 2 or not _are_labels(by_label):
        return {}
    return by_label if isinstance(content, str) else dict(sorted(by_label.items()))


def _are_labels(texts: Iterable[str], orders: Sequence[str] = ORDERS) -> bool:
    labels = "".join(sorted(texts))
    return any(order.startswith(labels) for order in orders)


def _object_pairs(items: Sequence[Mapping[str, Any]]) -> Iterable[tuple[Any, Any]]:
    """Return the label and the text of each option that is an object; () if several keys may be the text."""
    columns: dict[Any, list[Any]] = {
        key: texts
        for key in items[0]
        if any(texts := [item.get(key) for item in items])
        and all(text is None or (isinstance(text, str | Number) and not isinstance(text, bool)) for text in texts)
    }
    labels = (
        key
        for key, texts in columns.items()
        # The texts of options may be numbers.
        if _are_labels([str(text).strip().upper() for text in texts], ORDERS[:1] if key in TEXTS else ORDERS)
    )
    label = "label" if "label" in columns else next(labels, None)
    texts = [key for key in TEXTS if key in columns.keys() - {label}] or [*columns.keys() - {label}]
    if len(texts) > 1 and texts[0] not in TEXTS:
        return ()
    return zip(columns.get(label, ascii_uppercase), columns[texts[0]], strict=False) if texts else ()


def option_lists(row: Mapping[str, Any], gold: str, problem_column: str = "") -> dict[str, dict[str, Any]]:
    """Return the options in each column that may have those which an index or a letter names.

    >>> row = {"alternatives": ["6", "7"], "tags": ["sums", "easy"], "points": 3}
    >>> option_lists(row, "1"), option_lists(row, "3"), option_lists(row, "x")
    ({'alternatives': {'A': '6', 'B': '7'}}, {}, {})
    """
    columns = {name: from_cell(row[name]) for name in row if name not in problem_column.split("+")}
    nested = [(name, cell) for name, cell in columns.items() if isinstance(cell, Mapping)]
    columns |= {f"{name}.{key}": cell[key] for name, cell in nested for key in cell}
    lists = {
        name: labelled(content)
        for name, content in columns.items()
        if isinstance(content, list | Mapping) and not OTHER & {*normalized(name).split("_")}
    }
    letter, index = option_letter(gold), option_index(gold)
    return {name: one for name, one in lists.items() if one and (letter in one or index in range(len(one) + 1))}


def option_letter(gold: str) -> str:
    """Return the letter of a gold answer that names an option so, as in "(b)"; "" for another one."""
    label = LABEL.fullmatch(gold)
    return label[1].upper() if label and label[1].isalpha() else ""


def option_index(gold: str) -> int | None:
    """Return a gold answer as an index; None if it cannot be one."""
    match = INDEX.fullmatch(gold)
    return int(match[1]) if match else None
