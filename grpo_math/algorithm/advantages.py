r"""Rewards (P, G) -> advantages (P, G), in pure torch.

.. math:: A_{pg} = \frac{r_{pg} - b_{pg}}{s_{pg} + \epsilon}

The baseline :math:`b` is one of `BASELINES`, or `length_weighted`. `VERDICT_ADVANTAGES` and a user function return the
advantages themselves, :math:`A = f(r)`. The scale :math:`s` is one of `SCALES`; :math:`\epsilon` is
``advantage_eps``, and 0 for the scale ``mean``. docs/algorithms.md lists the papers of these choices.

A reward is NaN if its completion could not be graded. Such a reward is excluded from every mean and deviation, and its
advantage is 0: it has no gradient.

The caller passes whole groups.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_math.errors import RewardError
from grpo_math.settings.loss import VERDICT_BASELINES
from grpo_math.system.user_functions import call_on_example, is_user_function, tensor_from


def group_mean(rewards: Tensor) -> Tensor:
    """Return the mean over the group's graded completions (arXiv 2402.03300, eq. 2), or NaN if none was graded.

    >>> group_mean(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return _nanmean(rewards, dim=1).expand_as(rewards)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return the mean over the *other* graded completions of the group (RLOO, arXiv 2402.14740, eq. 6).

    NaN if no other completion was graded: there is nothing to compare with.

    >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.0000, 0.3333, 0.3333, 0.3333]])
    """
    others = (~rewards.isnan()).sum(dim=1, keepdim=True) - 1
    means = (rewards.nansum(dim=1, keepdim=True) - rewards) / others.clamp(min=0)
    return means.where((others == 0) | ~_are_equal(rewards, dim=1), rewards)


def quantile(rewards: Tensor) -> Tensor:
    r"""Return the `K`-quantile of the group's graded rewards: the smallest that at least this share does not exceed.

    QAE (arXiv 2509.22611): with rewards of 0 and 1, hard prompts reinforce right completions, and easy ones discourage
    wrong completions. K is the paper's 0.4.

    >>> quantile(torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0, 1.0]]))[:, 0]
    tensor([0., 1.])
    """
    graded = (~rewards.isnan()).sum(dim=1, keepdim=True)
    # K n may exceed a whole number by rounding.
    index = (K * graded - 1e-9).ceil().long() - 1
    # NaN is sorted to the end.
    return rewards.sort(dim=1).values.gather(1, index.clamp(min=0)).expand_as(rewards)


def length_weighted(rewards: Tensor, lengths: Tensor) -> Tensor:
    r"""Return the mean of the group's rewards, weighted by the completions' ``lengths``.

    OPO (arXiv 2505.23585): :math:`b = \sum_i l_i r_i / \sum_i l_i` has the least variance if the gradients of tokens
    are orthogonal and alike.

    >>> length_weighted(torch.tensor([[1.0, 0.0]]), torch.tensor([[30, 10]]))
    tensor([[0.7500, 0.7500]])
    """
    weights = lengths.to(rewards) * ~rewards.isnan()
    mean = (weights * rewards.nan_to_num()).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
    return mean.expand_as(rewards).where(~_are_equal(rewards, dim=1), rewards)


def group_std(rewards: Tensor) -> Tensor:
    """Return the sample deviation (divisor n - 1) of the group's graded completions, as TRL does; NaN for fewer than 2.

    >>> group_std(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    return _nanstd(rewards, dim=1).expand_as(rewards)


def batch_std(rewards: Tensor) -> Tensor:
    """Return the sample deviation of all graded completions of the batch (arXiv 2508.08221).

    >>> batch_std(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    tensor([[0.8165, 0.8165],
            [0.8165, 0.8165]])
    """
    return _nanstd(rewards, dim=(0, 1)).expand_as(rewards)


def _are_equal(rewards: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return whether the graded rewards are one number: the mean of equal numbers can be off by one bit."""
    least, most = (rewards.nan_to_num(nan=bound) for bound in (torch.inf, -torch.inf))
    return least.amin(dim=dim, keepdim=True) == most.amax(dim=dim, keepdim=True)


def _nanmean(rewards: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    largest = rewards.nan_to_num(nan=-torch.inf).amax(dim=dim, keepdim=True)
    return largest.where(_are_equal(rewards, dim), rewards.nanmean(dim=dim, keepdim=True))


def _nanstd(rewards: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    deviation = rewards - _nanmean(rewards, dim)
    n = (~rewards.isnan()).sum(dim=dim, keepdim=True)
    return (deviation.square().nansum(dim=dim, keepdim=True) / (n - 1).clamp(min=0)).sqrt()


K = 0.4  # of `quantile`
Choice = Callable[[Tensor], Tensor]
BASELINES: dict[str, Choice] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "quantile": quantile,
    "none": torch.zeros_like,
}
# The names are those of TRL's `scale_rewards`.
SCALES: dict[str, Choice] = {
    "group": group_std,
    "batch": batch_std,
    "centered_batch": batch_std,  # of the rewards minus their baselines
    "mean": group_mean,
    "none": torch.ones_like,
}


def pass_at_k(rewards: Tensor, k: int) -> Tensor:
    r"""Return the advantages of groups whose reward is pass@k (arXiv 2508.10751, section 2.4).

    ``rewards`` are 1 for a right and 0 for a wrong completion; m of the n graded completions are wrong. The mean reward
    of all subsets of k completions is :math:`R = 1 - C(m, k) / C(n, k)`, their deviation is
    :math:`\sigma = \sqrt{R (1 - R)}`. A completion has the mean advantage of the subsets that contain it:

    .. math:: A_{right} = \frac{1 - R}{\sigma}, \quad
        A_{wrong} = \frac{1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)}{\sigma}

    NaN if the deviation is 0, or with fewer than k graded completions.

    >>> pass_at_k(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]), k=2)  # R = 1 - 3/6; 1 - 0/6
    tensor([[ 1.0000, -0.3333, -0.3333, -0.3333],
            [    nan,     nan,     nan,     nan]])
    """
    graded = (~rewards.isnan()).sum(dim=1, keepdim=True)
    numbers = torch.arange(k, dtype=rewards.dtype)
    # C(m, k) / C(n, k) as the product of (m - j) / (n - j), and without j = 0 for the subsets with a given completion.
    factors = ((rewards == 0).sum(dim=1, keepdim=True) - numbers).clamp(min=0) / (graded - numbers)
    all_wrong, others_wrong = factors.prod(dim=1, keepdim=True), factors[:, 1:].prod(dim=1, keepdim=True)
    # With a deviation of 0, or with fewer than k graded completions, this is 0 / 0 = NaN.
    return torch.where(rewards == 1, all_wrong, all_wrong - others_wrong) / (all_wrong * (1 - all_wrong)).sqrt()


def signed(rewards: Tensor, weight: float) -> Tensor:
    r"""Return :math:`w r - (1 - r)` for rewards of 1 (right) and 0 (wrong): W-REINFORCE (arXiv 2506.01347).

    With the weight 0, only wrong completions are discouraged: the paper's negative sample reinforcement.

    >>> signed(torch.tensor([[1.0, 0.0]]), 0.1)
    tensor([[ 0.1000, -1.0000]])
    """
    return weight * rewards - (1 - rewards)


def most_varied(rewards: Tensor, m: int) -> Tensor:
    r"""Return the places (P, m) of those ``m`` completions of each group whose rewards vary most, in order.

    PODS (arXiv 2504.13818): a subset of the largest variance has the k highest rewards and the m - k lowest. Ungraded
    completions are taken only if fewer than m are graded.

    >>> most_varied(torch.tensor([[0.0, 0.5, 1.0, 0.4], [1.0, torch.nan, 1.0, 0.0]]), 2)
    tensor([[0, 2],
            [2, 3]])
    """
    # NaN is sorted to the end.
    ordered, place_of = rewards.sort(dim=1, stable=True)
    skipped = ((~rewards.isnan()).sum(dim=1) - m).clamp(min=0)[:, None, None]
    numbers = torch.arange(m, device=rewards.device)
    # Choice k (of m + 1) has the k lowest rewards.
    is_high = numbers >= torch.arange(m + 1, device=rewards.device)[:, None]
    choices = numbers + skipped * is_high  # (P, m + 1, m)
    subsets = ordered[:, None].expand(-1, m + 1, -1).gather(2, choices)
    best = subsets.var(dim=2, correction=0).argmax(dim=1)
    return place_of.gather(1, choices[torch.arange(len(rewards)), best]).sort(dim=1).values


VERDICT_FUNCTIONS = (pass_at_k, lambda rewards, k: signed(rewards, 0.1), lambda rewards, k: signed(rewards, 0.0))
VERDICT_ADVANTAGES: dict[str, Callable[[Tensor, int], Tensor]] = dict(
    zip(VERDICT_BASELINES, VERDICT_FUNCTIONS, strict=True)
)


def weighted(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (B,) of rewards (B, F), with weights (F,); NaN if no function returned a number.

    >>> weighted(torch.tensor([[1.0, 3.0], [1.0, torch.nan], [torch.nan, torch.nan]]), torch.tensor([1.0, 0.5]))
    tensor([2.5000, 1.0000,    nan])
    """
    # `nansum` of NaN alone is 0, which would be a reward. Such a row must stay NaN.
    return (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def try_function(name: str, group: int) -> None:
    """Raise `ConfigError` unless the function returns advantages for two groups, one of them with a missing reward."""
    rewards = torch.zeros(2, group, dtype=torch.float64)
    rewards[:, 0], rewards[1, -1] = 1.0, torch.nan
    call_on_example("baseline", name, rewards, rewards)


def advantages(
    rewards: Tensor,
    baseline: str = "group_mean",
    scale: str = "group",
    eps: float = 1e-4,
    k: int = 0,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the advantages (P, G) of rewards (P, G), computed in float64. ``lengths``: for `length_weighted`.

    Special cases: under either mean baseline, a group of equal rewards has advantage 0, exactly. (The mean of equal
    numbers can be off by one bit, which a small ``eps`` makes large.) A group of one has advantage 0, too. An
    ungraded completion (NaN) always has advantage 0. A deviation that is zero or undefined is not divided by: under
    ``baseline="none"`` the advantages of equal rewards are these rewards.

    The scale ``centered_batch`` is the deviation of the rewards minus their baselines (REINFORCE++ with baseline, arXiv
    2501.03262; DLER, arXiv 2510.15110). ``batch`` is TRL's, the deviation of the rewards.

    Raises `RewardError` for a reward below 0 under ``scale="mean"`` (MaxRL, arXiv 2602.02710), and for one that is not
    0 or 1 under a baseline of `VERDICT_ADVANTAGES`.

    >>> advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), scale="none")
    tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    >>> advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), baseline="leave_one_out", scale="none")
    tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    >>> advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), scale="mean")
    tensor([[ 3., -1., -1., -1.],
            [ 0.,  0.,  0.,  0.]])
    >>> advantages(torch.tensor([[2.0, 0.0], [9.0, 9.0]]), scale="centered_batch", eps=0.0)
    tensor([[ 1.2247, -1.2247],
            [ 0.0000,  0.0000]])
    >>> advantages(torch.tensor([[1.0, 1.0], [float("nan"), 1.0]]))
    tensor([[0., 0.],
            [0., 0.]])
    >>> advantages(torch.tensor([[1.0, 1.0], [2.0, 0.0]]), baseline="none")
    tensor([[1.0000, 1.0000],
            [1.4141, 0.0000]])
    """
    # On the CPU, because not every accelerator has float64. These are few numbers.
    exact = rewards.to("cpu", torch.float64)
    if is_user_function(baseline):
        values = tensor_from("baseline", baseline, exact, exact.clone())
    elif baseline in VERDICT_ADVANTAGES:
        _refuse(exact[~exact.isnan() & (exact != 0) & (exact != 1)], "baseline", baseline, "a reward of 0 or 1")
        values = VERDICT_ADVANTAGES[baseline](exact, k)
    else:
        values = exact - (BASELINES[baseline](exact) if lengths is None else length_weighted(exact, lengths))
        if scale == "mean":
            _refuse(exact[exact < 0], "scale_rewards", scale, "rewards of 0 or more")
            eps = 0.0
        # TRL always divides by deviation + eps. A deviation of zero is skipped here, because an eps of 1e-6 would
        # multiply rounding errors by a million.
        if scale != "none":
            deviation = SCALES[scale](values if scale == "centered_batch" else exact)
            values = torch.where(deviation > 0, values / (deviation + eps), values)
    # A missing reward has advantage 0, even if a function returns another number for it.
    return values.masked_fill(exact.isnan(), 0.0).nan_to_num(nan=0.0).to(rewards)


def normalized_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return GDPO's advantages (P, G) of rewards (P, G, F) (arXiv 2601.05242, eq. 4 to 6), computed in float64.

    Each function's rewards are normalized in their group, and their weighted sum by its deviation over the batch. The
    mean of that sum is 0. A group without spread has advantage 0, exactly.

    >>> normalized_sum(torch.tensor([[[1.0, 5.0], [0.0, 5.0]], [[0.7, 0.7], [0.7, 0.7]]]), torch.ones(2))
    tensor([[ 1.2245, -1.2245],
            [ 0.0000,  0.0000]])
    >>> normalized_sum(torch.tensor([[[4.0], [torch.nan], [2.0], [0.0]]]), torch.ones(1))  # one is not graded
    tensor([[ 0.9999,  0.0000,  0.0000, -0.9999]])
    """
    exact = rewards.to("cpu", torch.float64)
    each = torch.stack([advantages(function) for function in exact.unbind(dim=2)], dim=2)
    sums = (each * weights.to(each)).sum(dim=2).masked_fill(exact.isnan().all(dim=2), torch.nan)
    return advantages(sums, baseline="none", scale="batch").to(rewards)


def _refuse(bad: Tensor, field: str, value: str, needed: str) -> None:
    if len(bad):
        raise RewardError(f"{field}={value!r} needs {needed}, and a reward is {bad[0]:g}: use other rewards")
