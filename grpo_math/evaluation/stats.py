"""Scores and their uncertainty: intervals, pass@k, maj@k, and the paired difference of two runs.

Resampling draws whole problems, because completions of one problem are not independent. Every function is exact or
seeded: the same arguments give the same results on every platform.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

TAIL = 0.025  # probability outside each end of a 95% interval
Z2 = NormalDist().inv_cdf(1 - TAIL) ** 2


# The 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom. With more of them the last is an upper bound.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


class PairedDifference(NamedTuple):
    """``difference`` = mean(after) - mean(before), its interval, and how many of the ``n`` problems rose and fell."""

    difference: float
    lo: float
    hi: float
    n: int
    gained: int
    lost: int

    @property
    def ci95(self) -> list[float]:
        return [self.lo, self.hi]


class SeedsDifference(NamedTuple):
    """The mean difference of runs that differ in the seed alone, with Student's 95% t interval over ``n`` seeds."""

    n: int
    difference: float
    ci95: Sequence[float]


def over_seeds(differences: Sequence[float]) -> SeedsDifference:
    """Return the mean difference of runs that differ in the seed alone.

    >>> over_seeds([0.1, 0.2, 0.3]).ci95  # 0.2 +- 4.303 * 0.1 / sqrt(3)
    [-0.0484..., 0.4484...]
    """
    n, mean = len(differences), fmean(differences)
    half = T_QUANTILES[min(n, 10) - 2] * stdev(differences) / math.sqrt(n)
    return SeedsDifference(n, mean, [mean - half, mean + half])


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a share (Wilson 1927). It is inside [0, 1] and accurate near both ends.

    With p = successes / n and z = 1.96, the normal quantile:

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    >>> [round(bound, 4) for bound in wilson(94, 256)]
    [0.3105, 0.4278]
    >>> wilson(0, 10)[0], wilson(10, 10)[1]
    (0.0, 1.0)
    """
    share = successes / n
    centre = share + Z2 / (2 * n)
    half = math.sqrt(Z2 * (share * (1 - share) / n + Z2 / (4 * n * n)))
    # Exact bounds for 0 of n and n of n, which the formula gives only up to rounding.
    lo = 0.0 if successes == 0 else (centre - half) / (1 + Z2 / n)
    hi = 1.0 if successes == n else (centre + half) / (1 + Z2 / n)
    return lo, hi


def wilson_for_means(means: Sequence[float], completions: int) -> tuple[float, float]:
    """Return Wilson's interval of the mean p over problems of mean@n, pass@k or maj@k.

    ``means`` has the value of each problem, in [0, 1], and ``completions`` is how many completions all problems have.
    The completions of a problem are not independent, so they count as fewer. With P problems, `wilson` gets the number
    n_eff that matches the standard error SE = stdev(means) / sqrt(P):

        n_eff = p (1 - p) / SE^2, at least P and at most the number of completions

    (Dean and Pagano 2015, on proportions from clusters). With values 0 and 1 the result equals `wilson`.

    >>> wilson_for_means([1, 0, 0, 1], 4) == wilson(2, 4)
    True
    >>> [round(bound, 3) for bound in wilson_for_means([1, 0], 8)]  # 2 problems, and not 8 answers
    [0.095, 0.905]
    """
    problems, mean = len(means), fmean(means)
    squared_error = variance(means) / problems if problems > 1 else 0.0
    # Without spread, or with one problem, the error is unknown: each problem counts once.
    effective = float(problems)
    if squared_error:
        effective = min(max(mean * (1 - mean) / squared_error, problems), completions)
    return wilson(mean * effective, effective)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n completions, drawn without replacement, contain one of the c right ones.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), in whole numbers.

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs contain the right one
    0.5
    >>> pass_at_k(4, 3, 2)  # every pair contains one
    1.0
    """
    pairs = math.comb(n, k)
    return (pairs - math.comb(n - c, k)) / pairs


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Return the probability that a majority vote over k completions, drawn without replacement, is right.

    ``answers`` are the extracted answers, compared as strings; None or a blank string abstains. The answer with most
    votes wins, and tied answers share the win equally. An answer is right by the share of its completions that
    ``correct`` flags, normally 0 or 1. If all abstain, the vote is wrong. The value is the exact mean over all C(n, k)
    draws, without simulation.

    >>> maj_at_k(["7", "7", "8"], [True, True, False], k=3)
    1.0
    >>> maj_at_k(["7", "8"], [True, False], k=2)  # a tie: half
    0.5
    >>> maj_at_k(["7", None, None], [True, False, False], k=2)  # 2 of 3 pairs contain the vote for 7
    0.6666666666666666
    """
    votes = Counter(answer for answer in answers if answer is not None and answer.strip())
    right = Counter(answer for answer, flag in zip(answers, correct, strict=True) if flag)
    abstaining = len(answers) - votes.total()
    wins = 0.0
    # For each right answer: the draws in which it gets ``won`` of the k votes and no other answer gets more.
    for answer, count in votes.items():
        if not right[answer]:
            continue
        others = [other for name, other in votes.items() if name != answer]
        for won in range(1, min(count, k) + 1):
            draws = _draws_that_do_not_beat(won, others, abstaining, k - won)
            shared = sum(ways / (1 + ties) for ties, ways in enumerate(draws))
            wins += right[answer] / count * math.comb(count, won) * shared
    return wins / math.comb(len(answers), k)


def _draws_that_do_not_beat(won: int, others: list[int], abstaining: int, size: int) -> list[int]:
    """Count the draws of ``size`` more completions with no other answer above ``won`` votes, by the number of ties."""
    # (completions drawn, answers that tie with ``won``) -> number of draws; the other answers are added one by one.
    ways = {(drawn, 0): math.comb(abstaining, drawn) for drawn in range(min(abstaining, size) + 1)}
    for count in others:
        grown: dict[tuple[int, int], int] = {}
        for (drawn, ties), before in ways.items():
            for votes in range(min(count, won, size - drawn) + 1):
                state = (drawn + votes, ties + (votes == won))
                grown[state] = grown.get(state, 0) + before * math.comb(count, votes)
        ways = grown
    return [ways.get((size, ties), 0) for ties in range(len(others) + 1)]


def paired_bootstrap(
    before: Sequence[float], after: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> PairedDifference:
    """Return the mean difference of two runs on the same problems, with a 95% percentile bootstrap over problems.

    ``before[i]`` and ``after[i]`` score problem i. Each resample draws n problems with replacement and takes the mean
    of after - before; the interval contains the middle 95% of these means.

    A bootstrap draws only differences that occurred. If all n are equal, to d, the interval covers what n problems can
    rule out: a share of at most u = 1 - 0.025^(1 / n) (about 3.7 / n) of all problems has another difference, from -1
    to 1 (as in the rule of three). The mean is then from d - u (1 + d) to d + u (1 - d).

    >>> paired_bootstrap([0, 0, 0, 1], [1, 1, 0, 0])
    PairedDifference(difference=0.25, lo=-0.5, hi=1.0, n=4, gained=2, lost=1)
    >>> paired_bootstrap([0, 1], [0, 1])
    PairedDifference(difference=0.0, lo=-0.841..., hi=0.841..., n=2, gained=0, lost=0)
    """
    import numpy  # here, because `grpo-math --help` does not need numpy

    n = len(before)
    differences = [float(new) - float(old) for old, new in zip(before, after, strict=True)]
    gained, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    # n draws with replacement are one multinomial draw of the count of each difference. `RandomState` is frozen: numpy
    # guarantees the same numbers in every version.
    counts = Counter(differences)
    if len(counts) == 1:
        mean, unseen = differences[0], 1 - TAIL ** (1 / n)
        return PairedDifference(mean, mean - unseen * (1 + mean), mean + unseen * (1 - mean), n, gained, lost)
    shares = [count / n for count in counts.values()]
    draws = numpy.random.RandomState(seed).multinomial(n, shares, size=resamples)
    means = numpy.sort(draws @ list(counts)) / n
    cut = int(resamples * TAIL)
    return PairedDifference(math.fsum(differences) / n, float(means[cut]), float(means[-1 - cut]), n, gained, lost)


def mcnemar(gained: int, lost: int) -> float:
    """Return McNemar's exact two-sided p-value, for the hypothesis that changes in both directions are equally likely.

    With m = gained + lost and X ~ Binomial(m, 1/2): min(1, 2 P(X <= min(gained, lost))).

    >>> mcnemar(5, 0)  # 2 / 2^5
    0.0625
    >>> mcnemar(0, 0), mcnemar(3, 3)
    (1.0, 1.0)
    """
    changed = gained + lost
    below = sum(math.comb(changed, x) for x in range(min(gained, lost) + 1))
    return min(1.0, 2 * below / 2**changed)
