"""The reward functions that ship: verdicts, formats and lengths -> numbers.

Each takes TRL's columns as keyword lists and gives one number a completion, or None where the grader could not decide.

Does not grade (grading/ does), and does not catch what a function raises (guard.py does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading.compare import value
from grpo_math.grading.formats import FORMATS, in_format
from grpo_math.rewards.columns import (
    DEFAULT_FORMAT,
    DEFAULT_MAX_LENGTH,
    Completion,
    Reward,
    _formats,
    _gold_text,
    _golds,
    _grades,
    _lengths,
    _right,
    _setting,
    _within_format,
    text_of,
)
from grpo_math.rewards.guard import _name

# ---------------------------------------------------------------------------------------------- is the answer right?


def accuracy(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 for a right answer in whatever form, 0 for any other, None where it could not be graded.

    >>> accuracy([""], ["anything"], answer=[""])
    [None]
    """
    return [None if g.verdict.ungradable else float(_right(g)) for g in _grades("accuracy", completions, columns)]


def r1_zero(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 for a right answer inside ``</think> <answer>..</answer>``; out of the format no answer counts.

    >>> r1_zero(["", ""], ["so </think> <answer>7</answer>", "so <answer>7</answer>"], answer=["7", "7"])
    [1.0, 0.0]
    """
    return _within_format("r1_zero", completions, columns)


def gsm8k(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 for the right number after one closing ``####``; a right answer without it gets 0."""
    return _within_format("gsm8k", completions, columns)


def proximity(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 for a right answer; a wrong number p for the gold g gets ``0.5 * (1 - |p - g| / max(|p|, |g|))``, at least 0.

    So a near miss stays at or below one half, and any other wrong answer gets 0.

    >>> proximity([""] * 3, ["#### 100", "#### 90", "#### -100"], answer=["100"] * 3)
    [1.0, 0.45, 0.0]
    """
    rewards: list[float | None] = []
    for g, gold in zip(_grades("proximity", completions, columns), _golds("proximity", columns), strict=True):
        if g.verdict.ungradable:
            rewards.append(None)
        elif _right(g):
            rewards.append(1.0)
        else:
            p, q = value(g.answer or ""), value(_gold_text(gold))
            if p is None or q is None or p == q:
                rewards.append(0.0)
            else:
                rewards.append(max(0.0, 0.5 * float(1 - abs(p - q) / max(abs(p), abs(q)))))
    return rewards


def number_match(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """3 for the right answer, 1 for another number, 0 for no number.

    >>> number_match([""] * 3, ["#### 5", "#### 6", "#### lots"], answer=["5"] * 3)
    [3.0, 1.0, 0.0]
    """
    return [
        None if g.verdict.ungradable else 3.0 if _right(g) else float(value(g.answer or "") is not None)
        for g in _grades("number_match", completions, columns)
    ]


def make_shaped(correct: float = 1.0, kept: float = 0.1, short: float = 0.05, max_length: int | None = None) -> Reward:
    """A reward that adds ``correct`` for the right answer, ``kept`` for the format, and up to ``short`` for brevity.

    The last part is ``short * max(0, 1 - length / max_length)``.
    """

    def shaped(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        limit = max_length or _setting(columns, "max_completion_length") or DEFAULT_MAX_LENGTH
        grades = _grades("shaped", completions, columns)
        lengths = _lengths(completions, columns)
        formats = _formats(completions, columns)
        return [
            None
            if g.verdict.ungradable
            else correct * _right(g)
            + kept * in_format(text_of(c), f or DEFAULT_FORMAT)
            + short * max(0.0, 1 - n / limit)
            for g, c, f, n in zip(grades, completions, formats, lengths, strict=True)
        ]

    shaped.__doc__ = make_shaped.__doc__
    return shaped


# ------------------------------------------------------------------------------------------ does it keep the format?


def format_strict(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 where the whole completion keeps the format that was asked for.

    >>> format_strict(["", ""], ["so\\n#### 7", "#### 7 or\\n#### 8"], answer_format=["gsm8k", "gsm8k"])
    [1.0, 0.0]
    """
    formats = _formats(completions, columns)
    return [float(in_format(text_of(c), f or DEFAULT_FORMAT)) for c, f in zip(completions, formats, strict=True)]


def format_soft(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 where the tags of the format all stand there in their order, whatever stands around them.

    >>> format_soft([""], ["Well: <reasoning>1</reasoning> ok <answer>7</answer>."], answer_format=["xml"])
    [1.0]
    """
    formats = _formats(completions, columns)
    rewards: list[float | None] = []
    for completion, name in zip(completions, formats, strict=True):
        text, position = text_of(completion), 0
        for tag in FORMATS[name or DEFAULT_FORMAT].tags:
            found = text.find(tag, position)
            position = -1 if found < 0 else found + len(tag)
            if found < 0:
                break
        rewards.append(float(position >= 0))
    return rewards


def xml_count(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """Partial credit: 1/n for each of the format's n tags that occurs exactly once, less 0.001 a trailing character.

    Never below 0.

    >>> xml_count(["", ""], ["<reasoning>a</reasoning><answer>7</answer>", "<answer>7</answer>0123456789"])
    [1.0, 0.49]
    """
    formats = _formats(completions, columns)
    rewards: list[float | None] = []
    for completion, name in zip(completions, formats, strict=True):
        text, tags = text_of(completion), FORMATS[name or DEFAULT_FORMAT].tags
        credit = sum(text.count(tag) == 1 for tag in tags) / len(tags)
        closing = tags[-1]
        trailing = len(text.rsplit(closing, 1)[1].strip()) if closing.startswith("</") and closing in text else 0
        rewards.append(max(0.0, credit - 0.001 * trailing))
    return rewards


def integer_only(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
    """1 where the answer is an integer, right or wrong.

    >>> integer_only(["", ""], ["#### 1,200", "#### 7.5"], answer=["1", "1"])
    [1.0, 0.0]
    """
    numbers_ = [value(g.answer or "") for g in _grades("integer_only", completions, columns)]
    return [float(number is not None and number.denominator == 1) for number in numbers_]


def gated(reward: Reward, on: Reward = accuracy) -> Reward:
    """``reward`` where ``on`` is above 0, and 0 elsewhere, so that format alone earns nothing.

    >>> gated(format_strict)([""], ["#### 8"], answer=["7"], answer_format=["gsm8k"])
    [0.0]
    """

    def gated(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        gates = on(prompts, completions, **columns)
        values = reward(prompts, completions, **columns)
        return [None if gate is None else value if gate > 0 else 0.0 for gate, value in zip(gates, values, strict=True)]

    gated.__name__ = gated.__qualname__ = f"{_name(reward)}_on_{_name(on)}"
    return gated


# ---------------------------------------------------------------------------------------------- length and repetition


def make_overlong(max_length: int | None = None, cache: int | None = None) -> Reward:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), on the length n of a completion in tokens:

        0                              n <= max_length - cache
        (max_length - cache - n)/cache in between
        -1                             n > max_length

    Without settings, max_length is the trainer's ``max_completion_length`` and cache a fifth of it.

    >>> make_overlong(100, 20)([""] * 3, ["", "", ""], completion_ids=[[0] * 80, [0] * 90, [0] * 101])
    [0.0, -0.5, -1.0]
    """

    def overlong(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        most = max_length or _setting(columns, "max_completion_length") or DEFAULT_MAX_LENGTH
        soft = max(1, most // 5) if cache is None else cache
        return [max(-1.0, min(0.0, (most - soft - n) / soft)) for n in _lengths(completions, columns)]

    if cache is not None and cache <= 0:
        raise ConfigError("cache", cache, "is no length", "give the number of tokens before the limit, 1 or more")
    return overlong


def make_repetition(ngram: int = 3, penalty: float = 1.0) -> Reward:
    """``-penalty * (1 - distinct n-grams / n-grams)`` over the words of a completion; 0 for fewer than n words.

    >>> make_repetition(ngram=2)(["", ""], ["a b a b a", "a b c"])
    [-0.5, 0.0]
    """
    if ngram < 1:
        raise ConfigError("ngram", ngram, "is no length", "give the number of words, 1 or more")

    def repetition(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for completion in completions:
            words = text_of(completion).lower().split()
            grams = list(zip(*(words[i:] for i in range(ngram)), strict=False))
            rewards.append(penalty * (len(set(grams)) / len(grams) - 1) if len(words) > ngram else 0.0)
        return rewards

    return repetition
