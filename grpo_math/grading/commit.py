r"""Does the text around an answer stand by it? It may deny it, offer another beside it, or take it back afterwards.

>>> denied("The answer is not "), denied("It is not 5. It is "), one_of_several("either 5 or x = ")
(True, False, True)
>>> alternative(" (or 5)."), alternative(" dollars."), taken_back(". Wait, no.")
(True, False, True)

Does not find answers (extract.py) and does not read them: what it cannot tell counts as standing by the answer.
"""

import re

from grpo_math.grading.spelled import CARDINALS

BESIDE = 60  # characters before an answer that are looked at
AFTERWARDS = 400  # characters behind it in which it may be taken back
CUE = re.compile(
    r"n['’]t\b|(?:(?<![A-Za-z])|(?<=\\pi))(?:n?or|n?either|not|never|cannot|but|except)\b", re.IGNORECASE
)  # asked first, since it is quick

# ---------------------------------------------------------------------------- what may stand between a word and a value

_FILL = (
    r"(?:[ \t]|\n(?=\$\$|\\\[)|[$*_(\\\[{}\"']|[A-Za-z]\s?="
    r"|\b(?:the|its?|it's|is|that|my|final|correct|right|answer|option|choice|simply|exactly|equal(?: to)?)\b"
    r"|\b(?:be|been|an?|approx)\b|(?:text|math|[fm]?box)[a-z]*(?=\s*\{)"
    r"){0,16}\Z"
)
_MAYBE = r"(?:\s+(?:maybe|perhaps|possibly|even|else)\b)?"
_ANSWER_IS = r"\b(?:answer|result|solution)s? (?:is|are)\b"
_NUMBER = r"-?\d[\d.,/]*"
_VALUE = (
    r"(?:[$*_(\\\[{\"'-]|\s|####|<answer>)*"
    r"(?:[−+]?[.\d][\d.,/]*(?![\w(^])|f?box(?:ed)?(?![a-z])(?!\s*\{\s*\})|d?frac|sqrt|pi\b|text|(?<=\\)(?:hat|neg|not)\b"
    r"|(?-i:\(?[A-J](?:\)|(?=\s*(?:[.,;!?]|or\b|\Z)))))"
)

# ----------------------------------------------------------------------------------------------------- before an answer

_BUT = r"(?:any|every|all)(?:thing)? (?:but|except)"
_DENIAL = re.compile(
    rf"(?:(?:(?<![A-Za-z])|(?<=\\pi))(?:not|never|cannot|neither|nor|{_BUT})|n['’]t){_FILL}", re.IGNORECASE
)
_OR = re.compile(rf"(?:(?<![A-Za-z])(?:n?or|either|neither)\b{_MAYBE}){_FILL}", re.IGNORECASE)
_SAID = re.compile(
    rf"\b(?:either|neither)\b|{_ANSWER_IS}:? \$?\(?(?:{_NUMBER}|[A-J])\)?[$,\s]*(?:n?or\b|\Z)", re.IGNORECASE
)
_ANSWERED = re.compile(_ANSWER_IS, re.IGNORECASE)
_VALUE_BEFORE = re.compile(rf"(?<![\w)}}.^+*/-])(?:([A-Za-z])\s?=\s?)?\$?(?:{_NUMBER}|\([A-J]\))\Z")
_JUST_SAID = re.compile(
    r"\b(?:answer|result|solution)s?(?: is| are| =|:)\s?[$(]{0,2}(-?\d(?:[\d.,/]*\d)?|[A-J])[$)]{0,2}"
    r"[,;]?\s{1,2}(?:and )?(?:the |my |our )?(?:final |correct )?\Z",
    re.IGNORECASE,
)
_GOES_ON = re.compile(r"(?:[=+*/^<>(-]|\\[a-z]+|\bof)\s*[\\$]*\Z")

# ----------------------------------------------------------------------------------------------------- behind an answer

_IN_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}")
_ALTERNATIVE = re.compile(
    r"[\s$.*_)\]}°%!?]{0,12}(?:[A-Za-z]{2,12}\s){0,2}[\s,;(]{0,8}"
    r"(?:or|and/or|nor|possibly|maybe|perhaps|alternatively|either|otherwise)\b"
    r"(?:\s+(?:maybe|perhaps|possibly|even|else|also|the answer is|it is|it's|the|answer|is|option|choice)\b){0,4}"
    rf"[\s,:]*{_VALUE}",
    re.IGNORECASE,
)
_OR_WORDS = re.compile(r"[\s$*)\]},]{0,8}\b(?:or|and/or)\s(?!equivalent|simply\b|so\b)", re.IGNORECASE)
_LISTED = re.compile(rf"[\s$*_)]{{0,8}}(?:,|;|/|\band\b)[ \t]*(?:and\s+|or\s+)?{_VALUE}", re.IGNORECASE)
_ASKED = re.compile(r"[\s$*)\]}]{0,8}\?")
_FALSE = r"(?:\w+ly )?(?:false|wrong|incorrect|not (?:right|correct|true|(?:it|the|so|my)\b))"
_LAID_OUT = re.compile(r"\\(?:text|math)[a-z]*|[\s{}$]")
_BACK = re.compile(
    "|".join(
        [
            r"\bwait\b|\bkidding\b|\bscratch that\b|\bcorrection\b|\b(?:a|my) mistake\b|\bwas mistaken\b|\boops\b",
            r"\bi me?ant?\b|\bhold on\b|\bsecond thoughts?\b|\b(?:disregard|ignore) (?:that|this|the)\b|\bnope\b",
            r"\bnever ?mind\b|\bjoking\b|\bi(?:'m| am) not sure\b|\bsorry\b|\bshould have been\b|\bi doubt\b",
            r"\((?:wrong|incorrect)\)|\A[^A-Za-z\n]{0,20}(?:x : x = )?not equal\b",
            r"\bdon['’]t (?:trust|believe)\b|\bnot the answer\b|\A(?:[^.\n]|\.(?=[}\d])){0,40}\b(?:wrong|incorrect)\b",
            rf"\b(?:this|that|it|answer|box|above)(?:'s| is| was| are) {_FALSE}",
            rf"\A(?:[^.!?\n]|\.(?=[\}}\d])){{0,40}}?(?:\b|[\s$}}])(?:is|was|are)"
            rf"(?:n['’]t (?:right|correct|true|it|so|my)\b| {_FALSE})",
            r"\A[\s\"'`*$}]*not\s+(?:equal\b|[$\\({]*\d)",
            r"(?:\A|[.,;?!\n—-])\s*no\b(?=[,.;:!—-]|\s*\Z)|(?:\A|[.!?\n])\s*actually,? [-$\\\d]",
            r"\banswer(?: is|:)[*\s]{0,4}(?:not|never)\s[^a-z]{0,4}(?:equal|[\d\\(]|[a-z]\s?=)",
            r"\b(?:any|every)thing (?:but|except) \S{1,40}\s*(?:\n|\Z)",
            r"\bactually,? (?:the answer|it(?:'s| is)|that is|no|not)\b",
        ]
    ),
    re.IGNORECASE,
)
_NOT_MEANT = re.compile(
    r"\bhad (?:we|i|it|you|they|he|she|the)\b|\bif (?:we|i|it|you|they|he|she) had\b|\bi had\b|\bcompare\b"
    r"|\bothers\b|\bother (?:people|persons?|one|answers?|results?|solutions?|values?|books?|texts?)\b|\bat first\b"
    r"|\b(?:some|they|people|who|book|friend|problem) (?:would |might |may )?(?:say|claim|think|argue)s?\b"
    r"|\b(?:check|verify|said|claimed|thought|believed|wrong(?:ly)?|mistaken(?:ly)?|pretend|suppose|not)\b"
    r"|\bguessed (?=[\d$(])"
    r"|(?<!\bhis )(?<!\bher )(?<!\btheir )\bguess\b"
    r"|\bhypothetically\b|n['’]t\b|\bdoubt(?:s|ed|ful)?\b|\banswer (?:plus|minus|times|divided|squared|cubed)\b"
    r"|\b(?:opposite|reciprocal|inverse|negative|square|root|half|third|double) of (?:the|my|our) (?:answer\b|\Z)",
    re.IGNORECASE,
)
_LEADS_ON = re.compile(
    r"\b(?:then|so|thus|therefore|hence|finally|gives?|giving|next|which|means|now|get|after|yields?)\b|=>|\\implies",
    re.IGNORECASE,
)

# ------------------------------------------------------------------------------------------------ words beside a number

HEDGE = re.compile(
    r"(?<![A-Za-z])(?:either|neither|nor|one of|any of|perhaps|maybe|possibly|might|could be"
    rf"|may be|probably|between(?=[\s$\\(]*(?:\d|\b(?:{CARDINALS})\b)))\b",
    re.IGNORECASE,
)
_CHANGING = (
    "not no nor never neither either or but anything nothing everything opposite inverse reciprocal without hardly "
    "unlike maybe perhaps possibly might could may wrong incorrect false negative minus plus times over divided half "
    "halves thirds? quarters? percent pct squared? cubed? factorial dozens? hundreds? thousands? millions? billions? "
    "unless except root twice double triple thrice mod modulo if point almost nearly under above below between "
    "infinity etc"
)
DANGER = re.compile(
    rf"(?:(?<![A-Za-z])(?:{'|'.join(_CHANGING.split())}|{CARDINALS}|at (?:least|most)|one of"
    r"|(?:less|more|fewer|greater|larger|smaller|other) than)(?![A-Za-z])|n['’]t\b)",
    re.IGNORECASE,
)  # words beside a number that may make it another one


def denied(before: str) -> bool:
    """Does what stands before an answer deny it?"""
    return denied_from(before) is not None


def denied_from(before: str) -> int | None:
    """Where the words begin that deny it.

    >>> denied_from("It is not "), denied_from("It is ")
    (6, None)
    """
    near = before[-BESIDE:]
    denial = _DENIAL.search(near) if CUE.search(near) is not None else None
    return None if denial is None else len(before) - len(near) + denial.start()


def one_of_several(before: str) -> bool:
    """Does what stands before an answer offer it beside another, as in "5 or "?

    >>> one_of_several("It is 5 or "), one_of_several("x = 5 or x = "), one_of_several("So 2x = 10, or x = ")
    (True, True, False)
    """
    if CUE.search(before[-BESIDE:]) is None:
        return False
    clause = re.split(r"[.!?]\s(?!or\b)|\n", before[-AFTERWARDS:])[-1]
    link = _OR.search(clause)
    if link is None:
        return False
    left = clause[: link.start()].rstrip(" ,$*.")
    value = _VALUE_BEFORE.search(left)
    if not left or _SAID.search(clause) or (_ANSWERED.search(left) and link.group().rstrip().endswith(("the", "my"))):
        return True
    if value is None:
        return False
    named = value[1] is not None and re.search(rf"\b{value[1]}\s?=", link.group()) is not None
    return named or (value[1] is None and _GOES_ON.search(left[: value.start()]) is None)  # not "2x = 10, or x = 5"


def just_said(before: str, answer: str) -> bool:
    """Does "the answer is", in the sentence in which it stands, follow another that says something else?

    >>> just_said("The answer is 5 and the ", "6"), just_said("The answer is 6, the ", "6")
    (True, False)
    """
    said = _JUST_SAID.search(before[-BESIDE:])
    return said is not None and said[1] != answer


def alternative(after: str, answer: str = "0") -> bool:
    """Does what stands behind an answer offer another: an "or" with a value, or a list that goes on? Behind one
    that is words, an "or" with other words does.

    >>> alternative(" or 6"), alternative(" or so", "5"), alternative(" or triangle", "hexagon")
    (True, False, True)
    """
    plain = _IN_TEXT.sub(r"\1", after[:AFTERWARDS])
    if _OR_WORDS.match(plain) is not None and re.search(r"\d", answer) is None:
        return True
    return any(pattern.match(plain) is not None for pattern in (_ALTERNATIVE, _LISTED, _ASKED))


def taken_back(after: str, answer: str = "") -> bool:
    """Does what stands behind an answer take it back?

    >>> taken_back(". Wait, no."), taken_back(", not 6.", "5"), taken_back(", not 5.", "5")
    (True, False, True)
    """
    beside = after[:AFTERWARDS].lstrip()
    same = re.escape(_LAID_OUT.sub("", answer[:AFTERWARDS]))
    if same and re.search(rf"(?<![A-Za-z])(?:not|never){same}(?!\w|\.\d)", _LAID_OUT.sub("", beside)):
        return True
    if "\\text" in beside:
        beside = re.sub(r"[.,;](?=\\text\s*\{\s*[a-z])", "", beside).replace("\\text{", " ")
    return _BACK.search(beside) is not None


def not_meant(before: str) -> bool:
    """Does "the answer is" stand in a sentence about what others say, or what would have been?

    >>> not_meant("Others say "), not_meant("Had we added, "), not_meant("They say it rains. So ")
    (True, True, False)
    """
    clause = re.split(r"[.!?]\s|\n|,\s(?:so|thus|therefore|hence|but)\b", before[-2 * BESIDE :])[-1]
    return _NOT_MEANT.search(clause) is not None


def leads_on(between: str) -> bool:
    """Do the words between two answers lead from the first, an interim result, to the second?

    >>> leads_on(", then "), leads_on(" or ")
    (True, False)
    """
    return _LEADS_ON.search(between) is not None
