"""How sure a score is: accuracy intervals, pass@k, maj@k, mean@n, and the paired difference of two runs.

Problems are the unit that is resampled, since completions of one problem are not independent of each other. Every
function is exact or seeded: the same arguments give the same figures on every platform.

Does not grade and does not read files; it takes counts, flags and scores.
"""

import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple


class PairedDifference(NamedTuple):
    """``difference`` = mean(after) - mean(before), its interval, and how many of the ``n`` problems rose and fell."""

    difference: float
    lo: float
    hi: float
    n: int
    gained: int
    lost: int


class MeanAtN(NamedTuple):
    mean: float
    standard_error: float | None


def wilson(successes: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927), which stays inside [0, 1] and is honest near both ends.

    With p = successes / n and z the normal quantile of the level:

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    >>> [round(bound, 4) for bound in wilson(94, 256)]
    [0.3105, 0.4278]
    >>> wilson(0, 10)[0], wilson(10, 10)[1]
    (0.0, 1.0)
    """
    _positive("n", n)
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} is not between 0 and n={n}")
    z2 = NormalDist().inv_cdf(_tail(level)) ** 2
    share = successes / n
    centre = share + z2 / (2 * n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n)))
    # The ends are exact in algebra and off by a rounding in floats: 0 of n has the bound 0, n of n the bound 1.
    lo = 0.0 if successes == 0 else (centre - half) / (1 + z2 / n)
    hi = 1.0 if successes == n else (centre + half) / (1 + z2 / n)
    return lo, hi


def wilson_of_means(scores: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of mean@n, the mean p over P problems of shares in [0, 1], ``scores[i]`` being problem i's.

    The completions of a problem are not independent, so that they count as fewer. The number that stands for n in
    `wilson` is the one that has the standard error SE of `mean_at_n`:

        n_eff = p (1 - p) / SE^2, at least P and at most the number of completions

    (Dean and Pagano 2015, on proportions from clusters). With one completion a problem it is `wilson` itself.

    >>> wilson_of_means([[1], [0], [0], [1]]) == wilson(2, 4)
    True
    >>> [round(bound, 3) for bound in wilson_of_means([[1, 1, 1, 1], [0, 0, 0, 0]])]  # 2 problems, and not 8 answers
    [0.095, 0.905]
    """
    mean, error = mean_at_n(scores)
    if not all(0 <= score <= 1 for row in scores for score in row):
        raise ValueError("a score is not between 0 and 1")
    most = sum(map(len, scores))
    spread = mean * (1 - mean)
    # Without spread, or with one problem, nothing is known of the error: each problem counts once.
    effective = min(max(spread / error**2, len(scores)), most) if error else len(scores)
    return wilson(mean * effective, effective, level)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of the n completions of a problem, drawn without replacement, hold one of the c right ones.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), in whole numbers.

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs hold the right one
    0.5
    >>> pass_at_k(4, 3, 2)  # every pair holds one
    1.0
    """
    _draw(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"c={c} is not between 0 and n={n}")
    pairs = math.comb(n, k)
    return (pairs - math.comb(n - c, k)) / pairs


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """The chance that a majority vote over k of a problem's completions, drawn without replacement, is right.

    ``answers`` are the extracted answers, equal where the strings are equal; None or blank abstains. The answer with
    most votes wins; answers that tie for most share the win equally. An answer counts as right by the share of its
    completions that ``correct`` flags, normally 0 or 1. A vote in which all abstain is wrong. The value is exact, the
    mean over all C(n, k) draws, and no draw is simulated.

    >>> maj_at_k(["7", "7", "8"], [True, True, False], k=3)
    1.0
    >>> maj_at_k(["7", "8"], [True, False], k=2)  # a tie: half
    0.5
    >>> maj_at_k(["7", None, None], [True, False, False], k=2)  # 2 of 3 pairs hold the vote for 7
    0.6666666666666666
    """
    n = len(answers)
    if len(correct) != n:
        raise ValueError(f"{n} answers came with {len(correct)} flags: every completion needs one of each")
    _draw(n, k)
    votes = Counter(answer for answer in answers if answer is not None and answer.strip())
    right = Counter(answer for answer, flag in zip(answers, correct, strict=True) if flag)
    abstaining = n - votes.total()
    wins = 0.0
    for answer, count in votes.items():
        if not right[answer]:
            continue
        others = [other for name, other in votes.items() if name != answer]
        for won in range(1, min(count, k) + 1):
            draws = _draws_that_do_not_beat(won, others, abstaining, k - won)
            shared = sum(ways / (1 + ties) for ties, ways in enumerate(draws))
            wins += right[answer] / count * math.comb(count, won) * shared
    return wins / math.comb(n, k)


def _draws_that_do_not_beat(won: int, others: list[int], abstaining: int, size: int) -> list[int]:
    """Ways to draw ``size`` more completions with no other answer above ``won`` votes, by how many answers reach it."""
    ways = {(drawn, 0): math.comb(abstaining, drawn) for drawn in range(min(abstaining, size) + 1)}
    for count in others:
        grown: dict[tuple[int, int], int] = {}
        for (drawn, ties), before in ways.items():
            for votes in range(min(count, won, size - drawn) + 1):
                state = (drawn + votes, ties + (votes == won))
                grown[state] = grown.get(state, 0) + before * math.comb(count, votes)
        ways = grown
    return [ways.get((size, ties), 0) for ties in range(len(others) + 1)]


def mean_at_n(scores: Sequence[Sequence[float]]) -> MeanAtN:
    """The mean over problems of each problem's mean score, and its standard error over problems.

    ``scores[i]`` holds the scores of problem i's completions. With m_i their mean and P problems the error is
    stdev(m) / sqrt(P); a single problem has none.

    >>> mean, error = mean_at_n([[1, 1], [0, 1], [0, 0], [1, 0]])  # means 1, 1/2, 0, 1/2; their variance is 1/6
    >>> mean, round(error, 6)
    (0.5, 0.204124)
    >>> mean_at_n([[1, 0]])
    MeanAtN(mean=0.5, standard_error=None)
    """
    _positive("the number of problems", len(scores))
    if not all(len(row) for row in scores):
        raise ValueError("a problem without a completion has no mean")
    means = [fmean(row) for row in scores]
    return MeanAtN(fmean(means), stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None)


def paired_bootstrap(
    before: Sequence[float], after: Sequence[float], resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> PairedDifference:
    """The mean difference of two runs on the same problems, with a percentile bootstrap interval over problems.

    ``before[i]`` and ``after[i]`` score problem i. Each resample draws n problems with replacement and takes the mean
    of after - before; the interval holds the middle ``level`` of these means. A bootstrap only knows differences that
    it saw: if all are equal, the interval has no width.

    >>> paired_bootstrap([0, 0, 0, 1], [1, 1, 0, 0])
    PairedDifference(difference=0.25, lo=-0.5, hi=1.0, n=4, gained=2, lost=1)
    >>> paired_bootstrap([0, 1], [0, 1])
    PairedDifference(difference=0.0, lo=0.0, hi=0.0, n=2, gained=0, lost=0)
    """
    n = len(before)
    if len(after) != n:
        raise ValueError(f"before has {n} problems and after {len(after)}: a pair needs the same problems in both")
    _positive("n", n)
    _positive("resamples", resamples)
    tail = 1 - _tail(level)
    differences = [float(b) - float(a) for a, b in zip(before, after, strict=True)]
    if not all(map(math.isfinite, differences)):
        raise ValueError("a score is not a finite number")
    gained, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    rng = random.Random(seed)
    if all(d in (-1, 0, 1) for d in differences):
        sums: list[float] = _sums_of_signs(n, gained, lost, resamples, rng)
    else:
        sums = [math.fsum(rng.choices(differences, k=n)) for _ in range(resamples)]
    sums.sort()
    cut = int(resamples * tail)
    return PairedDifference(math.fsum(differences) / n, sums[cut] / n, sums[-1 - cut] / n, n, gained, lost)


def _sums_of_signs(n: int, gained: int, lost: int, resamples: int, rng: random.Random) -> list[float]:
    """Sums of n draws from `gained` times +1, `lost` times -1 and zeros: two binomial draws instead of n draws."""
    changed = gained + lost
    if not changed:
        return [0.0] * resamples
    how_many = _binomial_table(n, changed / n)
    rising = cache(lambda moved: _binomial_table(moved, gained / changed))
    sums: list[float] = []
    for _ in range(resamples):
        moved = min(bisect(how_many, rng.random()), n)
        up = min(bisect(rising(moved), rng.random()), moved)
        sums.append(float(2 * up - moved))
    return sums


def _binomial_table(n: int, p: float) -> list[float]:
    """P(X <= 0), P(X <= 1), ..., P(X <= n) of X ~ Binomial(n, p)."""
    if p in (0.0, 1.0):
        return [0.0] * n + [1.0] if p else [1.0] * (n + 1)
    log_n, log_p, log_q = math.lgamma(n + 1), math.log(p), math.log1p(-p)
    log_ways = (log_n - math.lgamma(x + 1) - math.lgamma(n - x + 1) for x in range(n + 1))
    return list(accumulate(math.exp(ways + x * log_p + (n - x) * log_q) for x, ways in enumerate(log_ways)))


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact two-sided p-value: could the problems that changed have gone either way with equal chance?

    With m = gained + lost and X ~ Binomial(m, 1/2): min(1, 2 P(X <= min(gained, lost))).

    >>> mcnemar(5, 0)  # 2 / 2^5
    0.0625
    >>> mcnemar(0, 0), mcnemar(3, 3)
    (1.0, 1.0)
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"gained={gained} and lost={lost} are counts: neither can be negative")
    changed = gained + lost
    below = sum(math.comb(changed, x) for x in range(min(gained, lost) + 1))
    return min(1.0, 2 * below / 2**changed)


def _tail(level: float) -> float:
    """The upper quantile that leaves (1 - level) / 2 above it."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} is not between 0 and 1")
    return (1 + level) / 2


def _positive(name: str, value: float) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} leaves nothing to measure: it has to be at least 1")


def _draw(n: int, k: int) -> None:
    _positive("n", n)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} is not between 1 and n={n}: k completions are drawn from the n of a problem")
