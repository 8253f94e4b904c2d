r"""A working of equations without words, line by line or joined by "so": its last step is the answer.

>>> last_step("48 / 2 = 24\n48 + 24 = 72"), last_step(r"2x = 10 \implies x = 5"), last_step("x = 5\nx = 6")
('48 + 24 = 72', 'x = 5', None)

Does not calculate: whether the last step is true is compared with the gold (relations.py).
"""

import re

_SO = re.compile(
    r"[,;]?\s?\b(?:so|thus|hence|therefore)\b,?(?: then\b)?"
    r"|[,;]?\s?(?:\\(?:implies|Rightarrow|Longrightarrow|therefore)(?![A-Za-z])|[⇒⟹∴→]|=>)",
    re.IGNORECASE,
)
_MARKS = re.compile(r"\$|&|\\(?:begin|end)\{(?:align|aligned|gather)\*?\}|\\\[|\\\]")
_RELATION = re.compile(r"=|<|>|\\[lg]e(?:q|qslant)?(?![A-Za-z])|[≤≥]|\\in(?![A-Za-z])")
_NAME = re.compile(r"\s*([A-Za-z])\s*\Z")
_OPERATED = re.compile(r"[\d)}%]\s*(?:[-+*/×÷·−]|\\(?:times|cdot|div)(?![A-Za-z]))")
_WORKED = re.compile(rf"{_OPERATED.pattern}|\^|\\(?!text)[a-z]|(?<![\\A-Za-z])(?:[A-Za-z]|[A-Z]{{2,3}})(?![A-Za-z])")


def last_step(text: str) -> str | None:
    """The last equation of several that follow from each other; None where they may be several answers.

    >>> last_step("x = 5"), last_step("∴ x = 5"), last_step("x = 5\\ny = 6"), last_step("x = 5, so y = 6")
    (None, 'x = 5', None, 'y = 6')
    >>> last_step("x = 3 + 4\\nx = 7")
    'x = 3 + 4 = 7'
    """
    lines = [line for line in _MARKS.sub("", text).replace("\\\\", "\n").split("\n") if line.strip()]
    steps: list[str] = []
    for step in (step for line in lines for step in _SO.split(line)):
        if steps and step.lstrip().startswith("="):
            steps[-1] += f" {step.lstrip()}"
        else:
            steps.append(step)
    if len(steps) < 2:
        return None
    steps = steps[not steps[0].strip() :]
    sides = [_sides(step) for step in steps]
    if not all(left.strip() and right.strip() and _WORKED.search(left) is not None for left, _, right in sides):
        return None
    named = [(match[1], right.strip()) for left, _, right in sides if (match := _NAME.match(left)) is not None]
    names = [name for name, _ in named]
    if len(named) < 2 or _NAME.match(sides[-1][0]) is None or (len(lines) == 1 and names[-1] not in names[:-1]):
        return steps[-1].strip()
    equal = {sign for _, sign, _ in sides} == {"="}
    worked = equal and len(set(names)) == 1 and any(map(_is_sum, (right for _, right in named[:-1])))
    return " = ".join([names[-1], *(right for _, right in named)]) if worked else None


def _is_sum(text: str) -> bool:
    """Is it a calculation without names?"""
    return _OPERATED.search(text) is not None and re.search("[A-Za-z]", re.sub(r"\\[a-z]+", "", text)) is None


def _sides(step: str) -> tuple[str, str, str]:
    """What stands before the first relation of a step, the relation, and what stands behind it."""
    relation = _RELATION.search(step)
    return ("", "", "") if relation is None else (step[: relation.start()], relation.group(), step[relation.end() :])
