r"""Golds of GSM8K and MATH, and what shape each has: which rewritings surely keep its value depends on that.

>>> read(r"-\frac12").shape, read(r"\$1,200").value, read(r"(1,200)").members, read(r"x^2-3x+1").terms
('number', Fraction(1200, 1), ('1', '200'), ((2, 1), (1, -3), (0, 1)))

Does not rewrite and does not grade. A gold that fits no shape has the shape "other".
"""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

INTEGER = r"\d{1,3}(?:(?:,\\!|,|\{,\})\d{3})+(?!\d)|\d+"
NUMBER = rf"-?(?:(?:{INTEGER})?\.\d+|{INTEGER})"
FRACTION = r"(-?)\s*\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"
UNITS = {  # singular -> plural, as texts of golds spell them
    "cm": "cm", "centimeter": "centimeters", "inch": "inches", "foot": "feet", "meter": "meters", "mile": "miles",
    "gallon": "gallons", "hour": "hours", "minute": "minutes", "second": "seconds", "day": "days", "degree": "degrees",
    "dollar": "dollars", "cent": "cents", "yard": "yards", "gram": "grams", "pound": "pounds", "mph": "mph",
    "square unit": "square units", "square inch": "square inches", "square foot": "square feet",
}  # fmt: skip


class Gold(NamedTuple):
    """``value`` of a number (of the number before a unit too), ``members`` of what has several, ``terms`` (degree,
    coefficient) of a polynomial, ``extra``: the unit, variable, irrational factor, base, or kind of matrix."""

    text: str
    shape: str
    value: Fraction | None = None
    members: tuple[str, ...] = ()
    terms: tuple[tuple[int, int], ...] = ()
    extra: str = ""


def number(text: str) -> Fraction | None:
    r"""The value of an integer, decimal or fraction of integers, in LaTeX or with a slash.

    >>> number("1,200"), number(r"-\frac{1}2"), number("3/4"), number("x"), number(".5")
    (Fraction(1200, 1), Fraction(-1, 2), Fraction(3, 4), None, Fraction(1, 2))
    """
    text = text.strip().removesuffix(".")
    if re.fullmatch(NUMBER, text):
        return Fraction(re.sub(r"[,\\!{}]", "", text))
    if re.fullmatch(r"-?\d+/\d+", text) and int(text.partition("/")[2]):
        return Fraction(text)
    found = re.fullmatch(FRACTION, text)
    if found is None or not int(found[4] or found[5]):
        return None
    value = Fraction(int(found[2] or found[3]), int(found[4] or found[5]))
    return -value if found[1] else value


def read(text: str) -> Gold:
    """The gold with its shape."""
    plain = text.strip()
    value = number(plain)
    if value is not None:
        return Gold(text, "number", value)
    return _measured(plain) or _several(plain) or _symbolic(plain) or Gold(text, _rest(plain))


def _measured(text: str) -> Gold | None:
    """Numbers with something behind or before them."""
    for pattern, shape in (
        (r"(.+?)\s*\\?%", "percent"),
        (r"\\?\$\s*(.+)", "money"),
        (r"(.+?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})", "degrees"),
        (r"[a-zA-Z]\s*=\s*(.+)", "assignment"),
        (r"(\d+)_\{?\d+\}?", "base"),
        (r"(.+?)\s*(?:\\,|\\ |~)?\s*\\text\s*\{\s*[a-zA-Z ]+\}", "unit"),
    ):
        found = re.fullmatch(pattern, text)
        value = None if found is None else number(found[1])
        if value is None:
            continue
        extra = re.search(r"_\{?(\d+)", text) if shape == "base" else re.search(r"\{\s*([a-zA-Z ]+)\}", text)
        extra = re.match("[a-zA-Z]", text) if shape == "assignment" else extra
        name = "" if extra is None else (extra[0] if shape == "assignment" else extra[1].strip())
        if shape == "unit" and name.split()[0].lower() in ("and", "or", "percent", "million", "base", "if"):
            return None
        return Gold(text, shape, value, extra=name)
    return None


def _several(text: str) -> Gold | None:
    matrix = re.fullmatch(r"\\begin\{([pb])matrix\}(.*)\\end\{\1matrix\}", text)
    if matrix is not None:
        rows = [[cell.strip() for cell in row.split("&")] for row in matrix[2].removesuffix("\\\\").split("\\\\")]
        cells = [cell for row in rows for cell in row]
        if len({len(row) for row in rows}) == 1 and all(number(cell) is not None for cell in cells):
            return Gold(text, "matrix", members=tuple(cells), extra=f"{matrix[1]}{len(rows)}")
        return None
    plain = re.sub(r"\\left\s*|\\right\s*|\\[,;!]", "", text)
    if "\\cup" in plain:
        parts = [part.strip() for part in plain.split("\\cup")]
        return Gold(text, "union", members=tuple(parts)) if all(map(_interval, parts)) else None
    if _interval(plain) and ("[" in plain or "]" in plain or "infty" in plain):
        ends = [end.strip() for end in plain[1:-1].split(",")]
        return Gold(text, "interval", members=tuple(ends), extra=plain[0] + plain[-1])
    inner = re.fullmatch(r"\(([^()]*)\)", plain)
    members = tuple(member.strip() for member in (plain if inner is None else inner[1]).split(","))
    if len(members) < 2 or any(number(member) is None for member in members):
        return None
    if inner is not None:
        return Gold(text, "tuple", members=members)
    thousands = any(len(member) == 3 and member.isdigit() for member in members[1:])
    return None if thousands or len(set(map(number, members))) < len(members) else Gold(text, "list", members=members)


def _interval(text: str) -> bool:
    return re.fullmatch(r"[\[(][^\[\](),]+,[^\[\](),]+[\])]", text.strip()) is not None


def _symbolic(text: str) -> Gold | None:
    choice = re.fullmatch(r"\\text\s*\{\s*\(?([A-F])\)?\s*\}|\(([A-F])\)", text)
    if choice is not None:
        return Gold(text, "choice", extra=choice[1] or choice[2])
    words = re.fullmatch(r"\\text\s*\{\s*([A-Za-z]{4,}(?: [A-Za-z]+)*)\s*\}", text)
    if words is not None:
        return Gold(text, "words", extra=words[1])
    surd = re.fullmatch(r"(-?\d*)\s*(?:\\cdot)?\s*(\\sqrt\{\d+\}|\\pi)", text)
    if surd is not None:
        coefficient = {"": 1, "-": -1}.get(surd[1]) or int(surd[1])
        return Gold(text, "surd", Fraction(coefficient), extra=surd[2])
    return _polynomial(text)


def _polynomial(text: str) -> Gold | None:
    letters = set(re.findall("[a-z]", text))
    if len(letters) != 1 or letters == {"e"} or not re.fullmatch(r"[-+0-9a-z^{} ]+", text):
        return None
    letter, plain = letters.pop(), text.replace(" ", "")
    terms = []
    end = 0
    for term in re.finditer(rf"([-+]?)(\d*)({letter}?)(?:(?<={letter})\^(?:\{{(\d+)\}}|(\d)))?", plain):
        if term.start() != end or not term[0]:
            break
        end = term.end()
        if not term[2] and not term[3]:
            return None
        coefficient = int(term[2] or 1) * (-1 if term[1] == "-" else 1)
        terms.append((int(term[4] or term[5] or 1) if term[3] else 0, coefficient))
    whole = end == len(plain) and len({degree for degree, _ in terms}) == len(terms) >= 2
    return (
        Gold(text, "polynomial", terms=tuple(terms), extra=letter) if whole and 0 not in dict(terms).values() else None
    )


def _rest(text: str) -> str:
    """Is it one expression, so that one more is another value?"""
    words = set(re.findall(r"\\?[A-Za-z]{2,}", text))
    plain = re.fullmatch(r"[-+0-9A-Za-z^{}()\\ .*/]+", text) is not None and re.search(r"\d", text) is not None
    known = {"\\frac", "\\dfrac", "\\tfrac", "\\sqrt", "\\pi", "\\left", "\\right", "\\cdot"}
    return "expression" if plain and words <= known and not text.startswith("\\left") else "other"


def drawn(data: Path, n: int, seed: int) -> list[Gold]:
    """``n`` golds: a third of GSM8K, the rest of MATH's that are no plain integer, no text twice."""
    rng = random.Random(seed)

    def texts(*names: str) -> list[str]:
        lines = [line for name in names for line in (data / name).read_text(encoding="utf-8").splitlines()]
        return [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]

    gsm8k = sorted(set(texts("gsm8k/train.jsonl", "gsm8k/test.jsonl")))
    math = sorted(set(texts("math/train.jsonl", "math/test_outside_math500.jsonl", "math500/test.jsonl")))
    math = [text for text in math if text and not re.fullmatch(r"-?\d+", text)]
    return [read(text) for text in rng.sample(gsm8k, n // 3) + rng.sample(math, n - n // 3)]
