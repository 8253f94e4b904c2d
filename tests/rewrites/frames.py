r"""Completions around an answer: a box in prose, a phrase, answer tags, `####`; and `rewritings` of one gold.

>>> from .golds import read
>>> some = rewritings(read("42"), seed=0)
>>> sum(row.equivalent for row in some), sum(not row.equivalent for row in some)
(40, 40)

Does not grade.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from .breaks import broken, broken_completions, other
from .golds import Gold
from .keeps import Rewriting, kept

AFTER = ("", "\n\nI hope it is correct.", " This is what was asked for.", "\n\nThe check agrees with it.")


class Rewritten(NamedTuple):
    kind: str
    gold: str
    prediction: str
    equivalent: bool


def rewritings(gold: Gold, seed: int, most: int = 40) -> list[Rewritten]:
    """At most ``most`` completions that say the gold and ``most`` that do not, of as many kinds as there are."""
    rng = Random(f"{seed} {gold.text}")
    right = [(kind, _framed(text, rng)) for kind, text in kept(gold, rng)] + list(_prose(gold, rng))
    wrong = [(kind, _framed(text, rng)) for kind, text in broken(gold, rng)] + list(broken_completions(gold, rng))
    rows = []
    for rewriting, label in ((_spread(right, most, rng), True), (_spread(wrong, most, rng), False)):
        rows += [Rewritten(kind, gold.text, text, label) for kind, text in rewriting]
    return rows


def _spread(rewritten: list[Rewriting], most: int, rng: Random) -> list[Rewriting]:
    """Kind by kind in turn, in a drawn order, so that no kind crowds out another."""
    rng.shuffle(rewritten)
    turns: dict[str, int] = {}
    ranked: list[tuple[int, int, Rewriting]] = []
    for kind, text in dict.fromkeys(rewritten):
        turns[kind] = turns.get(kind, -1) + 1
        ranked.append((turns[kind], len(ranked), (kind, text)))
    return [pair for _, _, pair in sorted(ranked)[:most]]


def _framed(answer: str, rng: Random) -> str:
    """A completion that gives this answer. Bare dollars and prose keep out of formulas."""
    frames = [
        rf"We put it together. So it is \boxed{{{answer}}}.",
        rf"It follows that $\boxed{{{answer}}}${rng.choice(AFTER)}",
        rf"\[ \boxed{{{answer}}} \]",
        f"The two parts are added. </think> <answer>{answer}</answer>",
        f"<reasoning>\nThe two parts are added.\n</reasoning>\n<answer>\n{answer}\n</answer>\n",
        f"We add the two parts.\n#### {answer}",
        f"The answer is {answer}.",
    ]
    if not re.search(r"(?<!\\)\$|[A-Za-z]{4,} [A-Za-z]{2,}", answer):
        frames += [f"The answer is ${answer}$.", f"<answer>${answer}$</answer>", rf"The answer is \({answer}\)."]
    if re.search(r"(?<!\\)\$", answer):
        frames = [frames[i] for i in (0, 3, 4, 5, 6)]
    if "\n" in answer or (answer.endswith("\\") and not answer.endswith("\\\\")):
        frames = frames[3:5]
    framed = rng.choice(frames)
    return framed[:-1] if framed.endswith("..") else framed


def _prose(gold: Gold, rng: Random) -> Iterator[Rewriting]:
    """The gold as it is, in what models write around it."""
    box, step = rf"\boxed{{{gold.text}}}", rf"\boxed{{{other(gold, rng)}}}"
    yield "Minerva", f"Final Answer: The final answer is ${gold.text}$. I hope it is correct."
    yield "prose around", f"Therefore, the final answer is: ${box}$. I hope it is correct."
    yield "prose around", f"The answer is ${gold.text}$, because both parts have to be added."
    yield "prose around", f"**Answer:** ${gold.text}$"
    yield "prose around", f"Answer: ${gold.text}$"
    yield "prose around", f"The answer is **{gold.text}**."
    yield "prose around", f"So the final answer is $$\n{box}\n$$"
    yield "words after the box", f"Hence ${box}$.\n\nThis is the number that the problem asks for."
    yield "words after the box", f"Hence {box}. We can check this by going backwards through the steps."
    yield (
        "steps in boxes",
        (
            f"First we find ${step}$ for the smaller part of the figure.\n\nWith it we can work out the larger part, "
            f"which needs one more step.\n\nAltogether this gives ${box}$."
        ),
    )
    yield (
        "said twice",
        f"So the result is {box}.\n\nLet us check it once more, step by step. Indeed, the answer is {box}.",
    )
    yield "said twice", f"The answer is ${gold.text}$.\n\n#### {gold.text}"
    yield "thought first", rf"<think>Is it \boxed{{7919}}? No.</think> The answer is ${box}$."
    yield "thought first", f"I would say 7919, or not. </think> <answer>{gold.text}</answer>"
