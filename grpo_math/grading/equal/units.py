r"""Split an answer into its value and its unit.

A unit is a measure ("cm^2", "miles per hour", "\$") or words without a measure ("red apples", "in total"). It is
recognised inside ``\text{}``, after a number and a space, and as a sign of money or degrees. Words that change a value
are not a unit: "5 million", "5 or 6", "5 squared".

>>> split("5 centimeters"), split(r"12\text{ cm}^2"), split("3 red apples"), split("3a"), split("5 or 6")
(('5', {'cm': 1}), ('12', {'cm': 2}), ('3', {}), ('3a', None), ('5 or 6', None))
>>> split("60 km per hour"), split("5 square inches"), split("USD 20"), split("2 pi")
(('60', {'km': 1, 'h': -1}), ('5', {'in': 2}), ('20', {'dollar': 1}), ('2 pi', None))
>>> split(r"9.6 \text{m/s^2}"), split(r"\$5 per hour"), agree({"cm": 1}, {"m": 1}), agree({"cm": 1}, {})
(('9.6', {'m': 1, 's': -2}), ('5', {'dollar': 1, 'h': -1}), False, True)

`ratio` converts: 5 cm are 50 mm, and a newton is a kg m/s^2.
"""

import re
from fractions import Fraction

from grpo_math.grading.equal.notation import FRACTION_WORDS, NUMBER_WORDS, SHORT_WORDS
from grpo_math.grading.lexicon import CODES, CURRENCIES
from grpo_math.grading.vocabulary import FOREIGN, LATIN, whole_words, words

Unit = dict[str, int]  # measure -> power

# Measures by their symbol, with their names. Those of the metric system take a prefix.
_METRIC = """
m meter metre|g gram gm|s second sec|L liter litre l|J joule|W watt|V volt|A ampere amp|N newton|Hz hertz|Pa pascal
eV electronvolt|Wh|B byte|bit|cal calorie|K kelvin|Ω ohm|mol mole|F farad|T tesla|H henry|bar
""".replace("\n", "|").split("|")
_PREFIXES = {
    "k": ("kilo", 3), "M": ("mega", 6), "G": ("giga", 9), "d": ("deci", -1), "c": ("centi", -2), "m": ("milli", -3),
    "μ": ("micro", -6), "n": ("nano", -9), "p": ("pico", -12),
}  # fmt: skip
_OTHER = """
in inch inches|ft Ft foot feet|yd yard|mile mi|lb lbs pound|oz ounce|ton tonne|min mins minute|h hr hrs hour|day d
week wk|month|year yr yrs|decade|century centuries|gallon gal|quart qt|pint pt|cup|tbsp tablespoon|tsp teaspoon|acre
hectare ha|degree deg °|rad radian|dollar usd USD buck $|cent ¢|euro eur EUR €|sterling £ GBP|yen ¥ JPY|rupee ₹ Rs INR
yuan CNY RMB 元|franc CHF|rouble ₽ RUB|lira ₺ TL|won ₩ KRW 원|dong ₫ VND|krona kr SEK NOK DKK|zł PLN
mL ml мл 毫升|cL cl|dL dl|L л 升|km км 千米 公里|m м 米|cm см 厘米|mm мм 毫米|kg kilo кг 千克 公斤|g г 克|kW кВт 千瓦
h ч 小时|s с 秒|min мин 分钟|atm atmosphere|knot|celsius|fahrenheit|M_\\odot|unit|light|dozen dozens
""".replace("\n", "|").split("|")
_TABLE = {name: line.split()[0] for line in _METRIC + _OTHER for name in line.split()}
for _symbol, *_names in (line.split() for line in _METRIC if line):
    for _mark, (_prefix, _) in _PREFIXES.items():
        _TABLE |= dict.fromkeys(
            [_mark + _symbol, *(_prefix + name for name in _names if len(name) > 2)], _mark + _symbol
        )
# A measure -> its size in other measures. A prefix is a power of ten.
_SIZES: dict[str, tuple[int | Fraction, Unit]] = {
    "N": (1, {"kg": 1, "m": 1, "s": -2}), "J": (1, {"N": 1, "m": 1}), "W": (1, {"J": 1, "s": -1}),
    "Pa": (1, {"N": 1, "m": -2}), "V": (1, {"W": 1, "A": -1}), "Ω": (1, {"V": 1, "A": -1}), "Hz": (1, {"s": -1}),
    "Wh": (1, {"W": 1, "h": 1}), "L": (1, {"dm": 3}), "min": (60, {"s": 1}), "h": (60, {"min": 1}),
    "day": (24, {"h": 1}), "week": (7, {"day": 1}), "year": (12, {"month": 1}), "dollar": (100, {"cent": 1}),
    "ft": (12, {"in": 1}), "yd": (3, {"ft": 1}), "mile": (5280, {"ft": 1}), "lb": (16, {"oz": 1}),
    "gallon": (4, {"quart": 1}), "quart": (2, {"pint": 1}), "pint": (2, {"cup": 1}), "hectare": (10_000, {"m": 2}),
    "acre": (43_560, {"ft": 2}),
    "century": (100, {"year": 1}), "decade": (10, {"year": 1}), "atm": (101_325, {"Pa": 1}), "tbsp": (3, {"tsp": 1}),
    "degree": (60, {"arcminute": 1}), "arcminute": (60, {"arcsecond": 1}),
    **{mark + line.split()[0]: (Fraction(10) ** power, {line.split()[0]: 1})
       for line in _METRIC if line for mark, (_, power) in _PREFIXES.items()},
}  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
# Words that change the value before or after them.
CHANGES = (NUMBER_WORDS | FRACTION_WORDS).union(
    """
and or not no never plus minus mod modulo base choose factorial percent negative than double twice triple least
most power root infinity pi sqrt but except mille permille hundred hundreds tens thousands millions billions trillions
quadrillion quadrillions lakh lakhs crore crores mil gross thousandth thousandths millionth millionths repeating
recurring factorials cos tan log exp am pm noon midday midnight
""".split()  # noqa: SIM905
)
# "12 oder mehr" is not 12. "12 au total" is 12 in French.
_AFTER = re.compile(whole_words((words("after") | words("or")) - {"au"}), re.IGNORECASE)
_FILLERS = SHORT_WORDS | words("harmless")
_LETTERS = frozenset("bcefijknopqruvwxyzDEGIMOPQRSUXYZ")  # not measures, not even inside \\text{}
_SHORT = frozenset("m s g L N J W V A K".split())  # noqa: SIM905
_TOKEN = re.compile(
    rf"\^\s*\{{?\s*(-?\d)\s*\}}?|(/)|(M_\\odot|[{LATIN}μΩ'’&]+(?:-[{LATIN}]+)*|(?:(?![一-鿿]){FOREIGN})+|[°元{CURRENCIES}]|(?![一-鿿]*(?:[万萬亿億百半倍或和不非余]|千(?![克米瓦])|分[之の]|以[上下内外]))[一-鿿]+)"
)
_FILLER = re.compile(r"[\s.*~\\·]*")
_MONEY = re.compile(rf"(-?)\s*(?:[A-Z]{{1,2}}(?=\s?\\?\$))?\s*\\?([{CURRENCIES}]|{CODES}|R[sp]?\.?)\s*(?=-?[\d.\\({{])")
# A number may be divided by variables, so a unit that begins with a slash has a name and is not a symbol.
_RATE = "|".join(["person", "hr", "day", "min", *(name for name in _TABLE if re.fullmatch("[a-z]{4,}", name))])
_START = re.compile(  # where a unit may begin
    r"\\text\s*\{|"
    rf"(?<=[\d)}}\]!%])(?:[ ~]+(?=[{LATIN}μ]|{FOREIGN})|(?=°| ?(?!\$)[{CURRENCIES}]|{FOREIGN}|\\\$|[a-z]{{2}}"
    r"|[A-Z][a-z]|[a-z][A-Z](?![A-Za-z])|\\mu ?[A-Za-z])|(?<=[\d.]\d)(?=[gL](?![A-Za-z^_(\d{\\])))"  # 75g, not 3g
    r"| +(?=\\text|°|Ω|\\Omega|\\mu|M_)|(?<=\\pi) "
    r"|(?<=[\d}]) ?\((?!wrong|incorrect|false|not\b)(?=[A-Za-z]{2}[A-Za-z \-]{0,40}\)\Z)"
    rf"|(?<=\d)(?= ?/ ?(?:\\text\s*\{{\s*)?(?:{_RATE})s?\b)"
)
_VALUE_END = re.compile(r"(?:[\d)}\]%°!]|\\pi|(?<![A-Za-z\\])[a-z])\Z")
MAX_CHARACTERS = 400


def split(text: str) -> tuple[str, Unit | None]:
    """Return the text without its unit, and the unit. The unit is None if the text has none."""
    money = _MONEY.match(text)
    if money is not None:
        bare, unit = split(text[money.end() :])
        return money[1] + bare, {_TABLE.get(money[2].rstrip("."), money[2]): 1} | (unit or {})
    if len(text) > MAX_CHARACTERS:
        return text, None
    for start in _START.finditer(text):
        before = text[: start.start()].rstrip(" ~")
        if _VALUE_END.search(before) and "\\text" not in before:
            unit = read_unit(re.sub(r"\A ?\((.*)\)\Z", r"\1", text[start.start() :]))  # "5 (cm)"
            if unit is not None:
                return before, unit
    return text, None


def read_unit(text: str) -> Unit | None:
    """Return the measures among words, and None if a word changes the value before them.

    >>> read_unit("square inches"), read_unit("miles per hour"), read_unit("more students"), read_unit("or so")
    ({'in': 2}, {'mile': 1, 'h': -1}, {}, None)
    """
    inside, text = "\\text" in text, _plain(text)
    unit: Unit = {}
    sign, power, last, written = 1, 1, "", ""
    tokens = list(_TOKEN.finditer(text))
    if (
        not tokens
        or any(
            token[3] and _AFTER.match(text, token.start()) and (token[3] not in _TABLE or token[3] == "in")
            for token in tokens  # "in" is no inch in "in binary"
        )
        or _FILLER.fullmatch(_TOKEN.sub("", text)) is None
    ):
        return None
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        exponent, slash, word = token.groups()
        lower = (word or "").lower()
        further = token is not tokens[0] and sign > 0 and len(word or "") > 1  # only a first word may be variables
        after_rate = sign < 0 and len(written) > 1 and word in ("h", "d", "l")  # km/h, but m/h may be two variables
        if exponent or lower in ("squared", "cubed"):
            if not last:  # "5 squared" is 25
                return None
            unit[last] *= int(exponent or _POWERS[lower])
        elif slash or lower == "per":
            sign = -1
        elif lower in _POWERS:
            power = _POWERS[lower]
        elif word in ("C", "F") and last == "degree":
            unit = {"celsius" if word == "C" else "fahrenheit": 1}
        elif lower in CHANGES or word in _LETTERS or not (inside or after_rate or further or _may_follow(word)):
            return None
        elif (name := _named(word)) and not (lower == "in" and following and _is_noun(following[3])):
            unit[name] = unit.get(name, 0) + sign * power
            sign, power, last, written = 1, 1, name, word
        else:
            sign, last = 1, ""
    return unit


def other_words(text: str) -> list[str]:
    """Return the words that are not part of a measure, in a text behind a value. A dozen is a multiplier.

    >>> other_words("square inches per hour"), other_words(r"\\text{ dozen apples}"), other_words("°C")
    ([], ['dozen', 'apples'], [])
    """
    words = (token[3] for token in _TOKEN.finditer(_plain(text)) if token[3] and token[3][0].isalpha())
    return [word for word in words if word.lower() not in (*_POWERS, *"cf", "per") and _named(word) in (None, "dozen")]


def _plain(text: str) -> str:
    text = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", text)
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"/ ?\(([^()/]*)\)", r"/\1", text)  # m/(min^2)
    return re.sub(r"\\mu\s*", "μ", text).replace("\\Omega", "Ω")


def _is_noun(word: str | None) -> bool:
    """Return True for a word that "in" may precede, as in "5 in total": not in "5 in squared" and "5 in per hour"."""
    return word is not None and word.lower() not in ("squared", "cubed", "per")


def agree(gold: Unit | None, answer: Unit | None) -> bool:
    """Return True if equal answers may have these units. One side may omit some or all measures."""
    if not gold or not answer:  # 5 dozen is not 5 cookies
        return "dozen" not in (gold or answer or ())
    if "unit" in (*gold, *answer):  # "square units" are any measure of an area
        return sorted(gold.values()) == sorted(answer.values())
    shared = gold.keys() & answer.keys()
    return len(shared) == min(len(gold), len(answer)) and all(gold[name] == answer[name] for name in shared)


def in_base(unit: Unit) -> tuple[Fraction, Unit]:
    """Return a unit as a number and measures that are not made of others.

    >>> in_base({"km": 1, "h": -1}), in_base({"ft": 2})
    ((Fraction(5, 18), {'m': 1, 's': -1}), (Fraction(144, 1), {'in': 2}))
    """
    size, base = Fraction(1), dict[str, int]()
    for name, power in unit.items():
        number, parts = _SIZES.get(name, (1, {}))
        inner, measures = in_base(parts) if parts else (Fraction(1), {name: 1})
        size *= (number * inner) ** power
        for one, times in measures.items():
            base[one] = base.get(one, 0) + times * power
    return size, {name: power for name, power in base.items() if power}


def ratio(gold: Unit | None, answer: Unit | None) -> Fraction | None:
    """Return the number by which an amount in the unit of the answer is an amount in that of the gold answer.

    >>> ratio({"m": 1}, {"km": 1}), ratio({"N": 1}, {"kg": 1, "m": 1, "s": -2}), ratio({"cm": 1}, {"s": 1})
    (Fraction(1000, 1), Fraction(1, 1), None)
    """
    (gold_size, gold_base), (size, base) = (in_base(unit or {}) for unit in (gold, answer))
    return size / gold_size if base and base == gold_base else None


def _may_follow(word: str) -> bool:
    """Return True if a word after a number, outside of ``\\text{}``, is not a variable or a product of variables."""
    if len(word) == 1:
        return word in _SHORT or word == "a" or (not word.isascii() and word != "μ") or not word.isalpha()
    if "-" in word:  # ax-by is a difference
        return all(map(_may_follow, word.split("-")))
    known = word in _TABLE or word.lower() in _FILLERS or not word.isascii() or (len(word) == 3 and _named(word))
    return bool(known) or len(word) > 3 or re.fullmatch("[^aeiou][aeiou].", word.lower()) is not None


def _named(word: str) -> str | None:
    lower = word.lower()
    forms = (word, lower, lower.removesuffix("s"), lower.removesuffix("es"), word.removesuffix("s"))
    return next((_TABLE[form] for form in forms if form in _TABLE), None)
