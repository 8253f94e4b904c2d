"""The parts of a problem in separate columns: a text before the question, and columns that look like a part and are not
read. options.py finds the options.

``--columns problem=NAME`` keeps the text before the question out.
"""

import re
from collections.abc import Mapping
from typing import Any

from grpo_math.problems.columns import normalized
from grpo_math.problems.options import COLUMNS, LISTS, OTHER, WRONG

BEFORE = ("body", "passage", "context", "paragraph", "article", "story", "scenario", "premise", "background", "table")
# Words in the names of columns that are a part of a problem.
PART = {*BEFORE, "statement", "conditions", "facts", "given", "numbers", "nums", "ctx", "stem"}
WORD = re.compile(r"\w+")


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
