r"""The unit at the end of an answer: which one it is, in one spelling, and the answer without it.

>>> split("5 centimeters"), split(r"12\text{ cm}^2"), split("3 apples"), split("x+1")
(('5', 'cm'), ('12', 'cm^2'), ('3', ''), ('x+1', None))

Does not convert: 5 cm and 50 mm stay two answers.
"""

import re

NAMES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mile": "mi", "g": "gram", "kg": "kilogram",
    "mg": "milligram", "lb": "lbs pound", "oz": "ounce", "ton": "tonne", "s": "sec second", "min": "mins minute",
    "h": "hr hrs hour", "day": "", "week": "", "month": "", "year": "yr yrs", "l": "L liter litre",
    "ml": "mL milliliter millilitre", "gallon": "gal", "quart": "qt", "pint": "pt", "cup": "", "acre": "",
    "degree": "deg", "rad": "radian", "dollar": "usd USD", "cent": "", "euro": "eur EUR", "hz": "Hz hertz",
    "n": "N newton", "j": "J joule", "w": "W watt", "v": "V volt", "k": "K kelvin", "pa": "Pa pascal", "mole": "mol",
}  # fmt: skip
CANONICAL = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases.split())}
SINGLE = {"m", "g", "s", "h", "L", "l", "N", "J", "W", "V", "K"}
NOT_UNITS = (
    "and or pi sqrt sin cos tan cot sec csc log ln exp if mod infinity inf million billion trillion thousand hundred "
    "dozen over to arcsin arccos arctan abs not but is are equals times plus minus"
)
FUNCTION_WORDS = frozenset(NOT_UNITS.split())
EXPONENT = r"(?:\s*\^\s*(?:\{\s*[23]\s*\}|[23]))?"
IN_TEXT = re.compile(rf"\s*\\text\s*\{{\s*([^{{}}]*?)\s*\}}({EXPONENT})\s*$")
PLAIN = re.compile(rf"(?<=[\d)}}%°\s])(\s*)([A-Za-z][A-Za-z./()\- ]*)({EXPONENT})\s*$")
LEADING = re.compile(r"(?:USD|US\$|Rs\.?|EUR|GBP)\s*(?=[\d.])")


def split(text: str) -> tuple[str, str | None]:
    """The text without its unit, and the unit: None where there is none, "" where it measures nothing (apples)."""
    leading = LEADING.match(text)
    if leading is not None:
        return text[leading.end() :], "dollar" if "US" in leading.group() else ""
    if len(text) > 400:
        return text, None
    found = IN_TEXT.search(text)
    words = _tidy(found[1]) if found is not None else ""
    if found is not None and found.start() > 0 and words and not any(c.isdigit() for c in words):
        if words.split()[0].lower() in ("and", "or", "if"):
            return text, None
        before, unit = split(text[: found.start()].rstrip())
        return before, unit or canonical(words, found[2])
    found = PLAIN.search(text)
    if found is None or not re.search(r"\d|\\pi", text[: found.start()]):
        return text, None
    words = _tidy(found[2])
    if not words or any(word.lower() in FUNCTION_WORDS for word in re.split(r"[ /\-]", words)):
        return text, None
    letter = len(words.split()[0]) == 1
    attached = not found[1] and text[found.start() - 1] != " "
    if letter and (attached or (words not in SINGLE and "/" not in words)):  # 5m is five times m
        return text, None
    before = text[: found.start()].rstrip()
    if attached and len(words) <= 3 and words not in CANONICAL:  # 2xy
        return text, None
    if before.endswith(("+", "-", "*", "/", "=", "^", "_", ",", "(", "<", ">")):
        return text, None
    return before, canonical(words, found[3])


def canonical(words: str, exponent: str = "") -> str:
    """The unit's one spelling, or "" for words that measure nothing.

    >>> canonical("square inches"), canonical("miles per hour"), canonical("students")
    ('in^2', 'mile/h', '')
    """
    words = _tidy(words).rstrip(".")
    power = re.sub(r"\D", "", exponent)
    for pattern, n in ((r"^(?:square|sq\.?)\s+", "2"), (r"^(?:cubic|cu\.?)\s+", "3")):
        shorter = re.sub(pattern, "", words, flags=re.IGNORECASE)
        if shorter != words:
            words, power = shorter, n
    words = re.sub(r"\s+squared$", "", words) if words.endswith("squared") else words
    if words in ("mph", "MPH"):
        return "mile/h"
    pieces = [_one(piece) for piece in re.split(r"\s*/\s*|\s+per\s+(?:an?\s+)?|\s+an?\s+", words)]
    if pieces[0] == "":
        return ""
    return "/".join(p for p in pieces if p) + (f"^{power}" if power else "")


def _one(word: str) -> str:
    word = word.strip(" .")
    for candidate in (word, word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es")):
        if candidate in CANONICAL:
            return CANONICAL[candidate]
    return ""


def _tidy(words: str) -> str:
    return re.sub(r"\s+", " ", words.replace("\\", " ").replace("~", " ")).strip(" .")
