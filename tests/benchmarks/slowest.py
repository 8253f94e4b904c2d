r"""The answer that costs the calling process most: a search that mutates answers towards more work and more CPU time.

    python tests/benchmarks/slowest.py --minutes 10 [--seed 0] [--longest 2500] [--keep 20] [--out worst.jsonl]

An answer is a completion and its gold. What counts is what happens in this process: the answer is extracted, compared
(never by a worker), and read as a number, as the rewards do. The worst are kept and mutated on: pieces inserted,
repeated, cut, spliced, nested and enlarged. In the end the worst are measured again, and printed with their CPU time
and the units that work.py charged for them; with ``--out`` they are written as rows of cases/hostile_answers.jsonl.

Does not judge a verdict: the farm of wrong answers does.
"""

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

from grpo_math.grading.batch import _quick
from grpo_math.grading.clean import _clean
from grpo_math.grading.compare import _fast_number, _readings, value
from grpo_math.grading.extract import extract
from grpo_math.grading.work import UNITS, bounded

POPULATION = 300
WORDS = r"""
. , ; : ? ! ' " ` * ** _ __ $ $$ # #### ( ) [ ] { } | / \ ^ ^{ } _{ & % ° < > = <= + - ~ @ 0 1 2 9 42 1,000 0.5 1/2
1e400 1e-400 10^{9} 9^{9^9} 2^{4000} 3^{3000} x y xy n i e ab abc x^2 x=1 f(x) sin cos(x) \ln \log_{2} \pi \pm \mp
\infty \frac \frac{ \frac12 \frac{1}{ \dfrac \sqrt \sqrt{ \sqrt{2} \sqrt[3]{ \sqrt[64]{ \binom{ \binom{99}{9} 100! 3!!
5000! 17! \gcd(12,18) \max(1,2) lcm(97,89,83) floor ceil |x| \lfloor 2 \rfloor \left( \right) \left\{ \{ \} \{1,2\}
(1,2) [1,2) 1,2,3 1:2 x>1 1<x<2 \cup \cap \in \emptyset \mathbb{R} \text{ \text{cm} \text{and} \text{or} \mathrm{kg} cm
miles per hour square inches dollars million dozen percent degrees ^\circ \, \! \; \\ \quad \begin{pmatrix}
\end{pmatrix} \begin{array}{cc} \end{array} \overline{3} 0.\overline{3} 10_2 _{12} \boxed{ \fbox{ </answer> <answer>
<think> </think> answer is The answer final answer is not or and because since but option (A) B. yes no twenty-five
five ½ ⅓ ² ⁻¹ √ π ÷ ≤ ∪ of to in for million is are
"""
RARE = [" ", "  ", "\n", "\t", "\u3000", "−", "̣́", "ﷺ", "∛", " is ", "the answer is ", "I think ", "a b ", ". "]
PIECES = [*WORDS.split(), *RARE]
BRACKETS = (("(", ")"), ("{", "}"), ("\\sqrt{", "}"), ("\\frac{1}{", "}"), ("2^{", "}"), ("|", "|"), ("\\{", "\\}"))
WRAPS = (("\\boxed{", "}"), ("<answer>", "</answer>"), ("#### ", ""), ("The answer is ", "."), ("", ""))
GOLDS = ("42", r"-\frac{3}{4}", "x^2-1", "1, 2", r"\{1,2,3\}", "(1,2)", r"(-\infty, 2] \cup [3, \infty)", "x=5", "A")
GOLDS += (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"5\text{ cm}", r"50\%", "8:34 pm", "yes", r"\sqrt{2}", "x < 5")


class Found(NamedTuple):
    seconds: float
    units: float
    gold: str
    text: str


def measured(gold: str, text: str, times: int = 1) -> Found:
    """The least CPU time of some tries, without what the caches remember."""
    best, spent, answer = float("inf"), 0.0, extract(text, "gsm8k").text or ""
    for _ in range(times):
        for cached in (_fast_number, _readings, _clean):
            cached.cache_clear()
        started = time.process_time()
        with bounded() as left:
            _quick(gold, text, "gsm8k")
        spent = UNITS - left[0]
        value(answer)
        best = min(best, time.process_time() - started)
    return Found(best, spent, gold, text)


def mutated(draw: random.Random, text: str, other: str) -> str:
    at, to = sorted(draw.randint(0, len(text)) for _ in range(2))
    part = text[at : min(to, at + draw.choice((1, 3, 10, 100)))]
    kind = draw.randrange(8)
    if kind <= 1:
        return text[:at] + "".join(draw.choices(PIECES, k=draw.choice((1, 1, 2, 4)))) + text[at:]
    if kind == 2:
        return text[:at] + part * draw.choice((2, 3, 10, 100, 1000)) + text[at + len(part) :]
    if kind == 3:
        return text[:at] + text[at + len(part) :]
    if kind == 4:
        return text[:at] + other[draw.randint(0, len(other)) :]
    if kind == 5:
        opening, closing = draw.choice(BRACKETS)
        return text[:at] + opening + text[at:to] + closing + text[to:]
    if kind == 6:
        return text[:at] + draw.choice(PIECES) * draw.choice((10, 100, 1000, 10000)) + text[at:]
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return text
    number = draw.choice(numbers)
    larger = draw.choice((number.group() * 2, str(draw.randrange(1, 5000)), "9" * draw.choice((3, 30, 300))))
    return text[: number.start()] + larger + text[number.end() :]


def search(minutes: float, seed: int, longest: int) -> list[Found]:
    draw, end = random.Random(seed), time.monotonic() + 60 * minutes
    kept = [
        measured(gold, opening + piece + closing)
        for gold in GOLDS
        for piece in PIECES[:9]
        for opening, closing in WRAPS
    ]
    tried = 0
    while time.monotonic() < end:
        tried += 1
        parent, other = draw.choice(kept), draw.choice(kept)
        opening, closing = draw.choice(WRAPS)
        inner = extract(parent.text).text or parent.text
        body = mutated(draw, inner, extract(other.text).text or "x")
        text = opening + body + closing if draw.random() < 0.7 else mutated(draw, parent.text, other.text)
        gold = parent.gold
        if draw.random() < 0.2:
            gold = draw.choice((*GOLDS, body[:1500], mutated(draw, body, "1")[:1500]))
        if len(text) > longest or not gold.strip():
            continue
        found = measured(gold, text)
        if found.seconds > 0.005:
            found = measured(gold, text, 3)
        kept.append(found)
        if len(kept) >= 2 * POPULATION:  # half by time, half by units
            kept.sort(key=lambda one: one.seconds, reverse=True)
            slow, rest = kept[: POPULATION // 2], kept[POPULATION // 2 :]
            kept = slow + sorted(rest, key=lambda one: one.units, reverse=True)[: POPULATION // 2]
    print(f"{tried} answers tried with seed {seed}")
    worst = sorted(kept, key=lambda one: one.seconds, reverse=True)[:60]
    return sorted((measured(one.gold, one.text, 5) for one in worst), key=lambda one: one.seconds, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=2500, help="characters of a completion")
    parser.add_argument("--keep", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    worst = search(options.minutes, options.seed, options.longest)[: options.keep]
    for one in worst:
        shown = one.text if len(one.text) < 160 else f"{one.text[:100]} ... {one.text[-40:]}"
        print(f"{1e3 * one.seconds:7.1f} ms {one.units / 1e6:6.2f} M units, {len(one.text):6d} characters: {shown!r}")
    if options.out is not None:
        rows = [
            {"kind": "found", "gold": [[one.gold, 1]], "prediction": [[one.text, 1]], "truth": "any"} for one in worst
        ]
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
