"""The reward functions that ship, one formula each: verdicts, formats and lengths -> numbers.

Each takes TRL's columns as keyword lists and returns one number per completion, or None if the grader could not decide.

guard.py catches what a function raises.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean
from typing import Any, NamedTuple

from grpo_math.grading import Verdict
from grpo_math.grading.equal.clean import clean
from grpo_math.grading.equal.compare import value
from grpo_math.grading.formats import FORMATS
from grpo_math.grading.where import gold_answer
from grpo_math.rewards.guard import reward_name
from grpo_math.rewards.inputs import (
    DEFAULT_LIMIT,
    GRADE,
    GROUPS,
    MAX_LENGTH,
    Completions,
    Prompts,
    Reward,
    Rewards,
    Sized,
    completion_grades,
    completion_lengths,
    completion_text,
    grouped,
    in_formats,
    in_requested_format,
    is_right,
    prompt_formats,
    read_gold_answers,
)

# ---------------------------------------------------------------------------------------------- is the answer correct?


def accuracy(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 for a correct answer in any form, 0 for a wrong one, None if the answer could not be graded.

    >>> accuracy([""], ["anything"], answer=[""])
    [None]
    """
    return [is_right(g) for g in completion_grades("accuracy", completions, columns)]


def r1_zero(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 for a correct answer inside ``</think> <answer>..</answer>``; other answers get 0.

    >>> r1_zero(["", ""], ["so </think> <answer>7</answer>", "so <answer>7</answer>"], answer=["7", "7"])
    [1.0, 0.0]
    """
    return _within_format("r1_zero", completions, columns)


def gsm8k(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 for the correct number after one closing ``####``; a correct answer without it gets 0.

    >>> gsm8k([""] * 2, ["so\\n#### 7", "\\\\boxed{7}"], answer=["7"] * 2)
    [1.0, 0.0]
    """
    return _within_format("gsm8k", completions, columns)


def _within_format(name: str, completions: Completions, columns: dict[str, Any]) -> Rewards:
    """Return 1 for a correct answer in the format, else 0. A gold answer that cannot be graded gives None."""
    # Existing grades are of another format, so the answers are graded again.
    if any(f != name for f in prompt_formats(completions, columns)):
        columns = {**columns, "answer_format": name, GRADE: None}
    grades, kept = completion_grades(name, completions, columns), in_requested_format(completions, columns)
    return [
        is_right(g) if g.verdict is Verdict.BAD_GOLD or in_its_format else 0.0
        for g, in_its_format in zip(grades, kept, strict=True)
    ]


def proximity(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 for a right answer, and for a wrong number p and the gold g ``0.5 * (1 - |p - g| / max(|p|, |g|))``.

    The least is 0, so a near miss gets at most one half. A wrong answer that is not a number gets 0.

    >>> proximity([""] * 3, ["#### 100", "#### 90", "#### -100"], answer=["100"] * 3)
    [1.0, 0.45, 0.0]
    """
    rewards: Rewards = []
    for g, gold in zip(
        completion_grades("proximity", completions, columns), read_gold_answers("proximity", columns), strict=True
    ):
        reward, answer, gold = is_right(g), g.answer or "", gold_answer(gold)
        p, q = value(answer), value(gold)
        if reward == 0.0 and p is not None and q is not None and p != q:
            # A percentage is its number as well: 49% is near 50 and near 0.5.
            factor = Fraction(100) ** (("%" in clean(answer)) - ("%" in clean(gold)))
            reward = 0.5 * max(_nearness(number, q) for number in {p, factor * p} - {q})
        rewards.append(reward)
    return rewards


def _nearness(p: Fraction, q: Fraction) -> float:
    """Return ``1 - |p - q| / max(|p|, |q|)``, at least 0: the smaller over the larger number if the signs agree."""
    products = abs(p.numerator * q.denominator), abs(q.numerator * p.denominator)
    # No `Fraction` of the quotient, because its gcd is slow for long numbers.
    return min(products) / max(products) if (p > 0) == (q > 0) else 0.0


def number_match(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 3 for the right answer, 1 for another number, 0 for no number.

    >>> number_match([""] * 3, ["#### 5", "#### 6", "#### lots"], answer=["5"] * 3)
    [3.0, 1.0, 0.0]
    """
    return [
        None if g.verdict.ungradable else 3.0 if is_right(g) else float(value(g.answer or "") is not None)
        for g in completion_grades("number_match", completions, columns)
    ]


def shaped(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 for the right answer, plus 0.05 for the format, plus ``0.025 * max(0, 1 - length / max_length)``.

    ``max_length`` is the trainer's ``max_completion_length``.

    >>> row = {"answer": ["7"], "answer_format": ["gsm8k"], "completion_ids": [[0] * 40], MAX_LENGTH: 100}
    >>> shaped([""], ["so\\n#### 7"], **row)  # 1 + 0.05 + 0.025 * 0.6
    [1.065]
    """
    limit = columns.get(MAX_LENGTH, DEFAULT_LIMIT)
    grades, in_format = completion_grades("shaped", completions, columns), in_requested_format(completions, columns)
    return [
        None if (right := is_right(g)) is None else right + 0.05 * in_its_format + 0.025 * max(0.0, 1 - n / limit)
        for g, in_its_format, n in zip(grades, in_format, completion_lengths(completions, columns), strict=True)
    ]


# ------------------------------------------------------------------------------------------ does it keep the format?


def format_strict(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 if the whole completion keeps to the requested format, else 0.

    >>> format_strict(["", ""], ["so\\n#### 7", "#### 7 or\\n#### 8"], answer_format=["gsm8k", "gsm8k"])
    [1.0, 0.0]
    """
    return [float(kept) for kept in in_requested_format(completions, columns)]


def format_soft(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 if all tags of the format occur in order, with any text around them, else 0.

    >>> format_soft([""], ["Well: <reasoning>1</reasoning> ok <answer>7</answer>."], answer_format=["xml"])
    [1.0]
    """
    rewards: Rewards = []
    for text, f in in_formats(completions, columns):
        for tag in FORMATS[f].tags:  # each after the previous tag
            _, match, text = text.partition(tag)
        rewards.append(float(bool(match)))
    return rewards


def xml_count(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1/n for each of the format's n tags that occurs exactly once, minus 0.001 per trailing character.

    Never below 0.

    >>> xml_count(["", ""], ["<reasoning>a</reasoning><answer>7</answer>", "<answer>7</answer>0123456789"])
    [1.0, 0.49]
    """
    rewards: Rewards = []
    for text, f in in_formats(completions, columns):
        tags, closing = FORMATS[f].tags, FORMATS[f].tags[-1]
        credit = sum(text.count(tag) == 1 for tag in tags) / len(tags)
        # The last tag of other formats opens the answer, so the text after it is not trailing.
        trailing = len(text.rsplit(closing, 1)[1].strip()) if closing.startswith("</") and closing in text else 0
        rewards.append(max(0.0, credit - 0.001 * trailing))
    return rewards


def integer_only(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 if the answer is an integer, right or wrong, else 0.

    >>> integer_only(["", ""], ["#### 1,200", "#### 7.5"], answer=["1", "1"])
    [1.0, 0.0]
    """
    answers = [value(g.answer or "") for g in completion_grades("integer_only", completions, columns)]
    return [float(number is not None and number.denominator == 1) for number in answers]


def gated(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return `format_soft` of a completion with a correct answer, else 0, so that the format alone earns nothing.

    >>> gated([""], ["<reasoning>1</reasoning> <answer>8</answer>"], answer=["7"])
    [0.0]
    """
    in_format = format_soft(prompts, completions, **columns)
    right = accuracy(prompts, completions, **columns)
    return [None if one is None else value if one > 0 else 0.0 for one, value in zip(right, in_format, strict=True)]


# ---------------------------------------------------------------------------------------------- length and repetition


def overlong(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) of a completion with n tokens:

        0                              n <= max_length - cache
        (max_length - cache - n)/cache in between
        -1                             n > max_length

    ``max_length`` is the trainer's ``max_completion_length``, and cache is a fifth of it.

    >>> overlong([""] * 3, [""] * 3, completion_ids=[[0] * n for n in (80, 95, 101)], **{MAX_LENGTH: 100})
    [0.0, -0.75, -1.0]
    """
    most = columns.get(MAX_LENGTH, DEFAULT_LIMIT)
    cache = max(1, most // 5)
    return [max(-1.0, min(0.0, (most - cache - n) / cache)) for n in completion_lengths(completions, columns)]


def no_reward(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 0 for each completion: the reward of on-policy distillation, ``rewards: []``."""
    return [0.0] * len(completions)


def brevity(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return ``-p * n / mean`` for a length of n in any unit (ALP, arXiv 2506.05256); None for an ungraded completion.

    p is the share of the group's graded completions that are right, the mean is that of the lengths of the right ones:
    the normalizer that the paper leaves open. A group without a right completion has the reward 0: a problem that is
    too hard costs no length. A group is what the trainer gives, or else the completions of one prompt.

    >>> texts, lengths = ["#### 7", "#### 7", "#### 8"], [10, 30, 40]
    >>> brevity(["3 + 4?"] * 3, texts, answer=["7"] * 3, completion_ids=[[0] * n for n in lengths])
    [-0.3333333333333333, -1.0, -1.3333333333333333]
    """
    grades = completion_grades("brevity", completions, columns)
    sizes = list(zip(completion_lengths(completions, columns), map(is_right, grades), strict=True))
    groups = columns.get(GROUPS) or grouped(map(str, prompts), sizes)
    return [_relative_brevity(*one, group) for one, group in zip(sizes, groups, strict=True)]


def _relative_brevity(n: int, right: float | None, group: Sequence[Sized]) -> float | None:
    lengths = [length for length, is_right in group if is_right]
    graded = sum(is_right is not None for _, is_right in group)
    if right is None or not lengths:
        return None if right is None else 0.0
    return -len(lengths) / graded * n / (fmean(lengths) or 1.0)


# Chinese and Japanese have no spaces between words.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")


def repetition(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return ``distinct n-grams / n-grams - 1`` over the words of a completion, with n = 3.

    A completion of at most three words gets 0. A Chinese or Japanese character is a word.

    >>> repetition(["", ""], ["a b c a b c", "a b c d"])
    [-0.25, 0.0]
    """
    rewards: Rewards = []
    for completion in completions:
        words = _WORD.findall(completion_text(completion).lower())
        grams = [*zip(words, words[1:], words[2:], strict=False)]
        rewards.append(len({*grams}) / len(grams) - 1 if len(words) > 3 else 0.0)
    return rewards


# ------------------------------------------------------------------------------------------------ the rewards that ship


class Shipped(NamedTuple):
    """A reward that ships, and what checks of settings, data and runs have to know about it."""

    reward: Reward
    needs_gold: bool = True
    can_be_negative: bool = False
    is_format: bool = False  # pays for the format alone


SHIPPED = {
    reward_name(one.reward): one
    for one in (
        Shipped(accuracy),
        Shipped(r1_zero),
        Shipped(gsm8k),
        Shipped(format_strict, needs_gold=False, is_format=True),
        Shipped(format_soft, needs_gold=False, is_format=True),
        Shipped(xml_count, needs_gold=False, is_format=True),
        Shipped(integer_only),
        Shipped(proximity),
        Shipped(number_match),
        Shipped(brevity, can_be_negative=True),
        Shipped(shaped),
        Shipped(overlong, needs_gold=False, can_be_negative=True),
        Shipped(repetition, needs_gold=False, can_be_negative=True),
        Shipped(gated),
    )
}
REWARDS: dict[str, Reward] = {name: one.reward for name, one in SHIPPED.items()}
