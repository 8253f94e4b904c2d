r"""The unit at the end of an answer: which one it is, in one spelling, and the answer without it.

A unit is a measure (``cm^2``, ``mile/h``, ``dollar``) or names what is counted (``#apple``). Every word of it must be
known: a measure, a noun of nouns.py, a word of the gold's own, or one of a few that lead up to them or follow ("more",
"per", "in total"). Where a word is left over there is no unit, and the answer cannot be read as a number.

>>> split("5 centimeters"), split(r"12\text{ cm}^2"), split("3 red apples"), split("x+1")
(('5', 'cm'), ('12', 'cm^2'), ('3', '#apple'), ('x+1', None))
>>> split("5 maybe"), split("5 less apples"), split(r"\$5"), agree("dollar", "cent"), agree("#apple", None)
(('5 maybe', None), ('5 less apples', None), ('5', 'dollar'), False, True)

Does not convert: 5 cm and 50 mm stay two answers.
"""

import re

from grpo_math.grading.nouns import COUNTED

NAMES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch", "ft": "foot feet", "yd": "yard", "mile": "mi", "g": "gram gm",
    "kg": "kilogram kilo", "mg": "milligram", "lb": "lbs pound", "oz": "ounce", "ton": "tonne", "s": "sec second",
    "ms": "millisecond", "min": "mins minute", "h": "hr hrs hour", "day": "", "week": "wk", "month": "",
    "year": "yr yrs", "decade": "", "century": "", "l": "L liter litre", "ml": "mL milliliter millilitre",
    "gallon": "gal", "quart": "qt", "pint": "pt", "cup": "", "tbsp": "tablespoon", "tsp": "teaspoon", "acre": "",
    "hectare": "ha", "degree": "deg °", "rad": "radian", "dollar": "usd USD buck", "cent": "¢", "euro": "eur EUR €",
    "pound sterling": "£ GBP", "yen": "¥ JPY", "rupee": "₹ Rs INR", "yuan": "CNY RMB", "hz": "Hz hertz",
    "n": "N newton", "j": "J joule", "kj": "kJ kilojoule", "w": "W watt", "kw": "kW kilowatt", "v": "V volt",
    "a": "A amp ampere", "k": "K kelvin", "pa": "Pa pascal", "kpa": "kPa", "atm": "atmosphere", "mole": "mol",
    "ohm": "Ω", "gb": "GB gigabyte", "mb": "MB megabyte", "kb": "KB kilobyte", "byte": "", "bit": "", "unit": "",
    "calorie": "cal kcal", "celsius": "", "fahrenheit": "", "mph": "MPH", "kph": "kmh", "rpm": "", "knot": "",
}  # fmt: skip
CANONICAL = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases.split())}
SPEEDS = {"mph": "mile/h", "kph": "km/h", "degree celsius": "celsius", "degree fahrenheit": "fahrenheit"}
ONE_LETTER = frozenset("mgshLlNJWVKA")
IRREGULAR = {
    "people": "person", "men": "man", "women": "woman", "children": "child", "teeth": "tooth", "mice": "mouse",
    "geese": "goose", "leaves": "leaf", "loaves": "loaf", "shelves": "shelf", "knives": "knife", "wolves": "wolf",
    "calves": "calf", "elves": "elf", "scarves": "scarf", "vertices": "vertex", "vertexes": "vertex",
    "inches": "in", "feet": "ft", "centuries": "century", "buses": "bus",
}  # fmt: skip
ALIKE = {
    "person": "people",
    "man": "people",
    "woman": "people",
    "child": "people",
    "kid": "people",
    "student": "people",
}
_ADJECTIVES = (
    "more additional extra whole total full new different possible distinct unique real positive such red blue green "
    "yellow orange purple pink black white brown gray grey gold silver small large big little long short tall old "
    "young male female adult remaining other separate complete individual fresh hot cold consecutive right equal "
    "prime ordered rectangular"
)  # none that lowers, raises or denies a number
ADJECTIVES = frozenset(_ADJECTIVES.split())
ENDINGS = "left total altogether old long tall wide high deep away apart all remaining overall together"
WORDS_OF_A_KIND = {
    "S": "square sq cubic cu", "Q": "squared cubed", "P": "per /", "a": "a an", "e": "each every",
    "o": "of for in on at from to with", "t": "the his her their its our my", "T": ENDINGS,
}  # fmt: skip
CLASSES = {word: kind for kind, words in WORDS_OF_A_KIND.items() for word in words.split()}
HEAD = "(?:SM+|M+Q?|[AN]*N|A+M)"
PHRASE = re.compile(
    rf"(?:{HEAD})(?:(?:P|a|o?e|oa)t?(?:SM|MQ?|A*N+))*(?:ot?(?:A*[NM]+)|o?T|oe?T|e)*|ot?A*[NM]+|oT|T|e|(?:P|a|oe)(?:N|M)"
)
TOKEN = re.compile(r"[A-Za-z°€£¥₹¢Ω]+(?:-[A-Za-z]+)*|/")
EXPONENT = r"(?:\s*\^\s*(?:\{\s*-?[1-4]\s*\}|[1-4]))?"
TRAIL = re.compile(rf"(?:[A-Za-z°€£¥₹¢Ω][A-Za-z°€£¥₹¢Ω./\- ]*)({EXPONENT})\Z")
IN_TEXT = re.compile(rf"\\text\s*\{{\s*([^{{}}]*?)\s*\}}({EXPONENT})\s*\Z")
MONEY = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
LEADING = re.compile(r"(-?)\s*(?:(US|CA|AU)?\s*\\?([$€£¥₹])|(USD|EUR|GBP|JPY|INR|Rs\.?))\s*(?=-?[\d.\\({])")
MAX_CHARACTERS = 400


def split(text: str, own: frozenset[str] = frozenset()) -> tuple[str, str | None]:
    """The text without its unit, and the unit; None where there is none. ``own`` are further words that may be it."""
    leading = LEADING.match(text)
    unit: str | None
    if leading is not None:
        sign, _, symbol, code = leading.groups()
        unit = MONEY[symbol] if symbol else CANONICAL[code.rstrip(".")]
        bare, after = split(text[leading.end() :], own)
        per = (after or "").removeprefix(unit)
        return sign + bare, unit + per if per.startswith("/") else unit if agree(unit, after) else f"{unit} {after}"
    if len(text) > MAX_CHARACTERS:
        return text, None
    if text.endswith(("\\$", "€", "£", "¥", "₹")) and re.search(r"\d\s*(?:\\\$|.)\Z", text):
        return text[:-1].removesuffix("\\").rstrip(), MONEY[text[-1]]
    found = IN_TEXT.search(text)
    if found is not None and found.start() > 0:
        unit = canonical(found[1], found[2], own)
        before = text[: found.start()].rstrip(" ~")
        if unit is None or not before or before.endswith(("_", "^", "=", "+", "-", ",", "(")):
            return text, None
        bare, more = split(before, own)  # "5 miles\text{ per hour}"
        return (bare, f"{more}{unit}" if unit.startswith("/") else f"{more} {unit}") if more else (before, unit)
    return _split_plain(text, own)


def _split_plain(text: str, own: frozenset[str]) -> tuple[str, str | None]:
    """The longest run of words at the end that is a unit and stands behind a value."""
    found = TRAIL.search(text, max(0, len(text) - 120))
    if found is None or re.search(r"\d|\\pi", text[: found.start()]) is None:
        return text, None
    for start in [found.start(), *(found.start() + m.end() for m in re.finditer(r"[ ]", found.group()))]:
        before, words = text[:start].rstrip(), text[start : found.start(1)].strip()
        attached = start > 0 and text[start - 1] != " "
        if not words or not before or (attached and (len(words) < 2 or words.split()[0].lower() not in CANONICAL)):
            continue
        if len(words) == 1 and words not in ONE_LETTER and words not in "°€£¥₹¢Ω":
            continue
        if before.endswith(("+", "-", "*", "/", "=", "^", "_", ",", "(", "<", ">", "\\")):
            continue
        unit = canonical(words, found[1], own)
        if unit is not None and re.search(
            r"[\d)}%°!]\Z|\\pi\Z|(?<![A-Za-z])(?:million|billion|trillion|thousand|hundred|dozen|[a-z])\Z", before
        ):
            return before, unit
    return text, None


def canonical(words: str, exponent: str = "", own: frozenset[str] = frozenset()) -> str | None:
    """The unit's one spelling; None where a word is not known.

    >>> canonical("square inches"), canonical("miles per hour"), canonical("more students"), canonical("or so")
    ('in^2', 'mile/h', '#people', None)
    """
    tokens = [token.strip("-") for token in TOKEN.findall(words.replace("\\", " ").replace("~", " "))]
    if not tokens or re.sub(r"[A-Za-z°€£¥₹¢Ω/.\- ,\\~]", "", words):
        return None
    singular = [_singular(token) for token in tokens]
    kinds = "".join(_kind(token, one, own) for token, one in zip(tokens, singular, strict=True))
    kinds = f"{kinds[:-1]}M" if tokens[-1] == "in" else kinds  # inches, where nothing follows
    if PHRASE.fullmatch(kinds) is None:
        return None
    power = re.sub(r"[^\d-]", "", exponent)
    measured, nouns, over = "", "", False
    if power and ("M" not in kinds or {"S", "Q"} & {*kinds}):
        return None
    for kind, token, one in zip(kinds, tokens, singular, strict=True):
        if kind == "S":
            power = "2" if token.lower().startswith("s") else "3"
        elif kind == "Q":
            power = "2" if token.lower() == "squared" else "3"
        elif kind == "M":
            measured += ("/" if over else " " if measured else "") + CANONICAL[one]
            over = False
        elif kind == "N" and not over and not measured:
            nouns = one  # the last of "orange juice cartons"
        elif kind in "Pae" or (kind == "o" and measured):
            over = True
    if measured and not nouns:
        measured = "/".join(SPEEDS.get(part, part) for part in measured.split("/"))
        return measured + (f"^{power}" if power not in ("", "1") else "")
    return f"#{ALIKE.get(nouns, nouns)}"


def agree(gold: str | None, answer: str | None) -> bool:
    """May these be the units of equal answers? One side may leave its unit out; two units must be the same."""
    if gold is None or answer is None or gold == answer:
        return True
    if gold.startswith("#") and answer.startswith("#"):
        return "#" in (gold, answer)
    if "#" in (gold, answer):  # "in total"
        return True
    if "unit" in (gold.partition("^")[0], answer.partition("^")[0]):  # "square units" are no measure
        return "#" not in gold + answer and gold.partition("^")[2] == answer.partition("^")[2]
    return gold.partition("/")[0] == answer.partition("/")[0] == "dollar"  # a price, "each" or "per day"


def _kind(token: str, one: str, own: frozenset[str]) -> str:
    lower = token.lower()
    if token != "A" and lower in CLASSES:
        return CLASSES[lower]
    if one in CANONICAL:
        return "M"
    if one in COUNTED or one in ALIKE or one in IRREGULAR.values():
        return "N"
    return "A" if lower in ADJECTIVES else "N" if lower in own else "x"


def _singular(token: str) -> str:
    lower = token.lower()
    for word in (token, lower, IRREGULAR.get(lower, lower)):
        if word in CANONICAL or word in COUNTED or word in IRREGULAR.values():
            return word
    for word in (lower.removesuffix("s"), lower.removesuffix("es"), re.sub("ies$", "y", lower)):
        if word != lower and (word in CANONICAL or word in COUNTED):
            return word
    return lower
