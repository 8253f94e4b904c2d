r"""Rewritings of a gold that change its answer: another value, two values, a negation.

Each is a pair (kind, text), as in keeps.py, and is only made where the text surely no longer states the gold, or not it
alone. ``other`` is a second answer of the gold's shape with another value.

Does not frame: `broken` gives answers alone, `broken_completions` whole completions.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from random import Random

from .golds import Gold, number
from .keeps import WORDS, Rewriting, decimal, polynomial, tex

SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}


def other(gold: Gold, rng: Random) -> str:
    """An answer of the gold's shape with another value."""
    if gold.value is not None:
        value = another(gold.value, rng)
        spelled = tex(value) if decimal(value) is None or gold.shape == "number" else str(decimal(value))
        return {
            "percent": rf"{spelled}\%", "money": rf"\${spelled}", "degrees": rf"{spelled}^\circ",
            "unit": rf"{spelled}\text{{ {gold.extra}}}", "assignment": f"{gold.extra} = {spelled}",
            "base": f"1{gold.value}_{gold.extra}", "surd": f"{tex(value)}{gold.extra}",
        }.get(gold.shape, spelled)  # fmt: skip
    if gold.shape in ("tuple", "list"):
        members = _one_changed(gold.members, rng)
        return f"({', '.join(members)})" if gold.shape == "tuple" else ", ".join(members)
    if gold.shape == "interval":
        return "[100019, 200003]"
    if gold.shape == "union":
        return r"(-100003, 0) \cup (200003, \infty)"
    if gold.shape == "matrix":
        return _matrix(gold, _one_changed(gold.members, rng))
    if gold.shape == "choice":
        return f"({rng.choice([letter for letter in 'ABCDE' if letter != gold.extra])})"
    if gold.shape == "words":
        words = [word for word in ("hexagon", "Wednesday", "northwest") if word != gold.extra]
        return rf"\text{{{rng.choice(words)}}}"
    if gold.shape == "polynomial":
        terms = [(degree, coefficient + (degree == gold.terms[0][0])) for degree, coefficient in gold.terms]
        return polynomial(gold, [term for term in terms if term[1]])
    return f"({gold.text}) + 1" if gold.shape == "expression" else "7919"


def another(value: Fraction, rng: Random) -> Fraction:
    """A number near by that is neither the value nor its negative, and is not 0."""
    near = [value + step for step in (1, -1, 2, 10)] + [value * 2]
    return rng.choice([candidate for candidate in near if candidate not in (0, value, -value)])


def _one_changed(members: tuple[str, ...], rng: Random) -> list[str]:
    """One member is larger than all were."""
    at = rng.randrange(len(members))
    largest = max(abs(number(member) or Fraction(0)) for member in members)
    return [tex(largest + 1) if i == at else member for i, member in enumerate(members)]


def broken(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    """All wrong answers made of a gold."""
    right, wrong = gold.text, other(gold, rng)
    yield "another value", wrong
    joined = [(right, wrong), (wrong, right)]
    if gold.shape != "list":
        for first, second in joined:
            yield "several in a box", f"{first}, {second}"
            yield "several in a box", rf"{first} \text{{ and }} {second}"
            yield "several in a box", f"{first}; {second}"
            if gold.shape != "matrix":  # which would be a product
                yield "several in a box", rf"{first} \quad {second}"
    for first, second in joined:
        for joint in (r" \text{ or } ", " or ", r" \lor ", r"\text{ or maybe }", " (or {})", r"\text{, maybe }"):
            yield "either or", f"{first} (or {second})" if "{}" in joint else first + joint + second
    yield "either or", f"either {right} or {wrong}"
    yield "either or", f"one of {wrong}, {right}"
    for negation in ("not ", r"\text{not }", r"\neg ", "not equal to ", "anything but ", r"\text{all but }", "never "):
        yield "negation", negation + right
    if gold.shape not in ("list", "choice", "words", "assignment", "interval", "union", "other"):
        yield "relation", rf"x \neq {right}"
        for sign in (">", r"\ge", "<", r"\leq"):
            yield "relation", f"x {sign} {right}"
    if gold.shape not in ("list", "choice", "words"):
        yield "false chain", f"{wrong} = {right}"
        yield "false chain", f"{right} = {wrong}"
        yield "false chain", f"{wrong} = {other(gold, rng)} = {right}"
    shapes = {
        "number": _numbers, "percent": _measured, "money": _measured, "degrees": _measured, "unit": _measured,
        "base": _base, "tuple": _tuple, "list": _list, "interval": _interval, "union": _union, "matrix": _matrices,
        "choice": _choice, "words": _words, "surd": _surd, "polynomial": _polynomial, "expression": _expression,
        "assignment": _numbers,
    }  # fmt: skip
    if gold.shape in shapes:
        yield from shapes[gold.shape](gold, rng)


def broken_completions(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    """Whole completions that hold the gold and commit to something else, or to two answers."""
    right, wrong = gold.text, other(gold, rng)
    for first, second in ((right, wrong), (wrong, right)):
        one, two = rf"\boxed{{{first}}}", rf"\boxed{{{second}}}"
        yield "boxes joined", f"The answer is ${one}$ or ${two}$."
        yield "boxes joined", f"It is either {one} or {two}."
        yield "boxes joined", f"So it is {one} {rng.choice(('or maybe', 'or possibly', 'or else'))} {two}."
        if gold.shape != "list":
            yield "boxes joined", f"{one}, {two}"
            yield "boxes joined", f"${one}$ and ${two}$"
            yield "boxes joined", f"{one}{two}"
        yield "or in a phrase", f"The answer is ${first}$ or ${second}$."
        yield "or in a phrase", f"The answer is either ${first}$ or ${second}$."
        yield "or in a tag", f"It follows. </think> <answer>{first} or {second}</answer>"
        yield "or in a tag", f"<answer>{first}</answer> or <answer>{second}</answer>"
        yield "or after ####", f"We add.\n#### {first} or {second}"
    box = rf"\boxed{{{right}}}"
    yield "retraction", f"The answer is {box}. Just kidding, the answer is ${wrong}$."
    yield "retraction", f"So it is {box}.\n\nWait, that is wrong. The answer is ${wrong}$."
    yield "retraction", f"The final answer is {box}. Correction: the final answer is ${wrong}$."
    yield "retraction", f"The answer is ${right}$. No, the answer is ${wrong}$."
    yield "retraction", rf"So it is {box}. No, it is \boxed{{{wrong}}}."
    yield "retraction", f"First we find ${box}$ in each row.\n\nThen we add them up.\n\n\\boxed{{{wrong}}}"
    yield "retraction", f"First we find {right}.\n#### {right}\nNow we add them up, and get\n#### {wrong}"


def _numbers(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    assert gold.value is not None
    value, plain = gold.value, tex(gold.value)
    whole, size = value.denominator == 1, abs(value)
    wrong = tex(another(value, rng))
    for text in _words_after(value, plain, rng):
        yield "words after", text
        yield "words after", rf"{plain}\text{{{text.removeprefix(plain)}}}" if text.startswith(plain) else text
    if value:
        for text in (f"-{plain}" if value > 0 else tex(-value), rf"\pm {tex(size)}"):
            yield "sign", text
        for word in ("negative", "minus", r"\text{negative }", r"\text{minus }") if value > 0 else ():
            yield "sign in words", f"{word} {plain}"
        yield "scale", rf"{plain} \times 10^{{3}}"
        yield "off", f"{plain} x"
        for word in rng.sample(sorted(SCALES), 3):
            yield "scale", f"{plain} {word}"
            yield "scale", rf"{plain}\text{{ {word}}}"
        yield "off", f"2({plain})"
        yield "off", rf"\frac{{{plain}}}{{2}}"
    yield "off", f"{plain} + 1"
    yield "off", f"{plain} - 1"
    yield "off", f"{plain} + x"
    if whole:
        yield "digits", f"{plain}{rng.randint(0, 9)}" if value else "10"
        yield "digits", f"{plain}.5"
        yield "digits", f"{rng.randint(1, 9)}{abs(value)}"
        digits = str(size)
        for i in range(len(digits) - 1):
            if digits[i] != digits[i + 1] and digits[i + 1] != "0":
                swapped = digits[:i] + digits[i + 1] + digits[i] + digits[i + 2 :]
                yield "digits", ("-" if value < 0 else "") + swapped
                break
        if value > 0:
            yield "mixed number", rf"{plain}\frac{{1}}{{2}}"
            yield "mixed number", f"{plain} 1/2"
        if size >= 3:
            yield "function", f"{plain}!"
        if size >= 1000 and size % 1000 >= 100:
            yield "split digits", f"({size // 1000}, {size % 1000})"
    if size not in (0, 1):
        for text in (
            f"({plain})^2",
            rf"\sqrt{{{plain}}}",
            rf"\frac{{1}}{{{plain}}}",
            f"10^{{{plain}}}",
            rf"\log {plain}",
        ):
            yield "function", text
    for text in (
        rf"{plain} \pm 1",
        rf"{plain} \text{{ to }} {wrong}",
        rf"{plain}, \ldots, {wrong}",
        rf"\{{{plain}, {wrong}\}}",
    ):
        yield "several", text
    for text in (
        f"({plain}, {wrong})",
        f"[{plain}, {wrong}]",
        f"{plain} {wrong}",
        rf"{plain}\ \ {wrong}",
        f"{plain} | {wrong}",
    ):
        yield "several", text
    if 0 < value < 1 and decimal(value * 100) is not None and not whole:
        yield "percent dropped", str(decimal(value * 100))
    if 0 < size < 1 and not whole:
        yield "upside down", tex(1 / value)


def _words_after(value: Fraction, plain: str, rng: Random) -> list[str]:
    """A number followed by words that make another one of it, or by a second number."""
    n = rng.randint(1, 9)
    second = WORDS[n] if Fraction(n) != value else "eleven"
    texts = [f"{plain} {second}", f"{plain} maybe {second}", f"{plain} {second} {rng.choice(WORDS[2:])}"]
    texts += [
        f"{plain} plus one",
        f"{plain} minus one",
        f"{plain} and a half",
        f"{plain} point five",
        f"{plain} less than x",
    ]
    texts += [f"{plain} at least", f"{plain} at most", f"at least {plain}", f"more than {plain}", f"less than {plain}"]
    texts += [f"{plain} plus some more", f"{plain} more than half"]
    if value:
        texts += [f"{plain} halves", f"{plain} thirds", f"{plain} percent of 10", f"{plain} times two"]
        texts += [f"half of {plain}", f"twice {plain}"]
    if value > 0:
        texts += [f"{plain} negative"]
    if abs(value) not in (0, 1):
        texts += [f"{plain} to the power of {rng.randint(2, 9)}"]
        texts += [f"{plain} squared", f"{plain} cubed", f"square root of {plain}"]
    if value >= 3 and value.denominator == 1:
        texts += [f"{plain} factorial"]
    return texts


def _measured(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    assert gold.value is not None
    n = tex(gold.value) if decimal(gold.value) is None else str(decimal(gold.value))
    if gold.shape == "percent":
        for text in (
            rf"{decimal(gold.value / 100) or '7919'}\%",
            rf"{decimal(gold.value * 10)}\%",
            rf"{n}\text{{ degrees}}",
        ):
            yield "other percent", text
    if gold.shape == "money":
        for word in (" cents", r"\text{ cents}", " euros", r"\text{ pounds}", " million dollars", r"\text{ hours}"):
            yield "other unit", n + word
        yield "scale", rf"\${n}\text{{ million}}"
        yield "scale", f"${n} thousand"
    if gold.shape == "degrees":
        for word in (r"\text{ radians}", " radians", r"\text{ cm}", " hours", r"\pi"):
            yield "other unit", n + word
    if gold.shape == "unit":
        rivals = {"cm": "m", "inches": "feet", "feet": "inches", "dollars": "cents", "hours": "minutes", "miles": "km",
                  "minutes": "hours", "degrees": "radians", "square units": "cubic inches", "cents": "dollars",
                  "meters": "cm", "days": "weeks", "pounds": "ounces", "seconds": "minutes"}  # fmt: skip
        if gold.extra in rivals:
            yield "other unit", rf"{n}\text{{ {rivals[gold.extra]}}}"
            yield "other unit", f"{n} {rivals[gold.extra]}"
        yield "scale", rf"{n}\text{{ million {gold.extra}}}"
        yield "words after", f"{n} {gold.extra} or more"
        yield "negation", f"not {n} {gold.extra}"
    if gold.value > 0:
        yield "sign", f"-{gold.text}"
        yield "sign in words", f"negative {gold.text}"
        yield "sign in words", f"minus {n}"


def _base(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    if len(str(gold.value)) > 1:
        yield "other base", f"{gold.value}_{{{int(gold.extra) + 1}}}"
    yield "off", f"{gold.text} + 1"
    yield "words after", f"{gold.text} squared"


def _tuple(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    inner, members = ", ".join(gold.members), list(gold.members)
    values = [number(member) for member in members]
    for opening, closing in (("[", "]"), (r"\{", r"\}"), (r"\left\{", r"\right\}")):
        yield "brackets changed", opening + inner + closing
    if values != values[::-1]:
        yield "other order", f"({', '.join(reversed(members))})"
    if values[:2] != values[1::-1]:
        yield "other order", f"({', '.join([members[1], members[0], *members[2:]])})"
    for _ in range(2):
        yield "a member off", f"({', '.join(_one_changed(gold.members, rng))})"
    yield "length", f"({inner}, {members[0]})"
    yield "length", f"({', '.join(members[1:])})" if len(members) > 2 else members[0]
    if all(member.isdigit() for member in members):
        yield "run together", "".join(members)
    if len(members) == 2 and "-" not in inner and any(values):
        yield "signs", f"(-{members[0]}, -{members[1]})"
        yield "read as another thing", rf"\frac{{{members[0]}}}{{{members[1]}}}"
        yield "read as another thing", f"{members[0]}:{members[1]}"
        yield "read as another thing", f"{members[0]} + {members[1]}"


def _list(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    members = list(gold.members)
    for opening, closing in (("[", "]"), (r"\left[", r"\right]")):
        yield "brackets changed", opening + ", ".join(members) + closing
    yield "a member off", ", ".join(_one_changed(gold.members, rng))
    yield "a member less", ", ".join(members[1:])
    yield "a member less", members[0]
    yield "a member more", ", ".join([*members, "7919"])
    yield "a member more", ", ".join(["7919", *members])
    if all(member.isdigit() for member in members):
        yield "run together", "".join(members)
    yield "negation", f"not {members[0]} but {members[1]}"
    yield "false chain", " = ".join(members)


def _interval(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    left, right, low, high = *tuple(gold.extra), *gold.members
    flipped = {"[": "(", "(": "[", "]": ")", ")": "]"}
    if "infty" not in low:
        yield "brackets changed", f"{flipped[left]}{low},{high}{right}"
        yield "an end off", f"{left}{low} - 1,{high}{right}"
        yield "one end", low
    if "infty" not in high:
        yield "brackets changed", f"{left}{low},{high}{flipped[right]}"
        yield "an end off", f"{left}{low},{high} + 1{right}"
        yield "one end", high
    if "infty" not in low + high:
        yield "the ends alone", f"{low}, {high}"
        yield "the ends alone", rf"\{{{low}, {high}\}}"
        yield (
            "or between inequalities",
            rf"x {'>=' if left == '[' else '>'} {low} \text{{ or }} x {'<=' if right == ']' else '<'} {high}",
        )
        yield "complement", rf"(-\infty, {low}) \cup ({high}, \infty)"
        yield "several", rf"{gold.text} \cup [100019, 200003]"
    elif "infty" not in low:
        yield "other inequality", f"x < {low}"
        yield "other inequality", f"x {'>' if left == '[' else '>='} {low}"
    elif "infty" not in high:
        yield "other inequality", f"x > {high}"
    yield "negation", rf"x \notin {gold.text}"


def _union(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    yield "intersection", r" \cap ".join(gold.members)
    yield "a member less", gold.members[0]
    yield "a member less", gold.members[-1]
    if "infty" not in gold.members[-1]:
        yield "a member more", rf"{gold.text} \cup [100003, 200003]"
    yield "negation", rf"x \notin {gold.text}"
    flipped = {"[": "(", "(": "["}
    second = gold.members[1]
    if "infty" not in second.split(",")[0] and gold.members[0].endswith(")"):
        yield (
            "brackets changed",
            rf"{gold.members[0]} \cup {flipped[second[0]]}{second[1:]}"
            + "".join(rf" \cup {part}" for part in gold.members[2:]),
        )


def _matrix(gold: Gold, members: list[str], kind: str = "pmatrix") -> str:
    rows = int(gold.extra[1:])
    width = len(members) // rows
    body = r" \\ ".join(" & ".join(members[row * width : (row + 1) * width]) for row in range(rows))
    return rf"\begin{{{kind}}} {body} \end{{{kind}}}"


def _matrices(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    members, rows = list(gold.members), int(gold.extra[1:])
    width = len(members) // rows
    for _ in range(2):
        yield "a member off", _matrix(gold, _one_changed(gold.members, rng))
    if rows == width and rows > 1:
        yield "brackets changed", _matrix(gold, members, "vmatrix")
        yield "brackets changed", _matrix(gold, members, "Vmatrix")
        turned = [members[row * width + column] for column in range(width) for row in range(rows)]
        if [number(a) for a in turned] != [number(b) for b in members]:
            yield "transposed", _matrix(gold, turned)
        if any(map(number, members)):
            yield "function", f"2{gold.text}"
    if number(members[0]) != number(members[-1]):
        yield "other order", _matrix(gold, members[::-1])
        yield "sum", tex(sum((number(member) or Fraction(0) for member in members), Fraction(0)))
    if any(map(number, members)):
        yield "sign", f"-{gold.text}"
    yield "brackets changed", rf"\{{{', '.join(members)}\}}"


def _choice(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    wrong = rng.choice([letter for letter in "ABCDE" if letter != gold.extra])
    for text in ("({}) or ({})", "({}), ({})", "{} and {}", "{} or {}", "({}) and ({})", "{}, {}", "{}/{}", "{}{}"):
        yield "several letters", text.format(gold.extra, wrong)
        yield "several letters", text.format(wrong, gold.extra)
    yield "several letters", "(A), (B), (C), (D), (E)"
    yield "negation", f"not ({gold.extra})"
    yield "negation", f"all but {gold.extra}"
    yield "negation", f"not {gold.extra} but {wrong}"


def _words(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    for text in ("not {}", "non-{}", "never {}", "{} is wrong", "not a {}", "un{}", "{} or hexagon", "hexagon, {}"):
        yield "other words", text.format(gold.extra)
    yield "other words", rf"\text{{not {gold.extra}}}"
    yield "other words", rf"\text{{{gold.extra} or hexagon}}"


def _surd(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    assert gold.value is not None
    factor, root = int(gold.value), gold.extra
    for text in (f"{factor + 1}{root}", f"{-factor}{root}", f"{factor} + {root}", rf"{factor}{root} + 1", f"{factor}"):
        yield "off", text if factor != 1 or text != "1" else "7919"
    yield "function", f"({gold.text})^2"
    yield "function", rf"\frac{{1}}{{{gold.text}}}"
    approximate = factor * (3.141592653589793 if root == r"\pi" else int(root[6:-1]) ** 0.5)
    if abs(approximate - round(approximate)) > 0.01:
        yield "rounded", f"{approximate:.2f}"
        yield "rounded", str(round(approximate))
    yield "words after", f"{gold.text} squared"
    yield "words after", rf"{gold.text}\text{{ plus one}}"
    yield "words after", f"{gold.text} million"


def _polynomial(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    terms = list(gold.terms)
    at = rng.randrange(len(terms))
    degree, coefficient = terms[at]
    for term in ((degree, -coefficient), (degree, coefficient + 1 or 1), (degree, coefficient * 2)):
        yield "a term off", polynomial(gold, [*terms[:at], term, *terms[at + 1 :]])
    yield "a term less", polynomial(gold, terms[:at] + terms[at + 1 :])
    yield "off", f"{gold.text} + 1"
    yield "off", f"-({gold.text})"
    letter = "w" if gold.extra != "w" else "v"
    yield "other variable", gold.text.replace(gold.extra, letter)
    yield "words after", f"{gold.text} squared"
    yield "words after", rf"{gold.text}\text{{ plus one}}"
    yield "false equation", f"{gold.text} = 7919"


def _expression(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    for text in ("({}) + 1", "-({})", "2({})", "({})^2", r"\frac{{1}}{{1 + ({})^2}}", "({}) + x_1"):
        yield "off", text.format(gold.text)
    yield "words after", f"{gold.text} squared"
    yield "words after", rf"{gold.text}\text{{ plus one}}"
    yield "words after", f"{gold.text} million"
    yield "false chain", f"{gold.text} + 1 = {gold.text}"
