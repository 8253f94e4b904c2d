r"""What the last sentence of a text says of its subject: a formula without dollar signs, or "B is correct".

>>> predicate(r"We add. So the length is 3\sqrt{2}.").text, predicate("The roots are 2 and 3.").text
('3\\sqrt{2}', '2 and 3')

Does not read values that stand alone (sentence.py), which comes first.
"""

import re

from grpo_math.grading.commit import DANGER, HEDGE, not_meant
from grpo_math.grading.sentence import SENTENCE_END, Said
from grpo_math.grading.units import canonical

_SAYS = re.compile(
    r"(?P<subject>[A-Za-z][A-Za-z ,']{1,80}) (?:is|are|equals|is equal to|are equal to) "
    r"(?:(?:therefore|thus|then|exactly|simply|just|in),? )?"
    r"(?P<value>(?:[-−+]\s?)?(?=[\d(\[.√π]|\\[a-z{]|[A-Za-z]\s?(?:[-+*/^=<>≤≥]|\\[lg]e))"
    r"(?:[-−+\d.,/:^_(){}\[\]*|!=<>≤≥²³¹⁰⁴-⁹⁻½¼¾⅐-⅞π√∛∞∪°% ]|\\(?:text\s*\{[^{}]*\}|[A-Za-z]+|[{}|%,;!])"
    r"|\b(?:and|or)\b|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+?)(?P<unit>(?: [A-Za-z]+){1,3})?[.\s]*"
)
_CHOICE = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:(?:option|choice|answer) )?\(?([A-J])\)? is (?:the )?"
    r"(?:only )?(?:correct|right)(?: one| answer| option| choice)?[.!\s]*",
    re.IGNORECASE,
)
_COUNTED = re.compile(  # "The two points are", "from A to B and C": no danger there
    r"\b(?:[Pp]oints?|[Tt]wo|[Tt]hree|[Ff]our|(?:between )?[A-Z]{1,3} and [A-Z]{1,3})\b"
)
_FORMULA = re.compile(r"\d|\\[a-z]|[π√∞]")
_CLAIMS = re.compile(r"\b(?:and|or|if|when|while|say|says|see|let|each|every)\b", re.IGNORECASE)  # more than one thing


def predicate(text: str) -> Said | None:
    """The value that the last sentence gives its subject, all of it; None where words beside it may change it.

    >>> predicate("The point is (1, 2).").text, predicate("Half of the length is (1, 2)."), predicate("It is 5 now.")
    ('(1, 2)', None, None)
    """
    kept, start = _last_sentence(text)
    said = _SAYS.fullmatch(kept, start) if len(kept) - start < 300 else None
    if said is None or _FORMULA.search(said["value"]) is None or not_meant(said["subject"]):
        return None
    subject = _COUNTED.sub("", said["subject"])
    if any(pattern.search(subject) for pattern in (DANGER, HEDGE, _CLAIMS)):
        return None
    if said["unit"] is not None and canonical(said["unit"].strip()) is None:
        return None
    value = said["value"] + (said["unit"] or "")
    return Said(value, "predicate", said.start("value"), said.start("value") + len(value))


def choice(text: str) -> Said | None:
    """The letter that the last sentence calls the correct one.

    >>> choice("So (B) is correct.").text, choice("B or C is correct.")
    ('B', None)
    """
    if re.search("correct|right", text[-60:], re.IGNORECASE) is None:
        return None
    kept, start = _last_sentence(text)
    said = _CHOICE.fullmatch(kept, start) if len(kept) - start < 100 else None
    return None if said is None else Said(said[1], "last choice", *said.span(1))


def _last_sentence(text: str) -> tuple[str, int]:
    """The text without the space behind it, and where its last sentence begins; 400 characters are looked at."""
    kept = text.rstrip()
    start = max(kept.rfind("\n") + 1, len(kept) - 400)
    start = max((end.end() for end in SENTENCE_END.finditer(kept, start, len(kept) - 1)), default=start)
    return kept, start + len(kept[start:]) - len(kept[start:].lstrip())
