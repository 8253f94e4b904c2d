r"""A line without a value below the answer: it ends the text, or is prose that leaves the answer alone.

>>> ends("Done."), ends(r"\end{align*}"), ends("That is what we need."), leaves_alone("That is what we need.")
(True, True, False, True)

Does not find values (sentence.py): a line that holds one is not for it.
"""

import re

from grpo_math.grading.commit import DANGER, HEDGE
from grpo_math.grading.spelled import NAMES

_STRUCTURE = re.compile(
    r"\\(?:begin|end)\{[a-z]+\*?\}|\\f?box(?:ed)?\s*\{\s*\}|\\(?:q?quad|right|hfill|noindent|(?:black)?square|Box|qed)\b"
    r"|</?[a-z]+/?>|```\w*|\\?[][()]|[\s.,;:!?$*_\"'`~#&>\\∎■✓-]"
)
_CLOSING = re.compile(
    r"(?:(?:(?:all |that(?: i)?s )?(?:done|correct|right|verified|checked|solved|finished|good|great|it|all)|q ?e ?d"
    r"|yes|(?:the )?end|thank(?:s| you)|good luck|cheers|perfect|ok(?:ay)?|(?:i )?hope (?:this|that|it) helps(?: you)?"
    r"|(?:please )?(?:let me know if you|feel free to ask)(?: [a-z]+){1,8})(?: |\Z)){1,3}",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[A-Za-z'’]+(?:[,:]? [A-Za-z'’]+){2,}[.!:,]?")
_OF_ALL = re.compile(r"\A(?:that|this|it)(?:['’]s| is) not ", re.IGNORECASE)  # "That's not hard."
_STOP = re.compile(r"(?<=[.!]) +")
_VALUE = re.compile(rf"\b(?:{NAMES}|[B-HJ-Z])\b", re.IGNORECASE)


def ends(line: str) -> bool:
    """Does it only close what stands above, by signs or a word?"""
    words = " ".join(_STRUCTURE.sub(" ", line).split())
    return not words or _CLOSING.fullmatch(words) is not None


def leaves_alone(line: str) -> bool:
    """Are these sentences of words, none of which is a number, a choice or a denial?

    >>> leaves_alone("He paid twice as much."), leaves_alone("never east"), leaves_alone("hexagon")
    (False, False, False)
    """
    said = _OF_ALL.sub("", line.strip())
    words = all(_SENTENCE.fullmatch(sentence) is not None for sentence in _STOP.split(line.strip()))
    return words and not any(pattern.search(said) for pattern in (DANGER, HEDGE, _VALUE))
