r"""The kinds of faults of a single row: a table of a name, a test, a remedy, and whether the row is left out.

>>> rows = [{"problem": "What is 3 + 4?", "answer": text} for text in ("7", "the second", "cm", "N/A")]
>>> [fault.check for row in rows for fault in faults(row)]
['gold answers that are a unit only', 'no gold answer']
>>> [fault.check for fault in faults({"problem": r"Find $\sqrt{8}$. It is \boxed{7}.", "answer": "7"})]
['problems that contain their answer']
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from grpo_math.checks.golds import DAMAGED, ONE_CHOICE, WHOLE_NUMBER, is_damaged, is_own_text, words
from grpo_math.errors import Finding, escaped
from grpo_math.grading.equal.units import read_unit
from grpo_math.grading.where import find
from grpo_math.problems.contamination import whole

SHOWN = 80  # characters of an example
PROSE, SENTENCE_WORDS = 5, 3  # words of a gold answer that nobody can match, and of one with a full stop

WRAPPED = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}|[$~]")
# A gold answer that means "no answer". Longer ones are prose.
NO_GOLD = frozenset(
    (
        *("", "n/a", "n.a", "na", "nan", "none", "null", "[]", "tbd", "todo", "error", "unknown", "unsolved", "proof"),
        *("not found", "not available", "not provided", "not given", "not determined", "not sure", "not known"),
        *("no answer", "no final answer", "omitted", "missing", "pending", "varies", "solution", "explanation"),
        *("see solution", "undetermined", "keine lösung", "keine antwort", "unbekannt", "pas de réponse", "inconnu"),
        *("sin respuesta", "desconocido", "нет ответа", "неизвестно", "略", "无", "不确定", "无法确定"),
    )
)
DEGREES = re.compile(r"\^?\{?\\(?:circ|degree)\}?|\\?[%$]?")

Row = Mapping[str, Any]


class Kind(NamedTuple):
    """A kind of fault. ``test`` returns what to show of a row, True for its gold answer, or something false."""

    name: str
    remedy: str
    test: Callable[[Row], object] = lambda row: None
    left_out: bool = True

    def finding(self, text: object, *words: object) -> Finding:
        """Return a row of this kind as a finding, an error if the row is left out. ``words``: for the name."""
        level = "error" if self.left_out else "warning"
        return Finding(level, str(text), self.remedy, self.name.format(*words))


def faults(row: Row) -> Iterator[Finding]:
    """Yield the first fault of a gold answer, and that of the problem."""
    kinds = () if WHOLE_NUMBER.fullmatch(row["answer"]) else GOLD_KINDS
    for kind in next(((kind,) for kind in kinds if kind.test(row)), ()):
        yield kind.finding(shown(row["answer"]))
    if end := _contains_answer(row):
        yield CONTAINS_ANSWER.finding(shown(end))


def shown(text: object) -> str:
    return repr(escaped(str(text))[:SHOWN])


def _plain(row: Row) -> str:
    return WRAPPED.sub(r"\1", row["answer"]).strip()


def _is_unit(row: Row) -> object:
    plain = _plain(row)
    # One letter may be a variable.
    unit = read_unit(f"\\text{{{plain}}}" if len(plain) > 1 else plain)
    return (unit and not re.match("(?:an?|the) ", plain, re.IGNORECASE)) or DEGREES.fullmatch(plain)


def _is_prose(row: Row) -> bool:
    parts = words(row["answer"])
    return len(parts) >= PROSE or (len(parts) >= SENTENCE_WORDS and row["answer"].endswith((".", "!", "。")))


def _contains_answer(row: Row) -> str:
    # Most problems lack a letter or a digit of their answer, and need no search. Signs of other scripts may be equal.
    problem = row["problem"].lower()
    may_be = not problem.isascii() or {*filter(str.isalnum, row["answer"].casefold())} <= {*problem}
    answer = find(row["problem"] if may_be else "", only_marked=True)
    is_marked = answer.how != "value" and whole(row["answer"]) in (whole(answer.text), whole(answer.text.rstrip(" )]")))
    return row["problem"][-60:] if is_marked else ""


NO_ANSWER = Kind("no gold answer", "add the answers", lambda row: _plain(row).casefold().strip(" -.?_") in NO_GOLD)
CHOICES = Kind(
    "multiple-choice letters",
    "ask for the value, because a guess hits a letter, or give --keep_choices",
    lambda row: ONE_CHOICE.fullmatch(_plain(row)),
)
UNIT = Kind("gold answers that are a unit only", "add the number", _is_unit)
IS_DAMAGED = Kind(f"gold answers that are {DAMAGED}", "write the answers again", lambda row: is_damaged(row["answer"]))
IN_PROSE = Kind("gold answers in prose, which nobody can match", "write the value alone", _is_prose)
BY_TEXT = Kind(
    "gold answers that nobody matches but in the same words",
    "write the value alone",
    lambda row: is_own_text(row["answer"], row["problem"]),
    left_out=False,
)
# The first that is true counts.
GOLD_KINDS = (NO_ANSWER, CHOICES, UNIT, IS_DAMAGED, IN_PROSE, BY_TEXT)
# No value that a model answers is correct.
NEVER_CORRECT = {NO_ANSWER.name, UNIT.name, IN_PROSE.name}
CONTAINS_ANSWER = Kind("problems that contain their answer", "cut the solution off")
# audit.py finds these, by comparing rows with each other, with a test set or with the grader.
UNUSABLE = Kind("rows that cannot be used", "correct them")
LONG = Kind("problems longer than {} tokens", "shorten them, or raise --prompt_tokens")
NOT_CORRECT = Kind("gold answers that are not correct against themselves", "write them as the grader reads them")
CONTRADICTORY = Kind("contradictory gold answers", "keep the right one")
REPEATED = Kind("near-duplicate problems", "keep one")
IN_A_TEST = Kind("problems of {}, a test set", "leave them out, or the accuracy on the set means nothing")
NOT_BARE = Kind("gold answers that are not correct against their number", "write the number as the grader reads it")
OWN_TEXT = Kind(
    "gold answers that are correct only in their own text",
    "--bare_numbers writes their numbers in a column",
    left_out=False,
)
