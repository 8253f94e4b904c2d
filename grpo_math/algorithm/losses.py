r"""The loss of a micro-batch from log-probs, one pure function per term. `compute_loss` composes them.

.. math::

    \ell_t = m \, c_t \, s(\rho_t, A) + \beta \, k_t, \qquad L = R(\ell) - \lambda \, \bar H + \alpha \, a

=====================  ==========================================================  ======================
term                   functions                                                   chosen by
=====================  ==========================================================  ======================
:math:`s`, surrogate   `SURROGATES`, `user_surrogate`                              surrogate
:math:`\rho`, ratio    `importance_ratio`                                          importance_sampling_level
:math:`m`, masks       `off_policy_mask`, and TRL's mask of high-entropy tokens    off_policy_mask_threshold
:math:`c`, correction  `corrected_for_sampler`                                     vllm_importance_sampling_*
:math:`k`, KL          `KL_ESTIMATORS`, `with_reference_advantages`                kl_estimator
:math:`R`, reduction   `REDUCTIONS`                                                loss_type
:math:`H`, entropy     `entropy_sums`                                              entropy_coef
:math:`a`, experts     transformers' loss of the router                            router_aux_loss_coef
=====================  ==========================================================  ======================

The ratio is :math:`\rho_t = \pi_\theta(y_t) / \pi_{old}(y_t)`. Shapes: B rows, T completion tokens.

KL to the reference: with :math:`d_t = \log \pi_\theta(y_t) - \log \pi_{ref}(y_t)` (Schulman, "Approximating KL
divergence", 2020), :math:`k_1 = d`, :math:`k_2 = d^2 / 2`, and :math:`k_3 = e^{-d} - 1 + d`. For tokens that the policy
itself sampled, :math:`k_1` and :math:`k_3` have the mean :math:`KL(\pi_\theta \| \pi_{ref})`, and :math:`k_2` is close
to it if the two policies are close. Their gradients as loss terms differ (arXiv 2506.09477), because the sampling is
not differentiated. The mean gradient of each one, given the tokens before it, is

=========  =====================================  =====================================
estimator  ``use_bias_correction_kl=False``       ``use_bias_correction_kl=True`` (TRL's default)
=========  =====================================  =====================================
k1         nothing: the mean gradient is zero     :math:`\nabla KL(\pi_\theta \| \pi_{ref})`
k2         :math:`\nabla KL(\pi_\theta \| \pi_{ref})`  :math:`\nabla E_\theta[d^2] / 2`, not a KL
k3         :math:`\nabla KL(\pi_{ref} \| \pi_\theta)`  :math:`\nabla KL(\pi_\theta \| \pi_{ref})`
=========  =====================================  =====================================

The left column is true on policy only. The right one multiplies :math:`k_t` by :math:`\rho_t`, whose gradient counts
even if its value is 1. The right column is also true for tokens of any older policy, but not with
``importance_sampling_level="sequence"``, where the factor is the sequence's ratio. All of them ignore that a token
changes the tokens after it: the KL is that of each token's distribution, with a fixed prefix.

``kl_estimator="advantage"`` has no term :math:`\beta k`. It adds :math:`-\beta d`, without a gradient, to the advantage
of each token. With a ratio that is not clipped, its mean gradient is :math:`\beta \nabla KL(\pi_\theta \| \pi_{ref})`
for tokens of any older policy. The gradient of k1 times the ratio also has the term
:math:`\rho \nabla \log \pi_\theta`. The mean of this term is zero, but it does not vanish if the policy equals its
reference.

`tests/algorithm/test_losses.py` checks every entry of the table by enumeration, and each term against TRL's loss.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_math.errors import ConfigError
from grpo_math.run import metrics
from grpo_math.settings.loss import surrogate_and_reduction
from grpo_math.system.user_functions import call_on_example, is_user_function, tensor_from


@dataclass(frozen=True)
class LossSettings:
    """The settings of a loss, with the names of TRL's `GRPOConfig` and ours, and their default values.

    ``epsilon_low`` is TRL's ``epsilon``; ``entropy_coef`` is the coefficient of this step, None without an entropy
    bonus. ``on_policy``: no optimizer step lies between a rollout and the update. ``trained_share``: the share of a
    group that is trained on; the other completions are masked. A ``loss_type`` of TRL that names a surrogate becomes
    two settings.

    >>> settings = LossSettings(loss_type="cispo")
    >>> settings.surrogate, settings.loss_type
    ('cispo', 'dapo')
    """

    surrogate: str = "clip"
    loss_type: str = "dapo"
    kl_estimator: str = "k3"
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    dppo_high: float = 0.2
    dppo_low: float = 0.2
    importance_sampling_level: str = "token"
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 512
    entropy_coef: float | None = None
    router_aux_loss_coef: float = 0.0
    vllm_importance_sampling_correction: bool = False
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0
    geometric_mask_low: float = 0.99
    geometric_mask_high: float = 1.01
    on_policy: bool = False
    trained_share: float = 1.0

    def __post_init__(self) -> None:
        names = surrogate_and_reduction(self.surrogate, self.loss_type)
        for field, name in zip(("surrogate", "loss_type"), names, strict=True):
            object.__setattr__(self, field, name)


@dataclass(frozen=True)
class LossInputs:
    """The inputs of the loss of B completions of at most T tokens.

    ``sampling_logps`` are the sampler's log-probs, NaN if unknown. ``sampler_ratio`` is TRL's weight of a token
    (B, T) or of a completion (B, 1), for the difference between sampler and trainer. ``entropy_mask`` selects the
    tokens whose surrogate counts. ``aux_loss`` is that of a mixture of experts. ``micro_batch_tokens`` counts the
    tokens of TRL's micro-batch of each row; None if the rows are that micro-batch. ``tokens_per_step`` is one rank's
    share of an optimizer step's tokens; ``row_weights`` are `prompt_weights`, divided by this share; ``accumulation``
    is the number of TRL's micro-batches in the step. ``advantages_of_reference``: `with_reference_advantages` has
    given each token its own.
    """

    logps: Tensor  # (B, T), with gradient
    old_logps: Tensor  # (B, T), of the policy at the rollout
    advantages: Tensor  # (B, 1), or (B, T)
    mask: Tensor  # (B, T), 1 for a token that counts
    entropies: Tensor  # (B, T)
    ref_logps: Tensor | None = None  # (B, T)
    sampling_logps: Tensor | None = None  # (B, T)
    sampler_ratio: Tensor | None = None  # (B, T) or (B, 1)
    entropy_mask: Tensor | None = None  # (B, T)
    aux_loss: Tensor | None = None
    micro_batch_tokens: Tensor | None = None  # (B, 1)
    tokens_per_step: Tensor | float = 1.0
    row_weights: Tensor | float = 1.0  # (B, 1)
    accumulation: int = 1
    advantages_of_tokens: bool = False
    advantages_of_reference: bool = False


class Statistic(Enum):
    """How the values of a metric become one number of an optimizer step."""

    TOKEN_MEAN = auto()
    COMPLETION_MEAN = auto()
    MINIMUM = auto()  # over completions
    MAXIMUM = auto()


class Metric(NamedTuple):
    """A metric of a micro-batch: ``values`` of tokens (B, T), or else of completions (B, 1).

    ``counts_skipped``: a completion that the step does not compute counts as 0. It has no advantage, so nothing of it
    is clipped.
    """

    values: Tensor
    statistic: Statistic = Statistic.TOKEN_MEAN
    counts_skipped: bool = False


class Surrogate(NamedTuple):
    """The loss of tokens (B, T), or (B, 1) if it is the same for all tokens of a completion, and its metrics."""

    values: Tensor
    metrics: Mapping[str, Metric] = {}


class Loss(NamedTuple):
    """The loss of a micro-batch, and its metrics.

    ``policy_loss``: before the entropy bonus, and not divided by the accumulation steps. ``entropy_sums``: the result
    of the function of this name.
    """

    loss: Tensor
    policy_loss: Tensor
    entropy_sums: Tensor
    metrics: Mapping[str, Metric]


def importance_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, level: str) -> Tensor:
    r"""Return the ratio of tokens, :math:`\rho_t` (B, T), or rows, :math:`\exp(\mathrm{mean}_t \log \rho_t)` (B, 1).

    The ratio of a row is that of GSPO (arXiv 2507.18071, eq. 7). ``level`` is TRL's ``importance_sampling_level``.

    >>> logps, mask = torch.tensor([[0.0, 2.0, 8.5]]).log1p(), torch.tensor([[1, 1, 0]])
    >>> importance_ratio(logps, torch.zeros(1, 3), mask, "token")
    tensor([[1.0000, 3.0000, 9.5000]])
    >>> importance_ratio(logps, torch.zeros(1, 3), mask, "sequence")  # the root of 1 * 3
    tensor([[1.7321]])
    """
    # In logarithms: a ratio of a sequence as a product of its tokens' ratios would overflow.
    log_ratio = logps - old_logps
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def token_ratio(ratio: Tensor, logps: Tensor) -> Tensor:
    r"""Return a completion's ratio s (B, 1) with the gradient of each token (B, T).

    .. math:: s_t = \mathrm{sg}(s) \, \pi_t / \mathrm{sg}(\pi_t)

    This is GSPO-token (arXiv 2507.18071, eq. 14).

    With one advantage for a completion, this is GSPO. With an advantage of each token, GSPO's gradient would give all
    tokens the mean advantage.

    >>> logps = torch.tensor([[0.0, -1.0]], requires_grad=True)
    >>> (token_ratio(torch.tensor([[2.0]]), logps) * torch.tensor([[1.0, -1.0]])).sum().backward()
    >>> logps.grad
    tensor([[ 2., -2.]])
    """
    return ratio.detach() * (logps - logps.detach()).exp()


def clip(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return PPO's :math:`-\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon_{high}) A)` (arXiv 1707.06347,
    eq. 7). ``delta`` also bounds :math:`\rho` itself, from above (arXiv 2505.07291).

    >>> logps = torch.tensor([[0.5, 2.0]]).log()
    >>> inputs = LossInputs(logps, torch.zeros(1, 2), torch.tensor([[1.0]]), torch.ones(1, 2), logps)
    >>> values, logged = clip(inputs, logps.exp(), LossSettings())
    >>> values, logged["clip_ratio/high_mean"].values, logged["clip_ratio/high_max"].values
    (tensor([[-0.5000, -1.2000]]), tensor([[False,  True]]), tensor([[0.5000]]))
    """
    advantages, low, high = inputs.advantages, 1 - settings.epsilon_low, 1 + settings.epsilon_high
    bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    values = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    is_low, is_high = (bounded < low) & (advantages < 0), (bounded > high) & (advantages > 0)
    return Surrogate(
        values, _clipped(is_low, is_high, inputs.mask, _mean_kind(settings.importance_sampling_level, inputs))
    )


def _mean_kind(level: str, inputs: LossInputs) -> Statistic:
    """Return the mean for metrics of ratio and advantage: over completions if each has one of both, else tokens."""
    by_completion = level == "sequence" and not inputs.advantages_of_tokens
    return Statistic.COMPLETION_MEAN if by_completion else Statistic.TOKEN_MEAN


def _clipped(low: Tensor, high: Tensor, mask: Tensor, statistic: Statistic) -> dict[str, Metric]:
    """Return the metrics of clipped tokens (B, T), or completions (B, 1): the means, and the extremes of a completion's
    share."""
    shares = [low, high]
    if statistic is Statistic.TOKEN_MEAN:
        # A completion without a token has no share: NaN.
        shares = [(clipped * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True) for clipped in shares]
    means = {metrics.CLIP_LOW: low, metrics.CLIP_HIGH: high, metrics.CLIP_REGION: low | high}
    return {
        **{name: Metric(clipped, statistic, counts_skipped=True) for name, clipped in means.items()},
        metrics.CLIP_LOWEST: Metric(shares[0].float(), Statistic.MINIMUM),
        metrics.CLIP_HIGHEST: Metric(shares[1].float(), Statistic.MAXIMUM),
    }


def reinforce(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return :math:`-\rho A` with :math:`\pi_{old}` the policy itself: the ratio is 1, and its gradient is the score.

    So :math:`\nabla \ell_t = -A \nabla \log \pi_\theta(y_t)` (Williams, 1992), at every update of a rollout and at any
    distance between the policy and the one that sampled. Nothing is clipped.

    >>> logps = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    >>> inputs = LossInputs(logps, logps.detach(), torch.tensor([[2.0]]), torch.ones(1, 2), logps)
    >>> torch.autograd.grad(reinforce(inputs, (logps - inputs.old_logps).exp(), LossSettings()).values.sum(), logps)
    (tensor([[-2., -2.]]),)
    """
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(-ratio * inputs.advantages, _clipped(nothing, nothing, inputs.mask, Statistic.TOKEN_MEAN))


def dppo(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return DPPO's :math:`-\rho A` with :math:`\rho = \pi_\theta / \mu`, without the tokens outside the trust region.

    :math:`\mu` is the sampler, or :math:`\pi_{old}` without the sampler's log-probs. A token is dropped if
    :math:`A > 0` and :math:`\pi_\theta - \mu` is above ``dppo_high``, or :math:`A < 0` and
    :math:`\mu - \pi_\theta` is above ``dppo_low``: the binary total variation of arXiv 2602.04879, section 4.
    Nothing else is clipped.

    >>> logps, sampler = torch.tensor([[0.75, 0.5, 0.01]]).log(), torch.tensor([[0.5, 0.4, 0.001]]).log()
    >>> inputs = LossInputs(logps, sampler, torch.tensor([[1.0]]), torch.ones(1, 3), logps)
    >>> values, logged = dppo(inputs, (logps - sampler).exp(), LossSettings())
    >>> values, logged["clip_ratio/high_mean"].values
    (tensor([[ -0.0000,  -1.2500, -10.0000]]), tensor([[ True, False, False]]))
    """
    return _trust_region(inputs, settings, lambda now, sampler: (now.exp() - sampler.exp()).abs())


def dppo_kl(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return `dppo` with the KL of the two-valued distributions "this token, or another" as the distance:
    :math:`\mu \log(\mu / \pi_\theta) + (1 - \mu) \log((1 - \mu) / (1 - \pi_\theta))` (arXiv 2602.04879, section 4).

    >>> logps, sampler = torch.tensor([[0.75, 0.5, 0.01]]).log(), torch.tensor([[0.5, 0.4, 0.001]]).log()
    >>> inputs = LossInputs(logps, sampler, torch.tensor([[1.0]]), torch.ones(1, 3), logps)
    >>> dppo_kl(inputs, (logps - sampler).exp(), LossSettings(dppo_high=0.05)).values
    tensor([[ -0.0000,  -1.2500, -10.0000]])
    """
    return _trust_region(inputs, settings, _binary_kl)


def _binary_kl(now: Tensor, sampler: Tensor) -> Tensor:
    chosen, other = sampler.exp(), 1 - sampler.exp()
    # `xlogy` is 0 for a probability of 0. Rounding may raise a probability above 1.
    other_now = torch.xlogy(other, (1 - now.exp()).clamp(min=0))
    return torch.xlogy(chosen, chosen) - chosen * now + torch.xlogy(other, other) - other_now


def _trust_region(
    inputs: LossInputs, settings: LossSettings, distance: Callable[[Tensor, Tensor], Tensor]
) -> Surrogate:
    """Return the ratio to the sampler times -A, without the tokens that moved too far in the direction of A."""
    now, sampler = inputs.logps.detach(), inputs.old_logps
    if inputs.sampling_logps is not None:
        sampler = inputs.sampling_logps.where(~inputs.sampling_logps.isnan(), sampler)
    moved = distance(now, sampler)
    low = (inputs.advantages < 0) & (now < sampler) & (moved > settings.dppo_low)
    high = (inputs.advantages > 0) & (now > sampler) & (moved > settings.dppo_high)
    # In the exponent, because the gradient of an infinite ratio times 0 would be NaN.
    ratio = (inputs.logps - sampler).masked_fill(low | high, -torch.inf).exp()
    return Surrogate(-ratio * inputs.advantages, _clipped(low, high, inputs.mask, Statistic.TOKEN_MEAN))


def gmpo(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return GMPO's :math:`-A \exp(\mathrm{mean}_t \log \rho_t)` (B, 1), with each token's ratio clipped first
    (arXiv 2507.20673, eq. 4).

    For :math:`A > 0` the logarithm is at most ``epsilon_high``, for :math:`A < 0` at least -``epsilon``: as in the
    authors' code and in TRL's GMPO, the bounds are those of the logarithm.

    >>> logps, zeros = torch.tensor([[0.5, 0.9]]), torch.zeros(1, 2)
    >>> inputs = LossInputs(logps, zeros, torch.ones(1, 1), torch.ones(1, 2), zeros)
    >>> (-gmpo(inputs, logps.exp(), LossSettings(epsilon_high=0.7)).values).log()  # (0.5 + 0.7) / 2
    tensor([[0.6000]])
    """
    log_ratio, advantages = inputs.logps - inputs.old_logps, inputs.advantages
    low = (log_ratio < -settings.epsilon_low) & (advantages < 0)
    high = (log_ratio > settings.epsilon_high) & (advantages > 0)
    clipped = torch.where(low | high, log_ratio.clamp(-settings.epsilon_low, settings.epsilon_high), log_ratio)
    mean = importance_ratio(clipped, torch.zeros_like(clipped), inputs.mask, "sequence")
    values = -(token_ratio(mean, clipped) if inputs.advantages_of_reference else mean) * advantages
    return Surrogate(values, _clipped(low, high, inputs.mask, Statistic.TOKEN_MEAN))


def cispo(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return :math:`-\mathrm{sg}(\min(\rho, \epsilon_{high})) A \log \pi_\theta` (arXiv 2506.13585, eq. 4).

    >>> logps = torch.tensor([[0.5, 2.0]]).log()
    >>> inputs = LossInputs(logps, torch.zeros(1, 2), torch.tensor([[1.0]]), torch.ones(1, 2), logps)
    >>> cispo(inputs, logps.exp(), LossSettings(epsilon_high=1.5)).values
    tensor([[ 0.3466, -1.0397]])
    """
    values = -ratio.clamp(max=settings.epsilon_high).detach() * inputs.advantages * inputs.logps
    is_clipped = (ratio > settings.epsilon_high) & (inputs.advantages > 0)
    statistic = _mean_kind(settings.importance_sampling_level, inputs)
    return Surrogate(values, {metrics.CISPO_CLIPPED: Metric(is_clipped, statistic, counts_skipped=True)})


def sapo(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return :math:`-\frac{4}{\tau} \sigma(\tau (\rho - 1)) A`, :math:`\tau` by the sign of A (arXiv 2511.20347).

    >>> inputs = LossInputs(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
    >>> sapo(inputs, torch.ones(1, 1), LossSettings(sapo_temperature_pos=2.0)).values
    tensor([[-1.]])
    """
    temperature = torch.where(inputs.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return Surrogate(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * inputs.advantages)


def vespo(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return :math:`-\mathrm{sg}(\phi(w)) A \log \pi_\theta` with :math:`\phi(w) = e^{\lambda} w^k e^{-\lambda w}`
    (arXiv 2602.10693), where w is the ratio of the whole completion to the sampler, a product over its tokens.

    :math:`k` and :math:`\lambda` depend on the sign of A. Products are computed in logarithms, within TRL's bounds.

    >>> logps, zeros = torch.tensor([[0.5, 2.0]]).log(), torch.zeros(1, 2)
    >>> others = (zeros, torch.ones(1, 1), torch.ones(1, 2), zeros)
    >>> inputs = LossInputs(logps, *others)  # w = 0.5 * 2
    >>> vespo(inputs, logps.exp(), LossSettings()).metrics["vespo/phi_seq_mean"].values
    tensor([[1.]])
    >>> settings = LossSettings(vespo_k_pos=1000.0)  # a weight that overflows is 0
    >>> vespo(LossInputs(logps.abs(), *others), logps.exp(), settings).metrics["vespo/phi_seq_mean"].values
    tensor([[0.]])
    >>> settings = LossSettings(vespo_k_pos=1.0, vespo_lambda_pos=0.01)
    >>> vespo(LossInputs(zeros + 1.5, *others), zeros, settings).metrics["vespo/phi_seq_mean"].values.round()
    tensor([[17.]])
    """
    lowest, highest = math.log(1e-8), 20.0
    with torch.no_grad():
        log_w = ((inputs.logps - inputs.old_logps).clamp(-highest, highest) * inputs.mask).sum(dim=1, keepdim=True)
        if inputs.sampler_ratio is not None:
            log_w = log_w + inputs.sampler_ratio.log().clamp(lowest, highest).sum(dim=1, keepdim=True)
        log_w = log_w.clamp(lowest, highest)
        is_positive = inputs.advantages >= 0
        k = torch.where(is_positive, settings.vespo_k_pos, settings.vespo_k_neg)
        rate = torch.where(is_positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg).clamp(min=1e-4)
        phi = (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(posinf=0.0)
    weight = Metric(phi, _mean_kind("sequence", inputs))
    return Surrogate(-phi * inputs.advantages * inputs.logps, {metrics.VESPO_WEIGHT: weight})


def user_surrogate(inputs: LossInputs, ratio: Tensor, settings: LossSettings) -> Surrogate:
    r"""Return the loss of a user function, :math:`\ell = f(\log \pi_\theta, \log \pi_{old}, A, m)`, all (B, T).

    ``settings.surrogate`` is ``module:function``; docs/algorithms.md has its rules. PPO's clipped ratio is::

        def clip(logps, old_logps, advantages, mask):
            ratio = (logps - old_logps).exp()
            return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    """
    logps, advantages = inputs.logps, inputs.advantages.expand_as(inputs.logps)
    # The ratio of a token that does not count is 1: an infinite one, times its mask of 0, would be NaN.
    old_logps = inputs.old_logps.where(inputs.mask.bool(), logps.detach())
    return Surrogate(tensor_from("surrogate", settings.surrogate, logps, logps, old_logps, advantages, inputs.mask))


SurrogateFunction = Callable[[LossInputs, Tensor, LossSettings], Surrogate]
# By `surrogate`.
SURROGATES: dict[str, SurrogateFunction] = {
    "clip": clip,
    "reinforce": reinforce,
    "gmpo": gmpo,
    "cispo": cispo,
    "dppo": dppo,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
    "vespo": vespo,
}


def try_surrogate(name: str) -> None:
    """Raise `ConfigError` unless the function's loss has a gradient and treats each completion by itself."""
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -0.25]], requires_grad=True)
    old, each = logps.detach() - 0.1, torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    both = call_on_example("surrogate", name, logps, logps, old, each, mask)
    if not both.requires_grad:
        raise ConfigError("surrogate", name, "returned a loss without a gradient", "compute it from the log-probs")
    # Rows are regrouped into other micro-batches, so each row's loss may depend on that row alone.
    rows = [
        call_on_example("surrogate", name, logps[i], logps[i], old[i], each[i], mask[i])
        for i in (slice(1), slice(1, 2))
    ]
    if not torch.allclose(both * mask, torch.cat(rows) * mask, equal_nan=True):
        raise ConfigError(
            "surrogate",
            name,
            "gives a completion a different loss in a batch than alone",
            "reduce within a row only: batches are regrouped",
        )


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return the log-ratio of each token (B, T), in nats.

    >>> k1(torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log())
    tensor([ 0.6931, -0.6931])
    """
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return half the squared log-ratio of each token (B, T).

    >>> k2(torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log())
    tensor([0.2402, 0.2402])
    """
    return (logps - ref_logps).square() / 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return the unbiased and non-negative estimate of each token (B, T).

    >>> k3(torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log())
    tensor([0.1931, 0.3069])
    """
    difference = logps - ref_logps
    # For a policy near its reference, exp(-d) - 1 would lose most of its digits.
    return torch.expm1(-difference) + difference


# ``advantage`` logs k1, which is not a term of the loss.
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k3": k3, "k1": k1, "k2": k2, "advantage": k1}


def with_reference_advantages(inputs: LossInputs, ref_logps: Tensor, beta: float) -> LossInputs:
    r"""Add :math:`\beta (\log \pi_{ref} - \mathrm{sg}(\log \pi_\theta))` to the advantage of each token (B, T).

    prime-rl, verl and tinker distil a teacher in this way.

    >>> logps, ref = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    >>> inputs = LossInputs(logps, logps, torch.tensor([[1.0]]), torch.ones(1, 2), logps)
    >>> with_reference_advantages(inputs, ref, beta=1.0).advantages
    tensor([[0.3069, 1.6931]])
    """
    advantages = inputs.advantages - beta * k1(inputs.logps.detach(), ref_logps)
    return replace(inputs, advantages=advantages, advantages_of_tokens=True, advantages_of_reference=True)


def off_policy_mask(inputs: LossInputs, old_logps: Tensor, threshold: float) -> Tensor:
    r"""Return 0 for a completion with A < 0 whose mean of :math:`\log \pi_{old} - \log \pi_\theta` is above the
    threshold, else 1 (B, 1). DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).

    The sampler's log-probs replace the old ones if they are known. A token without a sampler's log-prob counts as 0.

    >>> zeros, advantages = torch.zeros(2, 2), torch.tensor([[-1.0], [1.0]])
    >>> inputs = LossInputs(zeros - 3, zeros, advantages, torch.ones(2, 2), zeros)
    >>> [off_policy_mask(inputs, zeros, threshold).flatten().tolist() for threshold in (2.0, 3.0)]
    [[0.0, 1.0], [1.0, 1.0]]
    """
    sampler = old_logps if inputs.sampling_logps is None else inputs.sampling_logps
    difference = torch.nan_to_num(sampler - inputs.logps.detach(), nan=0.0) * inputs.mask
    mean = difference.sum(dim=1, keepdim=True) / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return ((inputs.advantages >= 0) | (mean <= threshold)).to(inputs.logps.dtype)


def corrected_for_sampler(values: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Multiply by the weight of the sampler's tokens or completions (Yao et al., 2025, "Your efficient RL framework
    secretly brings you off-policy RL training").

    The weight is computed at the rollout (correction.py). The weights of vespo and DPPO contain the correction already.

    >>> inputs = LossInputs(*[torch.ones(1, 2)] * 5, sampler_ratio=torch.tensor([[0.0, 2.0]]))
    >>> corrected_for_sampler(torch.tensor([[3.0, 3.0]]), inputs, LossSettings())
    tensor([[0., 6.]])
    """
    if inputs.sampler_ratio is None or settings.surrogate in ("vespo", "dppo", "dppo_kl"):
        return values
    return values * inputs.sampler_ratio


def entropy_sums(inputs: LossInputs) -> Tensor:
    """Return the sum of the entropies of the tokens whose surrogate counts, and the number of these tokens (2,).

    Their mean is the bonus of Mnih et al. (arXiv 1602.01783).

    >>> entropies, half = torch.tensor([[1.0, 3.0]]), torch.tensor([[0, 1]])
    >>> entropy_sums(LossInputs(*[torch.ones(1, 2)] * 4, entropies, entropy_mask=half))
    tensor([3., 1.])
    """
    mask = inputs.mask if inputs.entropy_mask is None else inputs.mask * inputs.entropy_mask
    return torch.stack([(inputs.entropies * mask).sum(), mask.sum().to(inputs.entropies.dtype)])


def mean_over_completions(values: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the mean over completions of the mean over a completion's tokens (arXiv 2402.03300, eq. 3).

    >>> ones, values = torch.ones(2, 3), torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> inputs = LossInputs(ones, ones, ones, mask, ones, tokens_per_step=8)
    >>> {name: REDUCTIONS[name].function(values, inputs, LossSettings(max_completion_length=5)).item()
    ...  for name in ("grpo", "bnpo", "dr_grpo", "luspo", "dapo")}
    {'grpo': 3.0, 'bnpo': 2.5, 'dr_grpo': 1.0, 'luspo': 5.0, 'dapo': 1.25}
    """
    return ((values * inputs.mask).sum(dim=1) / inputs.mask.sum(dim=1).clamp(min=1)).mean()


def mean_over_tokens(values: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the mean over the tokens of TRL's micro-batch, whose rows may be split among micro-batches and ranks."""
    tokens = inputs.mask.sum() if inputs.micro_batch_tokens is None else inputs.micro_batch_tokens
    return (values * inputs.mask / tokens.clamp(min=1)).sum()


def mean_over_limit(values: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the sum, divided by completions x ``max_completion_length`` (Dr. GRPO, arXiv 2503.20783)."""
    return (values * inputs.mask).sum() / (len(inputs.mask) * settings.max_completion_length)


def mean_over_sums(values: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the mean over completions of the sum over a completion's tokens (LUSPO, arXiv 2602.05261)."""
    return (values * inputs.mask).sum(dim=1).mean()


def sum_over_step(values: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the sum, divided by a rank's share of the optimizer step's tokens (DAPO, arXiv 2503.14476, eq. 8)."""
    return (values * inputs.mask).sum() / inputs.tokens_per_step


def mean_over_prompts(values: Tensor, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return the mean over prompts of the mean over the tokens of a prompt's completions, by `prompt_weights`.

    The weights are those of a whole rollout, so groups may be split among micro-batches, steps and ranks.
    """
    return (values * inputs.mask * inputs.row_weights).sum()


def prompt_weights(tokens: Tensor, group: int) -> Tensor:
    r"""Return :math:`w = 1 / (P N_g)` of each row (B,), from the number of tokens that count in each row of a rollout.

    Rows come group after group. :math:`N_g` is the number of tokens of the row's group, P the number of groups with
    :math:`N_g > 0`. A row of a group without tokens has the weight 0.

    >>> prompt_weights(torch.tensor([3, 1, 0, 0, 2, 0]), group=2)
    tensor([0.1250, 0.1250, 0.0000, 0.0000, 0.2500, 0.2500])
    """
    of_groups = tokens.view(-1, group).sum(dim=1)
    weights = (of_groups * (of_groups > 0).sum()).float().reciprocal()
    return weights.masked_fill(of_groups == 0, 0.0).repeat_interleave(group)


class Reduction(NamedTuple):
    """Turns the loss of tokens (B, T) into a number. It is linear in the loss, and 0 for rows without a token.

    ``over`` names the divisor: the ``rows`` of a micro-batch, the ``tokens`` of TRL's, or a constant of the
    ``step``.
    """

    function: Callable[[Tensor, LossInputs, LossSettings], Tensor]
    over: str


# By `loss_type`: TRL's, and prompt_mean.
REDUCTIONS: dict[str, Reduction] = {
    "grpo": Reduction(mean_over_completions, "rows"),
    "bnpo": Reduction(mean_over_tokens, "tokens"),
    "dr_grpo": Reduction(mean_over_limit, "rows"),
    "luspo": Reduction(mean_over_sums, "rows"),
    "dapo": Reduction(sum_over_step, "step"),
    "prompt_mean": Reduction(mean_over_prompts, "step"),
}


def micro_batch_weight(loss_type: str, rows: int, rows_of_trl: int) -> float:
    """Return the factor of a micro-batch's loss with which the losses add up to the loss of TRL's micro-batches.

    ``rows`` is the number of its rows, ``rows_of_trl`` that of TRL's micro-batch.

    >>> micro_batch_weight("grpo", 2, 8), micro_batch_weight("dapo", 2, 8)
    (0.25, 1.0)
    """
    return rows / rows_of_trl if REDUCTIONS[loss_type].over == "rows" else 1.0


def compute_loss(inputs: LossInputs, settings: LossSettings) -> Loss:
    """Return the loss of a micro-batch, and its metrics."""
    if settings.kl_estimator == "advantage" and inputs.ref_logps is not None:
        inputs = with_reference_advantages(inputs, inputs.ref_logps, settings.beta)
    now = inputs.logps.detach()
    # The score function keeps the ratio at 1, also in the correction of the KL.
    old = now if settings.surrogate == "reinforce" else inputs.old_logps
    ratio = importance_ratio(inputs.logps, old, inputs.mask, settings.importance_sampling_level)
    if settings.importance_sampling_level == "sequence" and inputs.advantages_of_reference:
        ratio = token_ratio(ratio, inputs.logps)
    surrogate = user_surrogate if is_user_function(settings.surrogate) else SURROGATES[settings.surrogate]
    values, clipped = surrogate(inputs, ratio, settings)
    logged = {
        **clipped,
        metrics.ENTROPY: Metric(inputs.entropies.detach()),
        metrics.RATIO: Metric((now - inputs.old_logps).exp()),
        metrics.APPROX_KL: Metric(k3(inputs.old_logps, now)),
    }
    if settings.off_policy_mask_threshold is not None:
        values = values * off_policy_mask(inputs, old, settings.off_policy_mask_threshold)
    if inputs.entropy_mask is not None:
        values = values * inputs.entropy_mask
    values = corrected_for_sampler(values, inputs, settings)
    if inputs.ref_logps is not None:
        kl = KL_ESTIMATORS[settings.kl_estimator](inputs.logps, inputs.ref_logps)
        if settings.kl_estimator != "advantage":
            kl = kl * ratio if settings.use_bias_correction_kl else kl
            values = values + settings.beta * kl
        logged[metrics.KL] = Metric(kl.detach())
    reduction = REDUCTIONS[settings.loss_type]
    policy_loss = reduction.function(values, inputs, settings)
    if reduction.over == "rows":
        # The reduction has divided by all rows, of which this share is trained on.
        policy_loss = policy_loss / settings.trained_share
    loss = policy_loss if reduction.over == "step" else policy_loss / inputs.accumulation
    total, tokens = sums = entropy_sums(inputs)
    if settings.entropy_coef is not None:
        loss = loss - settings.entropy_coef * total / tokens.clamp(min=1) / inputs.accumulation
    if inputs.aux_loss is not None:
        loss = loss + settings.router_aux_loss_coef * inputs.aux_loss / inputs.accumulation
        # One value for each completion, so that the mean of a step is that of TRL's micro-batches.
        aux_loss = inputs.aux_loss.detach().expand(len(inputs.mask), 1)
        logged[metrics.AUX_LOSS] = Metric(aux_loss, Statistic.COMPLETION_MEAN)
    return Loss(loss, policy_loss.detach(), sums.detach(), logged)
