r"""Remove the punctuation around a value that does not change its meaning.

>>> strip_wrappers(" **$42$.** "), strip_wrappers(r"\[ x^2 \]"), strip_wrappers("`5`")
('42', 'x^2', '5')

Does not remove units, signs or brackets.
"""

import re

MAX_CHARACTERS = 2_000  # of a text that is read; gold answers of GSM8K and MATH have at most 159
DOLLAR = re.compile(r"(?<!\\)\\\$")  # an escaped one is money
EDGE = "".join(filter(str.isspace, map(chr, range(0x3001)))) + '`"“”„«»「」『』'
STOPS = ".,;:?。"
PAIRS = (("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("'", "'"))

# A backslash escape that a program has read as a control character: the "\\f" of "\\frac".
_LOST = re.compile(
    r"[\t\f\x08\r\v](?=(?:ext|imes|heta|an|frac|riangle|ag|o|au|rac|orall|oxed|eta|inom|egin|ar|ight|ho|ec|ee)(?![a-z]))"
)
_ESCAPES = {"\t": "\\t", "\f": "\\f", "\x08": "\\b", "\r": "\\r", "\v": "\\v"}


def repaired(gold: str) -> str:
    r"""Return a gold answer with the backslashes of commands that were lost.

    >>> repaired("\x0crac{1}{2}"), repaired("5\text{ cm}"), repaired("30^{circ}"), repaired("7")
    ('\\frac{1}{2}', '5\\text{ cm}', '30^{\\circ}', '7')
    """
    # Most texts. Control characters cannot be printed.
    if gold.isprintable() and "circ" not in gold:
        return gold
    return re.sub(r"(?<=\^)(\{?)circ(?![a-z])", r"\1\\circ", _LOST.sub(lambda lost: _ESCAPES[lost.group()], gold))


def strip_wrappers(text: str) -> str:
    """Return a text without the punctuation, bold marks and dollar signs around it."""
    while True:  # at most once for each kind of pair: an inner one of the same kind is kept
        text = _edged(text)
        for opening, closing in PAIRS:
            if text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening):
                inner = text[len(opening) : -len(closing)]
                if opening not in inner:
                    text = inner
                    break
        else:
            return text


def _edged(text: str) -> str:
    r"""Return a text without blanks and quotes at both ends and without punctuation at the end. ``\,`` is a space."""
    text = text.strip(EDGE)
    bare = text.rstrip(EDGE + STOPS)
    if bare.endswith("\\") and text[len(bare) :].startswith((",", ";", ":")):
        return text[: len(bare) + 1]
    return bare or text[:1]
