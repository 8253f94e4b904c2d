r"""Find problems of an evaluation that are in a training set too: n-gram overlap by words.

A problem overlaps if 13 consecutive words also occur in a training problem, the rule of the GPT-3 paper (Brown et al.
2020, arXiv 2005.14165, section 4). Words are compared without case and punctuation. Numbers and operators count as
words, because they carry the meaning in mathematics. In the paper, a shorter text overlaps if it occurs anywhere in a
training text. Here it has to be the whole training problem, or "What is 1 + 2?" would be in "What is 1 + 2 + 3?". The
paper chooses n between 8 and 13 by the length of a set's texts. Here n is 13, because 8 consecutive words are often a
common phrase (81 of GSM8K's 1,319 test problems share 8 words with a training problem; 3 share 13 words).

An overlap is a hint and not a proof: a phrase that a source repeats counts like a copy.

Does not find a problem in other words, and compares problems, not solutions.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_math.problems.datasets import problem_table
from grpo_math.problems.prompts import PROBLEM, as_template
from grpo_math.problems.stored import rows_with

NGRAM = 13
SPLITS = ("train", "test", "heldout")
SIGNS = r"\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|[-+*/=<>^|%]"
# The letters of all languages take twice the time.
WORD, ASCII_WORD = re.compile(rf"[^\W\d_]+|{SIGNS}"), re.compile(rf"[a-z]+|{SIGNS}", re.ASCII)
SPACING = re.compile(r"[\s$]|\\[,;!]")


def words(text: str) -> list[str]:
    r"""Return the words of a text, normalised for the comparison.

    >>> words("What is $1,200 + 4.5$?"), words(r"\frac{x}{2}")
    (['what', 'is', '1200', '+', '4.5'], ['frac', 'x', '2'])
    """
    matched = (ASCII_WORD if text.isascii() else WORD).findall(text.casefold())
    return [word.replace(",", "") for word in matched] if "," in text else matched


def overlap(
    problems: Sequence[Mapping[str, Any]], training: Sequence[Mapping[str, Any]], ngram: int = NGRAM
) -> dict[str, Any]:
    """Count the ``problems`` that share ``ngram`` consecutive words with a training problem, or are equal to one.

    ``equal`` counts problems that differ only in case, spaces and final punctuation.

    >>> train = [{"problem": "What is 3 + 4?"}]
    >>> result = overlap([{"problem": "what is 3+4"}, {"problem": "What is 3 + 5?"}], train)
    >>> result["overlapping"], result["equal"], result["share"]
    (1, 1, 0.5)
    """
    return overlaps({"": problems}, training, ngram)[""]


def overlaps(
    sets: Mapping[str, Sequence[Mapping[str, Any]]], training: Sequence[Mapping[str, Any]], ngram: int = NGRAM
) -> dict[str, dict[str, Any]]:
    """Return the `overlap` of each set with the training problems, which are read once for all sets."""
    equal: set[tuple[str, int]] = set()
    shared: set[tuple[str, int]] = set()
    for _, same, similar in matches(sets, training, ngram):
        equal |= same
        shared |= similar
    results = {}
    for name, problems in sets.items():
        overlapping = sum(of_set == name for of_set, _ in equal | shared)
        results[name] = {
            "ngram": ngram,
            "n": len(problems),
            "training_problems": len(training),
            "overlapping": overlapping,
            "share": overlapping / len(problems),
            "equal": sum(of_set == name for of_set, _ in equal),
        }
    return results


def matches(
    sets: Mapping[str, Sequence[Mapping[str, Any]]], training: Iterable[Mapping[str, Any]], ngram: int = NGRAM
) -> Iterator[tuple[Any, set[tuple[str, int]], set[tuple[str, int]]]]:
    """Yield each training problem that is in a set, with the positions (set, index) of equal problems, and of problems
    that share ``ngram`` consecutive words with it."""
    # The index is over the problems of the evaluation, because a training set may be a thousand times larger. The
    # keys are whole problems (a text) and n-grams (a tuple).
    index: dict[str | tuple[str, ...], set[tuple[str, int]]] = {}
    for name, problems in sets.items():
        for i, row in enumerate(problems):
            for key in {whole(row["problem"])} | {*ngrams(row["problem"], ngram)}:
                index.setdefault(key, set()).add((name, i))
    for row in rows_with(training, "problem") if sets else ():
        equal = index.get(whole(row["problem"]), set())
        similar = {position for gram in ngrams(row["problem"], ngram) for position in index.get(gram, ())}
        if equal or similar:
            yield row, equal, similar


def against(problems: Sequence[Mapping[str, Any]], training: str) -> dict[str, Any]:
    """Return the `overlap` with a training set by name, and ``:SPLIT`` unless it is train."""
    name, _, split = training.rpartition(":")
    if split not in SPLITS:
        name, split = training, "train"
    table = problem_table(name, split, template=as_template(PROBLEM), columns=None, skip_bad_rows=True)
    return {"training_data": name, "training_split": split, **overlap(problems, table)}


def overlap_line(result: Mapping[str, Any]) -> str:
    """Return the result of `overlap` as one line.

    >>> overlap_line(overlap([{"id": "a", "problem": "What is 3 + 4?"}], [{"id": "t", "problem": "What is 3 + 4?"}]))
    'contamination: 1 of 1 problems (100.0%) overlap with the 1 training problems: 1 equal, 0 by 13 words in a row'
    """
    overlapping, equal = result["overlapping"], result["equal"]
    return (
        f"contamination: {overlapping} of {result['n']} problems ({result['share']:.1%}) overlap with the "
        f"{result['training_problems']:,} training problems: {equal} equal, {overlapping - equal} by "
        f"{result['ngram']} words in a row"
    )


def ngrams(text: str, n: int = NGRAM) -> Iterator[tuple[str, ...]]:
    """Yield every n consecutive words of a text.

    >>> [*ngrams("How many are left?", 3)]
    [('how', 'many', 'are'), ('many', 'are', 'left')]
    """
    all_words = words(text)
    return zip(*(all_words[start:] for start in range(n)), strict=False)


def whole(text: str) -> str:
    """Return a problem without case, spaces and final punctuation, to find equal problems."""
    # The expression is slow, and needed for spaces of LaTeX only.
    bare = SPACING.sub("", text) if "\\" in text else "".join(text.split()).replace("$", "")
    return bare.casefold().rstrip(".?!")
