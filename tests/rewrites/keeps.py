r"""Rewritings of a gold that keep its value: the same number, tuple, set, interval or expression in another spelling.

Each is a pair (kind, text). A rewriting is only made where it surely keeps the value: a unit goes only behind numbers,
another order only into lists, and a decimal only in place of a fraction that ends.

Does not frame: the texts are answers alone (frames.py puts them into completions).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal, getcontext
from fractions import Fraction
from random import Random

from .golds import UNITS, Gold, number

Rewriting = tuple[str, str]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
getcontext().prec = 40


def tex(value: Fraction, command: str = "frac") -> str:
    r"""An integer, or a fraction in LaTeX.

    >>> tex(Fraction(-3, 4)), tex(Fraction(7))
    ('-\\frac{3}{4}', '7')
    """
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{'-' if value < 0 else ''}\{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def decimal(value: Fraction) -> str | None:
    """A decimal of at most 6 places, None where the fraction does not end there.

    >>> decimal(Fraction(-3, 4)), decimal(Fraction(1, 3)), decimal(Fraction(5))
    ('-0.75', None, '5')
    """
    scaled = value * 10**6
    if scaled.denominator != 1:
        return None
    digits = f"{abs(scaled.numerator):07d}"
    text = f"{digits[:-6]}.{digits[-6:]}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 else text


def kept(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    """All rewritings of a gold's value."""
    yield "as it is", gold.text
    yield "spaced", rf"\,{gold.text}\,"
    yield "spaced", rf"~{gold.text}~"
    yield "displaystyle", rf"\displaystyle {gold.text}"
    yield "full stop", f"{gold.text}."
    if "frac" in gold.text:
        short = gold.text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
        yield "dfrac", short.replace(r"\frac", r"\dfrac")
        yield "tfrac", short.replace(r"\frac", r"\tfrac")
    shapes = {
        "number": _numbers, "percent": _percent, "money": _money, "degrees": _degrees, "unit": _unit, "base": _base,
        "assignment": _assignment, "tuple": _tuple, "list": _list, "interval": _interval, "union": _union,
        "matrix": _matrix, "choice": _choice, "words": _words, "surd": _surd, "polynomial": _polynomial,
        "expression": _expression,
    }  # fmt: skip
    if gold.shape in shapes:
        yield from shapes[gold.shape](gold, rng)


def _value(gold: Gold) -> Fraction:
    assert gold.value is not None
    return gold.value


def _numbers(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    value = _value(gold)
    plain = tex(value)
    name = rng.choice(("x", "n", "N", r"\text{Area}", "Area", "Total", r"\text{Total cost}"))
    yield "label", f"{name} = {plain}"
    yield "label", f"{rng.choice('xyn')}={plain}"
    unit = rng.choice((r"\text{ cm}", r"\text{ hours}", r"\text{ miles}", r"\ \text{meters}", r"\text{ dollars}"))
    yield "unit that the gold lacks", plain + unit
    yield "unit that the gold lacks", f"{plain} {rng.choice(('cm', 'hours', 'dollars', 'miles', 'minutes', 'kg'))}"
    if value >= 0 and decimal(value) is not None:
        yield "dollar that the gold lacks", rf"\${decimal(value)}"
        yield "dollar that the gold lacks", f"${decimal(value)}"
    for bracketed in (f"({plain})", rf"\left({plain}\right)", f"{{{plain}}}"):
        yield "brackets", bracketed
    for spaced in (rf"\ {plain}\ ", rf"{plain}\;", rf"\quad {plain}"):
        yield "spaced", spaced
    for end in ("\\", "\\\\", "\\ "):
        yield "trailing backslash", plain + end
    style = rng.choice(("mathbf", "mathrm", "text", "textbf")) if value.denominator == 1 else "mathbf"
    yield "style", rf"\{style}{{{plain}}}"
    if value < 0:
        yield "minus sign", f"−{tex(-value)}"
        yield "spaced minus", f"- {tex(-value)}"
    if value > 0:
        yield "plus sign", f"+{plain}"
    yield from _spellings(value, rng)
    yield from _sums(value, rng)


def _spellings(value: Fraction, rng: Random) -> Iterator[Rewriting]:
    """One number, written in other ways."""
    size, k = abs(value), rng.randint(2, 6)
    p, q = value.numerator, value.denominator
    sign = "-" if value < 0 else ""
    yield "not reduced", rf"{sign}\frac{{{abs(p) * k}}}{{{q * k}}}"
    yield "slash", f"{p * k}/{q * k}"
    ends = decimal(value)
    if q == 1:
        yield "point zero", f"{p}.{rng.choice(('0', '00'))}"
        if size < len(WORDS) and p >= 0:
            yield "number word", WORDS[p]
            yield "number word", rf"\text{{{WORDS[p]}}}"
        if size >= 1000:
            for mark in (",", "{,}", r",\!", r"\,", " "):
                yield "thousands", f"{p:,}".replace(",", mark)
        zeros = len(str(p)) - len(str(p).rstrip("0"))
        if zeros >= 2:
            times = rng.choice((r"\times", r"\cdot"))
            yield "scientific", f"{p // 10**zeros} {times} 10^{zeros if zeros < 10 else f'{{{zeros}}}'}"
            head = decimal(Fraction(p, 10 ** (len(str(abs(p))) - 1)))
            if head is not None:
                yield "scientific", rf"{head} \times 10^{{{len(str(abs(p))) - 1}}}"
        if 2 <= p <= 60:
            yield "root", rf"\sqrt{{{p * p}}}"
        if p >= 4 and math.isqrt(p) ** 2 == p:
            yield "power", f"{math.isqrt(p)}^2"
    else:
        yield "slash", f"{p}/{q}"
        if size > 1:
            yield "mixed number", rf"{sign}{int(size)}\frac{{{size.numerator % q}}}{{{q}}}"
        if value < 0:
            yield "sign in the fraction", rf"\frac{{{p}}}{{{q}}}"
        if ends is not None:
            yield "decimal", ends
            yield "decimal", f"{ends}0"
    hundredfold = decimal(value * 100)
    if q != 1 and 0 < value < 1 and hundredfold is not None:
        for mark in (r"\%", "%", " percent", r"\text{ percent}", r" \%"):
            yield "percent of a fraction", hundredfold + mark


def _sums(value: Fraction, rng: Random) -> Iterator[Rewriting]:
    """Expressions and chains of equalities that come to the number."""
    plain = tex(value)
    yield "plus zero", f"{plain} + 0"
    part = Fraction(rng.randint(1, max(2, int(abs(value)))))
    sums = [f"{tex(value + part)} - {part}"]
    if value > part:
        sums += [f"{part} + {tex(value - part)}", f"{tex(value - part)} + {part}"]
    for factor in (2, 3, 5, 7):
        if value.denominator == 1 and value > factor and value % factor == 0:
            times = rng.choice((r"\cdot", r"\times"))
            sums.append(f"{value // factor} {times} {factor}")
            break
    for text in sums:
        yield "expression", text
    text = rng.choice(sums)
    yield "true chain", f"{text} = {plain}"
    yield "true chain", f"x = {text} = {plain}"
    yield "true chain", f"{plain} = {text}"


def _percent(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    value = _value(gold)
    number = decimal(value) or tex(value)
    for mark in ("%", r"\%", r" \%", " percent", r"\text{ percent}", " per cent", r"\text{ pct}"):
        yield "percent", number + mark
    yield "percent as a fraction", tex(value / 100)
    if decimal(value / 100) is not None:
        yield "percent as a decimal", str(decimal(value / 100))
    yield "label", rf"x = {number}\%"


def _money(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    number = decimal(_value(gold))
    if number is None:
        return
    for text in (rf"\${number}", f"${number}", rf"\$ {number}", rf"\${{{number}}}"):
        yield "dollar sign", text
    for word in (" dollars", r"\text{ dollars}", r"\text{ USD}", " USD"):
        yield "dollars in words", number + word
    yield "without the dollar", number
    yield "cents", rf"\${float(_value(gold)):.2f}"
    yield "label", rf"\text{{Cost}} = \${number}"


def _degrees(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    number = tex(_value(gold)) if decimal(_value(gold)) is None else str(decimal(_value(gold)))
    for mark in (r"^\circ", r"^{\circ}", "°", r"\text{ degrees}", " degrees", r"^\circ.", r"\,^\circ", r"\degree"):
        yield "degrees", number + mark
    yield "without the unit", number
    yield "label", rf"x = {number}^\circ"


def _unit(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    number, own = tex(_value(gold)) if decimal(_value(gold)) is None else str(decimal(_value(gold))), gold.extra
    yield "without the unit", number
    for text in (
        f"{number} {own}",
        rf"{number}\ \text{{{own}}}",
        rf"{number}~\text{{ {own} }}",
        rf"{number}\,\text{{{own}}}",
    ):
        yield "the gold's own words", text
    yield "the gold's own words", rf"{number} \mathrm{{ {own.replace(' ', '~')} }}"
    for singular, plural in UNITS.items():
        if own in (singular, plural):
            yield "singular and plural", rf"{number}\text{{ {singular}}}"
            yield "singular and plural", f"{number} {plural}"
    yield "label", rf"x = {gold.text}"


def _base(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    digits = str(_value(gold))
    for text in (f"{digits}_{gold.extra}", f"{digits}_{{{gold.extra}}}", f"{digits}_{{ {gold.extra} }}"):
        yield "base", text
    yield "base plus zero", f"{digits}_{gold.extra} + 0"


def _assignment(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    value = _value(gold)
    for text in (
        tex(value),
        f"{gold.extra}={tex(value)}",
        f"{gold.extra} \\;=\\; {tex(value)}",
        f"{tex(value)} = {gold.extra}",
    ):
        yield "with and without the label", text
    for kind, text in (*_spellings(value, rng), *_sums(value, rng)):
        if kind not in ("percent of a fraction", "number word") and "=" not in text:
            yield kind, f"{gold.extra} = {text}"


def _other_spelling(member: str, rng: Random) -> str:
    value = number(member)
    if value is None:
        return member
    if value.denominator == 1:
        return rng.choice((str(value), f"{value}.0", rf"\frac{{{value * 2}}}{{2}}"))
    ends = decimal(value)
    return ends if ends is not None and rng.random() < 0.5 else tex(value, rng.choice(("frac", "dfrac", "tfrac")))


def _tuple(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    for opening, comma, closing in (
        ("(", ",", ")"), (r"\left( ", ", ", r" \right)"), (r"\left(", r",\ ", r"\right)"), (r"\big(", ",", r"\big)"),
        ("( ", " , ", " )"), ("(", r",\,", ")"),
    ):  # fmt: skip
        yield "tuple", opening + comma.join(gold.members) + closing
    for _ in range(2):
        yield "other spelling within", f"({', '.join(_other_spelling(member, rng) for member in gold.members)})"
    first, second = (number(member) for member in gold.members[:2])
    if len(gold.members) == 2 and first is not None and second is not None and first >= second:  # surely no interval
        yield "label", f"(x, y) = {gold.text}"
    if len(gold.members) == 3:
        yield "label", f"(x,y,z) = {gold.text}"


def _list(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    members = list(gold.members)
    yield "other order", ", ".join(reversed(members))
    rng.shuffle(members)
    yield "other order", ", ".join(members)
    for text in (" and ", r" \text{ and } "):
        yield "and", ", ".join(members[:-1]) + text + members[-1]
    yield "set", rf"\{{{', '.join(members)}\}}"
    yield "set", rf"\left\{{ {', '.join(members)} \right\}}"
    yield "label", "x = " + ", ".join(members)
    yield "label", ", ".join(f"x = {member}" for member in members)
    yield "label", r" \text{ or } ".join(f"x = {member}" for member in members)
    yield "other spelling within", ", ".join(_other_spelling(member, rng) for member in members)


def _interval(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    left, right, low, high = *tuple(gold.extra), *gold.members
    signs = {"[": r"\le", "]": r"\leq", "(": "<", ")": "<"}
    for opening, comma, closing in (("", ",", ""), (r"\left", ", ", r"\right"), (r"\left", r",\,", r"\right")):
        yield "interval", f"{opening}{left}{low}{comma}{high}{closing}{right}"
    yield "label", rf"x \in {gold.text}"
    if high == r"\infty":
        yield "plus infinity", rf"{left}{low}, +\infty)"
        sign = r"\ge" if left == "[" else ">"
        yield "inequality", rf"x {sign} {low}"
    elif low == r"-\infty":
        yield "inequality", f"x {signs[right]} {high}"
    elif "infty" not in low + high:
        yield "inequality", f"{low} {signs[left]} x {signs[right]} {high}"
    if "infty" not in low + high:
        ends = (_other_spelling(low, rng), _other_spelling(high, rng))
        yield "other spelling within", f"{left}{ends[0]}, {ends[1]}{right}"


def _union(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    yield "other order", r" \cup ".join(reversed(gold.members))
    yield "spaced union", r"\;\cup\;".join(gold.members)
    yield "label", rf"x \in {gold.text}"
    yield "sign", "∪".join(gold.members)


def _matrix(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    rows, width = int(gold.extra[1:]), len(gold.members) // int(gold.extra[1:])
    cells = [gold.members[row * width : (row + 1) * width] for row in range(rows)]
    for kind in ("pmatrix", "bmatrix"):
        for amp, newline in (("&", r"\\"), (" & ", r" \\ "), (" & ", " \\\\\n")):
            body = newline.join(amp.join(row) for row in cells)
            yield "matrix", rf"\begin{{{kind}}} {body} \end{{{kind}}}"
    body = r" \\ ".join(" & ".join(_other_spelling(cell, rng) for cell in row) for row in cells)
    yield "other spelling within", rf"\begin{{pmatrix}} {body} \end{{pmatrix}}"
    yield "label", f"A = {gold.text}" if width > 1 else rf"\mathbf{{v}} = {gold.text}"


def _choice(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    for text in (
        "({})",
        "{}",
        r"\text{{({})}}",
        r"\text{{{}}}",
        r"\textbf{{({})}}",
        r"\mathrm{{({})}}",
        "({}).",
        "{})",
    ):
        yield "letter", text.format(gold.extra)
    yield "option", f"option {gold.extra}"
    yield "option", f"Option ({gold.extra})"


def _words(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    cased = () if gold.extra.isupper() else (gold.extra.lower(), gold.extra.capitalize())
    for text in (gold.extra, *cased, rf"\text{{ {gold.extra} }}"):
        yield "words", text
    for command in ("mathrm", "textbf", "textrm", "mbox"):
        yield "style", rf"\{command}{{{gold.extra}}}"


def _surd(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    factor, root = _value(gold), gold.extra
    yield "commuted", rf"{root} \cdot {factor}" if factor > 0 else rf"-{root} \cdot {-factor}"
    yield "spaced", rf"{factor}\,{root}"
    yield "star", f"{factor}*{root}"
    yield "not reduced", rf"\frac{{{factor * 2}{root}}}{{2}}"
    yield "plus zero", f"{gold.text} + 0"
    yield "label", f"x = {gold.text}"
    yield "expression", rf"{factor + 1}{root} - {root}"
    if root != r"\pi":
        inside = Decimal(root[6:-1])
        yield "one root", rf"{'-' if factor < 0 else ''}\sqrt{{{int(inside) * int(factor) ** 2}}}"
        yield "14 digits", f"{Decimal(int(factor)) * inside.sqrt():.14g}"
    else:
        yield "14 digits", f"{Decimal(int(factor)) * Decimal('3.14159265358979323846'):.14g}"


def _terms(terms: list[tuple[int, int]], letter: str, times: str = "", braces: bool = True) -> str:
    text = ""
    for degree, coefficient in terms:
        size = "" if abs(coefficient) == 1 and degree else str(abs(coefficient)) + (times if degree else "")
        power = "" if degree < 2 else (f"^{{{degree}}}" if braces or degree > 9 else f"^{degree}")
        sign = "-" if coefficient < 0 else ("+" if text else "")
        text += (f" {sign} " if text else sign) + size + (letter + power if degree else "")
    return text


def polynomial(gold: Gold, terms: list[tuple[int, int]]) -> str:
    """Those terms in the gold's variable."""
    return _terms(terms, gold.extra)


def _polynomial(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    terms = list(gold.terms)
    yield "commuted", _terms(terms[::-1], gold.extra)
    rng.shuffle(terms)
    yield "commuted", _terms(terms, gold.extra, braces=False)
    yield "spaced", _terms(terms, gold.extra).replace(" + ", r" \,+\, ")
    yield "times", _terms(terms, gold.extra, r" \cdot ")
    yield "times", _terms(terms, gold.extra, "*")
    yield "plus zero", f"{gold.text} + 0"
    yield "brackets", f"({gold.text})"
    yield "expression", f"-({_terms([(degree, -coefficient) for degree, coefficient in terms], gold.extra)})"
    yield "expression", rf"\frac{{{_terms([(d, 2 * c) for d, c in terms], gold.extra)}}}{{2}}"
    yield "label", f"{'y' if gold.extra != 'y' else 'z'} = {gold.text}"
    if gold.extra in "xtn":
        yield "label", f"f({gold.extra}) = {gold.text}"


def _expression(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    yield "plus zero", f"{gold.text} + 0"
    yield "brackets", f"({gold.text})"
    yield "brackets", rf"\left({gold.text}\right)"
    yield "expression", rf"1 \cdot ({gold.text})"
    yield "expression", f"({gold.text}) + 3 - 3"
    yield "spaced", rf"{gold.text}\;"
