"""The statistics against hand-worked numbers and full enumeration."""

import itertools
import random
from collections import Counter
from statistics import fmean

import pytest

from grpo_math.evaluation.stats import maj_at_k, mcnemar, paired_bootstrap, pass_at_k, wilson, wilson_for_means


def test_wilson_gives_the_published_bounds():
    # Newcombe 1998, table I, method 3: the score interval without continuity correction.
    for successes, n, lo, hi in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(successes, n) == pytest.approx((lo, hi), abs=5e-5)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one():
    for n in range(1, 8):
        for c in range(n + 1):
            flags = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                draws = list(itertools.combinations(flags, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)
    assert pass_at_k(100_000, 1, 1000) == pytest.approx(0.01)


def brute_force_majority(answers, correct, k):
    shares = []
    for draw in itertools.combinations(answers, k):
        votes = Counter(answer for answer in draw if answer and answer.strip())
        top = [answer for answer, count in votes.items() if count == max(votes.values())]
        right = [fmean(c for a, c in zip(answers, correct, strict=True) if a == answer) for answer in top]
        shares.append(fmean(right) if right else 0)
    return fmean(shares)


def test_maj_at_k_is_the_mean_over_all_draws_with_ties_shared():
    rng = random.Random(3)
    for _ in range(150):
        n = rng.randint(1, 8)
        answers = rng.choices(["7", "8", "9", "10", None, " "], k=n)  # the last two abstain
        # The flags of one answer may disagree: the same number in and out of the format.
        correct = [rng.random() < 0.5 for _ in range(n)]
        k = rng.randint(1, n)
        assert maj_at_k(answers, correct, k) == pytest.approx(brute_force_majority(answers, correct, k), abs=1e-12)


def test_the_paired_interval_holds_the_middle_95_of_all_resamples():
    differences = [1, 1, 0, -1, 1]
    resampled_means = sorted(sum(draw) / 5 for draw in itertools.product(differences, repeat=5))
    cut = int(0.025 * len(resampled_means))
    paired = paired_bootstrap([0, 0, 0, 1, 0], [1, 1, 0, 0, 1], resamples=20_000)
    assert (paired.lo, paired.hi) == (resampled_means[cut], resampled_means[-1 - cut])
    assert (paired.n, paired.gained, paired.lost, paired.difference) == (5, 3, 1, 0.4)


def test_problems_without_a_change_say_how_many_others_may_change():
    same = paired_bootstrap([0] * 17, [0] * 17)
    # With a share of 19.5% that changes, 17 problems without a change have a chance of 2.5%.
    assert (same.lo, same.hi) == pytest.approx((-0.1950, 0.1950), abs=1e-4)
    assert (1 - same.hi) ** 17 == pytest.approx(0.025)
    gained = paired_bootstrap([0] * 17, [1] * 17)
    assert (gained.difference, gained.lo, gained.hi) == pytest.approx((1, 1 - 2 * same.hi, 1))
    assert paired_bootstrap([0] * 200, [0] * 200).hi == pytest.approx(3.7 / 200, rel=0.02)


def test_wilson_of_means_at_its_ends():
    assert wilson_for_means([1, 1], 4) == wilson(2, 2), "no spread: each problem counts once"
    assert wilson_for_means([0.5] * 4, 8) == wilson(2, 4)
    assert wilson_for_means([0.5, 0.5, 0.5, 1], 8) == wilson(5, 8), "no more than there are completions"
    assert wilson_for_means([0.75], 4) == wilson(0.75, 1), "one problem: nothing is known of the error"
    assert wilson_for_means([1, 0.5, 0, 0.5], 8) == pytest.approx(wilson(3, 6))  # SE^2 = 1/24, p(1-p) = 1/4


def test_mcnemar_is_the_share_of_all_outcomes_that_are_as_lopsided():
    for changed in range(1, 11):
        outcomes = [sum(signs) for signs in itertools.product((1, -1), repeat=changed)]
        for gained in range(changed + 1):
            lopsided = abs(2 * gained - changed)
            extreme = sum(abs(outcome) >= lopsided for outcome in outcomes) / len(outcomes)
            assert mcnemar(gained, changed - gained) == pytest.approx(extreme, abs=1e-12)
