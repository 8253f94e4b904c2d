r"""A policy's search for holes in the grader: wrong answers, mutated until one is paid.

    GRPO_MATH_DATA=DATA python tests/benchmarks/search_holes.py [--minutes 10] [--seed 0] [--out FILE] [--one_piece]

Each candidate begins as a wrong answer of a gold (tests/rewrites/breaks.py: another value, two values, a denial, a
number with words that change it), which stays in it in whole. Around it, and round by round, come the pieces that a
policy would try: the gold again, words, units, brackets, LaTeX, boxes, answer phrases, sentences that mention the gold.
Candidates that the grader treats in a way not seen before (its verdict, rule and what it extracted) are mutated
further; with ``--one_piece`` each mutation of one step is tried once instead. A candidate that comes to state the gold
as its one answer by accident is left out by `may_be_right`.

What is paid is shortened as long as it is paid, and written down once for each shape: {gold, prediction, format, kind,
in_format, rule, answer, why}. The worst are those in the format that was asked for, which the format rewards pay. The
list is for a person to read: a hole becomes a case of tests/cases/grading_pairs_farm.jsonl.

Does not test anything.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from rewrites import Gold, drawn, read
from rewrites.breaks import broken, other
from rewrites.pieces import AFTER, BEFORE, SYMBOLS, WORDS, WRAPS

from grpo_math.grading import Grade, grade_batch, shutdown
from grpo_math.grading.spelled import digits

BATCH = 400
OWN = (  # golds of all shapes, beside those that are drawn
    "6", "18", "391", "15,000", r"\frac{3}{7}", "0.35", r"\$18", r"36^\circ", "(1,200)", "2,1", r"[2,5)",
    r"(-\infty, 3)", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", r"3\sqrt{7}", r"12\pi", "x^2-3x+7", r"\text{(B)}",
    r"\text{east}", "x = 5", "212_3", r"98\%", r"12\text{ cm}", "-7", "1, 2, 5",
    r"(-\infty,1) \cup (4,\infty)", "0", "1", r"25\text{ cents}",
)  # fmt: skip
FRAMES = {  # where the answer @ stands, by the format that asks for it
    None: (
        *("The answer is @.", r"So it is \boxed{@}.", "It is $@$.", "@", "**Answer:** @", r"\[ \boxed{@} \]", "x = @"),
        *("The length is @.", "2y = 10, so x = @", "He paid @ more than Tom.", "They eat @ on Monday."),
    ),
    "gsm8k": ("We add.\n#### @", "#### @\n", "We add.\n#### $@$", "#### \\boxed{@}"),
    "boxed": (r"So it is \boxed{@}.", r"$\boxed{@}$", r"Hence $x = \boxed{@}$.", r"\fbox{@}", r"\boxed @"),
    "r1_zero": (
        *("We add. </think> <answer>@</answer>", "</think> <answer> $@$ </answer>"),
        r"</think><answer>\boxed{@}</answer>",
    ),
    "xml": (
        *("<reasoning>\nWe add.\n</reasoning>\n<answer>\n@\n</answer>\n", "<reasoning>a</reasoning><answer>@</answer>"),
    ),
}
UNDOES = re.compile(  # added to a wrong answer, may make it right, or an explanation of what stands before it
    r"\b(?:because|since|where|for|if)\b|"
    r"\\neg|\\notin|\\neq"
    r"|\b(?:not?|none|except|without|but|minus|negative|unless)\b"
    r"|\\implies|\\to\b|→|which is|i\.e\.|so |then|hence|therefore|≠|\\left\||factorial|half|twice|double|\bmod"
)
HIDES = re.compile(r"\\phantom|\\cancel|\\sout|~~|% |\\tag|white")  # around the wrong answer, takes it back
CALCULATES = re.compile(
    r"[-+^/*!|−_×√²½π]|\\sqrt|\\div|times|cdot|plus|squared|over|one|two|six|seven|\\mid|\\log|\bi\b"
)
COMPUTED = (  # kinds of wrong answers that arithmetic with what is added may make right
    *("sign", "sign in words", "function", "off", "upside down", "signs", "another value", "a term off", "digits"),
    *("a term less", "mixed number", "scale", "rounded"),
)
BARE = re.compile(
    r"\\\\|\\\{x : x =|\\[{}]|[\s${}.,\"'`*]"
    r"|\\displaystyle|\\[,;: ]|\\(?:text|[mh]box|mathrm|operatorname)|\\begin\{cases\}|\\[][()]|\u200b"
)
SIZES = r"\\left|\\right|\\q?quad|\s"
PHRASE = re.compile(r"(?i)(?:answers?|result|solution)\b[^\n]{0,30}?(?:\bis|\bare|\bbe|[:=])")


class Candidate(NamedTuple):
    """``pieces`` of the answer, of which ``core`` is the wrong answer; ``before`` and ``after`` stand around it."""

    gold: Gold
    wrong: str
    kind: str
    format: str | None
    frame: str
    pieces: tuple[str, ...]
    core: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def said(self, text: str) -> str:
        return text.replace("V", self.gold.text).replace("W", self.wrong)

    def text(self) -> str:
        answer = "".join(self.pieces)
        around = [" ".join(map(self.said, sentences)) for sentences in (self.before, self.after)]
        framed = self.frame.replace("@", answer)
        return "\n".join(filter(None, (around[0], framed))) + (f" {around[1]}" if around[1] else "")

    def shape(self) -> tuple[str, str | None, str]:
        """What stays the same when the gold does not."""
        text = self.text()
        for name, value in (("V", self.gold.text), ("W", self.wrong)):
            text = text.replace(value, name)
        return self.gold.shape, self.format, re.sub(r"\d+", "7", text)


def begun(golds: list[Gold], rng: Random) -> Candidate:
    """A wrong answer in a frame."""
    gold = rng.choice(golds)
    kind, text = rng.choice(list(broken(gold, rng)))
    answer_format = rng.choice(list(FRAMES))
    return Candidate(gold, other(gold, rng), kind, answer_format, rng.choice(FRAMES[answer_format]), (text,), 0)


def mutated(candidate: Candidate, rng: Random) -> Candidate:
    """One more piece, in the answer or around it; the core stays."""
    pieces, core = list(candidate.pieces), candidate.core
    choice = rng.random()
    if choice < 0.12:
        return candidate._replace(before=(*candidate.before, rng.choice(BEFORE)))
    if choice < 0.24:
        return candidate._replace(after=(*candidate.after, rng.choice(AFTER)))
    if choice < 0.36:
        at = rng.choice([core, rng.randrange(len(pieces))])
        pieces[at] = rng.choice(WRAPS).replace("@", pieces[at])
        return candidate._replace(pieces=tuple(pieces))
    if choice < 0.42:
        return candidate._replace(frame=rng.choice(FRAMES[candidate.format]))
    word = rng.choice(WORDS)
    values = (candidate.gold.text, candidate.gold.text, candidate.wrong, rng.choice(pieces))
    new = rng.choice((*values, f" {word} ", f" {word} ", rf"\text{{ {word} }}", *rng.sample(SYMBOLS, 2), " "))
    if rng.random() < 0.1:
        new = rng.choice(WRAPS).replace("@", new)
    at = rng.randrange(len(pieces) + 1)
    pieces.insert(at, new)
    return candidate._replace(pieces=tuple(pieces), core=core + (at <= core))


def with_one_piece(golds: list[Gold], rng: Random) -> Iterator[Candidate]:
    """Every wrong answer of each gold in each frame, with one piece before it, behind it or around it."""
    words = [form.format(word) for word in WORDS for form in (" {} ", r"\text{{ {} }}")]
    for gold, answer_format in product(golds, FRAMES):
        for (kind, text), frame in product(broken(gold, rng), FRAMES[answer_format]):
            bare = Candidate(gold, other(gold, rng), kind, answer_format, frame, (text,), 0)
            for piece in (*SYMBOLS, *words, gold.text):
                yield bare._replace(pieces=(piece, text), core=1)
                yield bare._replace(pieces=(text, piece))
            yield from (bare._replace(pieces=(wrap.replace("@", text),)) for wrap in WRAPS)
            yield from (bare._replace(before=(sentence,)) for sentence in BEFORE)
            yield from (bare._replace(after=(sentence,)) for sentence in AFTER)


def may_be_right(candidate: Candidate) -> bool:
    """Could a reader take it for the gold after all? By a piece that undoes the wrong answer, or by arithmetic."""
    added = [piece for i, piece in enumerate(candidate.pieces) if i != candidate.core]
    joined, pieces, core = "".join(candidate.pieces), "".join(added), candidate.pieces[candidate.core]
    if re.search(r"%|percent", pieces) and candidate.gold.value is not None:
        return True  # 0.35 and 35%, and the house rule on 35
    if HIDES.search(joined) or UNDOES.search(pieces) or re.search(r"\\left\||(?:'s|\\circ)[A-Za-z]", joined):
        return True  # bars; a word that the search runs together
    longer = candidate.kind == "negation" and re.search(rf"{re.escape(core)}(?<=\d)\d", joined)
    if longer or (candidate.kind == "taken back" and "?" in pieces):
        return True  # of a longer number
    if candidate.gold.text in added and (PHRASE.search(joined) or "box" in joined):
        return True
    if candidate.kind == "several letters" and re.search(r"(?<![A-E])[A-E]{2}(?![A-E])", core) and "(" in pieces:
        return True  # (B) BC, a choice with its text
    sentences = candidate.format is None or candidate.frame == r"\boxed @"
    if candidate.gold.text.endswith(".") and sentences and candidate.gold.text in joined:
        return True  # it ends its sentence
    letter = re.fullmatch(r"\(?[A-J]\)?", BARE.sub("", candidate.gold.text))
    if letter is not None and letter.group() in candidate.text() and re.search("[A-J]", core) is None:
        return True  # a choice with its text
    if candidate.kind == "the ends alone" and _alone(joined) == _alone(candidate.gold.text):
        return True
    if states_it(candidate) or named_by_it(candidate):
        return True
    if (candidate.gold.text == "0" and (re.search("[0|]|mid", pieces) or {"V", "(V)", "$V$"} & {*candidate.after})) or (
        re.sub(r"\\left|\\right|\\displaystyle|[(){} ]|\b0+(?=\d)", "", core) in ("0", "1")
        and candidate.gold.text in pieces
    ):
        return True  # a product with 0 or 1, or a zero before a number
    if re.search(r"(?:[*×]|\\cdot|\\times)(?:\s|\\text\{\s*\})*0(?![\d.])", joined):
        return True
    if candidate.kind in ("rounded", "either or", "mixed number") and "\\approx" in pieces:
        return True  # what is rounded stands before "is about"
    if candidate.kind in ("brackets changed", "one end", "an end off", "the ends alone") and "\\cup" in pieces:
        return True  # [0, 1) or [0, 1] is [0, 1]
    if candidate.kind == "one end" and "infty" in candidate.gold.text and re.search("[<>]", pieces):
        return True  # 3 > a
    inequality = candidate.kind == "several in a box" and re.search(r"[<>]|\\[lg]e", candidate.gold.text) is not None
    if inequality and ("and" in core or candidate.after):
        return True  # both of two inequalities are the narrower one
    if candidate.kind == "transposed" and "-" in joined:
        return True  # of an antisymmetric matrix
    if candidate.kind == "a member less" and re.search(r"\\pm|[-=^]|\\approx|\\cup", pieces + "".join(candidate.after)):
        return True  # both signs of a value; 1 = 1, 2
    if candidate.before and candidate.format is None and candidate.text().rstrip(" \n*$)").endswith("?"):
        return True  # a question behind an answer
    return computes_it(candidate, added)


def computes_it(candidate: Candidate, added: list[str]) -> bool:
    """May it come to the gold by arithmetic, as in ``-7 halves-7 halves``, ``one 5/12 minus one``, ``6 or 12-6``?"""
    sentences = (*candidate.before, *candidate.after)
    golds = [candidate.said(text) for text in sentences if text.strip("?$()%=/#, ") == "V"]
    pieces, core = "".join([*added, *golds]), candidate.pieces[candidate.core]
    led = "".join(candidate.pieces[: candidate.core])
    if candidate.gold.shape == "assignment" and candidate.gold.value == 0 and candidate.gold.text in added:
        return True  # 0 - 1b = 0, an equation that b = 0 solves
    if candidate.kind == "false chain" and completes_chain(candidate, added, pieces):
        return True
    calculated = candidate.gold.text in added or CALCULATES.search(pieces) is not None
    differs = "-" in core + pieces + candidate.gold.text and (calculated or re.search(r"\d", pieces) is not None)
    if (candidate.kind == "several" and differs) or (candidate.gold.shape == "matrix" and "matrix}" in pieces):
        return True  # a product of matrices, -3/2 1/2-3/2 1/2, 5/5 -4, (-5/3 -10/3) 1/3, 17/32 81/32-49/32 (17/32)
    if core.startswith("-") and (core in added or re.search(r"[\w}|-]\s*\Z", led)):
        return True
    if re.search("plus|minus|negative", core) and re.search(rf"\d|{CALCULATES.pattern}", pieces):
        return True
    if re.search(r"\bto \}?\s*1\b", core) or (" to " in core and candidate.gold.text in pieces):
        return True  # the ratio of a number to 1, of 9191 to 101
    ratio = r"(\d+) ?(?:\\text\{ )?(?:to|:)(?: \})? ?\1\b"
    if candidate.gold.text == "1" and re.search(ratio, "".join(candidate.pieces)):
        return True  # 11 to 11
    if re.search(r"\b(?:1|one)\}?\s*(?:\^|\*\*|²)|\^\{?1\b|√\s*1\b", candidate.text().replace("\u200b", "")):
        return True  # a power of 1, a first power
    if candidate.kind in ("several", "a member less", "length") and re.search(r"(?<![\d.])1(?![\d.])", pieces):
        return True  # 2, 1(1)
    if candidate.kind in ("several", "run together") and re.search(r"\\div|[÷/:²]|\b(?:two|six|seven)\b", pieces):
        return True  # 11/16 27/16 over 27/16, two 3/2 1/2, 0124/0124
    over = re.search("[A-J]/([A-J])", core)
    if candidate.kind == "several letters" and over is not None and over[1] in pieces:
        return True  # E/C times C
    signs = ":|[0-9]|" if candidate.kind == "either or" else ""
    if candidate.kind in ("other percent", "either or") and re.search(signs + CALCULATES.pattern, pieces):
        return True
    side_by_side = any(value in pieces for value in (candidate.gold.text, candidate.wrong, core))
    computed = candidate.kind in COMPUTED or re.search("halves|thirds", core) is not None
    return computed and (side_by_side or CALCULATES.search(pieces) is not None)


def completes_chain(candidate: Candidate, added: list[str], pieces: str) -> bool:
    """May a chain of equalities be true with what is added to it?"""
    core, whole = candidate.pieces[candidate.core], "".join(candidate.pieces)
    led = "".join(candidate.pieces[: None if candidate.after else -1])
    return (
        re.search(r"[-+*/−][\s}]*\Z|(?:\\sqrt|√)\s*\{?\d|1²", led) is not None  # 325 = 650-325, a root
        or re.search(r"\b(?:one|two|six|seven)\b|\\log|½", whole) is not None  # one 3/5 = 8/5, log 1 = 0
        or candidate.wrong in added  # 1/4 = 1/2 1/2
        or (candidate.gold.shape == "list" and re.search("[-×]", core + pieces) is not None)  # -1, 9 -1 = 8; 2 = 1×2, 1
        or (candidate.gold.shape == "union" and "\\cup" in pieces)  # with a part of itself
        or (candidate.wrong in core and re.search(r"[-−]", pieces) is not None)  # 3 = 6 - 3
        or re.search(r"x_|f\(|\b(?:[A-Za-z]|cm|km)\b", pieces) is not None  # a formula with an unknown name
    )


def held(text: str) -> str:
    """What a box holds: the braces that the text begins with, or without them its line."""
    depth = 0
    for at, char in enumerate(text if text.startswith("{") else ""):
        depth += ((char == "{") - (char == "}")) * (text[at - 1 : at] != "\\")
        if depth == 0:
            return text[1:at]
    return text.partition("\n")[0]


def states_it(candidate: Candidate) -> bool:
    """Does the gold by itself stand where the rules look for the one answer (docs/rewards.md), with the wrong answer
    elsewhere? The last box; of `####` its line; and where no format is asked for, the last line or what comes last."""
    gold, core = candidate.gold.text, candidate.pieces[candidate.core]
    text = candidate.text()
    boxes = [held(text[box.end() :]) for box in re.finditer(r"\\(?:boxed|fbox)\s*", text)]
    full, alone = [_alone(box) for box in boxes if _alone(box)], _alone(gold)
    if full and (full[-1] in (alone, f"({alone})", f"[{alone}]") or digits(full[-1]) == alone):
        return True
    if full and _alone(core) not in full[-1] and _signs(full[-1]) in (_signs(alone), f"({_signs(alone)})"):
        return True  # with a unit
    line = text.rpartition("####")[2].partition("\n")[0].strip()
    a_number = candidate.gold.value is not None and candidate.gold.shape != "assignment"
    named = candidate.format is None and not a_number and "####" in text
    if line and (candidate.format == "gsm8k" or named):
        return core not in line or BARE.sub("", line) == BARE.sub("", gold)
    behind = "".join(candidate.pieces[candidate.core + 1 :]) + " ".join(map(candidate.said, candidate.after))
    lines = [BARE.sub("", line) for line in candidate.frame.replace("@", "".join(candidate.pieces)).splitlines()]
    unmarked = {"gsm8k": not line, "boxed": not full}
    free = candidate.format is None or unmarked.get(candidate.format, False)
    return free and (gold in behind or any(one.endswith(BARE.sub("", gold)) for one in lines[:-1]))


def _alone(text: str) -> str:
    """Without dollar signs, spaces, punctuation and sizes."""
    return re.sub(SIZES, "", BARE.sub("", text))


def _signs(text: str) -> str:
    """The text without its letters; all of it where nothing else stands in it."""
    return re.sub("[A-Za-z]", "", text) or text


def named_by_it(candidate: Candidate) -> bool:
    """Is the wrong answer no more than a name, as in ``x_{minus 2} = 2`` or ``f(1) = 2``; the gold in other brackets,
    ``\\left[`` for ``[``; or the gold and an exclamation mark that ends the text, punctuation in free text?"""
    gold, core = candidate.gold.text, candidate.pieces[candidate.core]
    whole, sign = re.escape(core), r"(?:=|\\approx|\\in)"
    named = re.search(r"x_\{.*\}|f\(.*\)", core) and re.search(
        rf"{whole}[\s$}}]*{sign}|{sign}[\s}}]*{whole}", candidate.text()
    )
    whole = " ".join(["".join(candidate.pieces), *map(candidate.said, candidate.after)])
    whole = re.sub(r"<!--.*?-->|(?:\\operatorname\{)?\u200b\}?", "", whole)
    named = named or re.match(
        r"\s*(?:[A-Za-z]|\\[a-z]+\s*\{[^{}]*\}) ?(?:\\left)?\([^=]*\)(?: |\\text\{ \}|\\displaystyle)*= ?", whole
    )
    exclaims = (
        candidate.format is None
        and candidate.kind == "function"
        and re.search(r"!(?:[\s\\.*\"'`)\]?$]|\Z)", candidate.text().replace("\u200b", ""))
    )
    return named is not None or bool(exclaims) or re.sub(SIZES, "", core) == re.sub(SIZES, "", gold)


def paid(candidates: list[Candidate]) -> list[Grade]:
    """Graded as they stand, in the format that asked."""
    return grade_batch(
        [candidate.gold.text for candidate in candidates],
        [candidate.text() for candidate in candidates],
        answer_format=[candidate.format for candidate in candidates],
        timeout=2.0,
    )


def shortened(candidate: Candidate) -> Candidate:
    """Without the pieces that it is paid without."""
    while True:
        shorter = [
            candidate._replace(pieces=_without(candidate.pieces, i), core=candidate.core - (i < candidate.core))
            for i in range(len(candidate.pieces))
            if i != candidate.core
        ]
        before, after = candidate.before, candidate.after
        shorter += [candidate._replace(before=_without(before, i)) for i in range(len(before))]
        shorter += [candidate._replace(after=_without(after, i)) for i in range(len(after))]
        shorter = [c for c in shorter if not may_be_right(c)]
        still = [c for c, g in zip(shorter, paid(shorter), strict=True) if str(g.verdict) == "correct"]
        if not still:
            return candidate
        candidate = still[0]


def _without(pieces: tuple[str, ...], i: int) -> tuple[str, ...]:
    return pieces[:i] + pieces[i + 1 :]


class Search:
    """What has been tried: the candidates whose grading was new, and the shapes that were paid."""

    def __init__(self, golds: list[Gold], seed: int, one_piece: bool) -> None:
        self.golds, self.rng = golds, Random(seed)
        self.candidates = with_one_piece(golds, self.rng) if one_piece else self.drawn()
        self.pool: list[Candidate] = []
        self.behaviours: set[object] = set()
        self.shapes: set[object] = set()
        self.tried = 0

    def drawn(self) -> Iterator[Candidate]:
        while True:
            known = self.pool and self.rng.random() < 0.5
            candidate = self.rng.choice(self.pool) if known else begun(self.golds, self.rng)
            for _ in range(self.rng.choice((0, 1, 1, 2, 3, 4))):
                candidate = mutated(candidate, self.rng)
            yield candidate

    def round(self) -> list[dict[str, object]]:
        """Grade a batch; the new holes in it."""
        fair = (c for c in self.candidates if len(c.text()) < 400 and not may_be_right(c))
        batch, holes = list(islice(fair, BATCH)), []
        self.tried += len(batch)
        for candidate, grade in zip(batch, paid(batch), strict=True):
            answer = re.sub(r"\w+", "w", (grade.answer or "")[:40])
            behaviour = (candidate.gold.shape, candidate.format, str(grade.verdict), grade.reason, answer)
            if behaviour not in self.behaviours and str(grade.verdict) != "correct":
                self.behaviours.add(behaviour)
                self.pool.append(candidate)
            if str(grade.verdict) == "correct" and candidate.shape() not in self.shapes:
                self.shapes.add(candidate.shape())
                least = shortened(candidate)
                if least == candidate or least.shape() not in self.shapes:
                    self.shapes.add(least.shape())
                    holes.append(told(least))
        return holes


def told(candidate: Candidate) -> dict[str, object]:
    """A hole as a line of the file."""
    grade = paid([candidate])[0]
    added = [piece for i, piece in enumerate(candidate.pieces) if i != candidate.core]
    why = f"{candidate.pieces[candidate.core]!r}, with {[*added, *candidate.before, *candidate.after]}"
    return {
        "gold": candidate.gold.text, "prediction": candidate.text(), "format": candidate.format, "kind": candidate.kind,
        "in_format": grade.in_format, "rule": grade.reason, "answer": grade.answer, "why": why,
    }  # fmt: skip


def search(golds: list[Gold], minutes: float, seed: int, out: Path, one_piece: bool) -> None:
    found = Search(golds, seed, one_piece)
    holes: list[dict[str, object]] = []
    started = said = time.monotonic()
    before = -1
    while time.monotonic() - started < 60 * minutes and found.tried > before:
        before, new = found.tried, found.round()
        holes += new
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(hole, ensure_ascii=False) + "\n" for hole in new)
        if time.monotonic() - said > 20:
            said = time.monotonic()
            line = f"{found.tried} tried  {len(found.pool)} behaviours  {len(holes)} paid"
            print(f"{(said - started) / 60:5.1f} min  {line}", file=sys.stderr)
    took = (time.monotonic() - started) / 60
    print(f"{found.tried} candidates in {took:.0f} minutes, seed {seed}: {len(holes)} shapes are paid ({out})")
    kinds = Counter((hole["in_format"] and hole["format"], hole["kind"], hole["rule"]) for hole in holes)
    for (in_format, kind, rule), count in kinds.most_common():
        print(f"  {count:5d}  {kind}, by {rule}{f', in the format {in_format}' if in_format else ''}")
    shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one_piece", action="store_true", help="every mutation of one step, in turn, and no other")
    parser.add_argument("--out", type=Path, default=Path("holes.jsonl"))
    options = parser.parse_args()
    golds = [read(text) for text in OWN]
    if os.environ.get("GRPO_MATH_DATA") and not options.one_piece:
        golds += drawn(Path(os.environ["GRPO_MATH_DATA"]), 200, options.seed)
    search(golds, options.minutes, options.seed, options.out, options.one_piece)


if __name__ == "__main__":
    main()
