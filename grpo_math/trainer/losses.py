r"""Losses that TRL lacks: the reinforce surrogate, and the KL estimators k1 and k2. Pure torch.

TRL's loss is built on the ratio :math:`\rho_t = \pi_\theta(y_t) / \pi_{old}(y_t)` (arXiv 1707.06347, eq. 7):

.. math:: \ell_t = -\min(\rho_t A, \mathrm{clip}(\rho_t, 1 - \epsilon, 1 + \epsilon_{high}) A)

``surrogate="clip"`` is this loss. ``surrogate="reinforce"`` keeps the ratio at 1 in value but not in gradient
(:math:`\pi_{old}` is the policy itself, detached), so that
:math:`\nabla \ell_t = -A \nabla \log \pi_\theta(y_t)`: the plain score function, at every update of a rollout and
at any distance between the policy and the one that sampled.

A user function as ``surrogate``, ``module:function``, replaces :math:`\ell_t` (`own_surrogate`).

KL to the reference: ``beta`` times an estimate :math:`k_t` is added to the loss of each token. With
:math:`d_t = \log \pi_\theta(y_t) - \log \pi_{ref}(y_t)` (Schulman, "Approximating KL divergence", 2020):

.. math:: k_1 = d, \qquad k_2 = d^2 / 2, \qquad k_3 = e^{-d} - 1 + d

For tokens that the policy itself sampled, :math:`k_1` and :math:`k_3` have the mean
:math:`KL(\pi_\theta \| \pi_{ref})`, and :math:`k_2` is close to it if the two policies are close. Their gradients as
loss terms differ (arXiv 2506.09477), because the sampling is not differentiated. The mean gradient of each one, given
the tokens before it, is

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
`tests/trainer/test_losses.py` checks every entry of the table by enumeration.

Does not compute the loss: TRL does, with all of its options. Only the KL term for k1 and k2, and a user function's
surrogate, are added to it.
"""

import torch
from torch import Tensor

from grpo_math.errors import ConfigError
from grpo_math.run.user_functions import tensor_from, tried


def own_surrogate(name: str, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    r"""Return the loss of tokens (B, T) by a user function, :math:`\ell = f(\log \pi_\theta, \log \pi_{old}, A, m)`.

    ``name`` is ``module:function``; docs/algorithms.md has its rules. PPO's clipped ratio, the built-in surrogate, is::

        def clip(logps, old_logps, advantages, mask):
            ratio = (logps - old_logps).exp()
            return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    """
    each = (advantages if advantages.dim() > 1 else advantages[:, None]).expand_as(logps)
    # The ratio of a token that does not count is 1: an infinite one, times its mask of 0, would be NaN.
    old_logps = old_logps.where(mask.bool(), logps.detach())
    return tensor_from("surrogate", name, logps, logps, old_logps, each, mask)


def try_surrogate(name: str) -> None:
    """Raise `ConfigError` unless the function's loss has a gradient and treats each completion by itself."""
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -0.25]], requires_grad=True)
    old, each = logps.detach() - 0.1, torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    both = tried("surrogate", name, logps, logps, old, each, mask)
    if not both.requires_grad:
        raise ConfigError("surrogate", name, "returned a loss without a gradient", "compute it from the log-probs")
    # Rows are regrouped into other micro-batches, so each row's loss may depend on that row alone.
    rows = [tried("surrogate", name, logps[i], logps[i], old[i], each[i], mask[i]) for i in (slice(1), slice(1, 2))]
    if not torch.allclose(both * mask, torch.cat(rows) * mask, equal_nan=True):
        reason = "gives a completion a different loss in a batch than alone"
        raise ConfigError("surrogate", name, reason, "reduce within a row only: batches are regrouped")


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


def kl_per_token(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """Return k1, k2 or k3 of each token (B, T), in nats. The table above has their gradients.

    >>> logps, ref_logps = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    >>> [kl_per_token(logps, ref_logps, name) for name in ("k1", "k2", "k3")]
    [tensor([ 0.6931, -0.6931]), tensor([0.2402, 0.2402]), tensor([0.1931, 0.3069])]
    """
    difference = logps - ref_logps
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # For a policy near its reference, exp(-d) - 1 would lose most of its digits.
    return torch.expm1(-difference) + difference


def aggregate(
    values: Tensor,
    mask: Tensor,
    loss_type: str,
    max_completion_length: int,
    tokens_per_step: float | Tensor,
    accumulation: int = 1,
) -> Tensor:
    """Reduce values of tokens (B, T) with their mask to a scalar, as TRL's ``loss_type`` does.

    =====================  =============================================================
    loss_type              the sum over the micro-batch's tokens is divided by
    =====================  =============================================================
    grpo, sapo             the length of each completion, then the number of completions
    bnpo                   the micro-batch's tokens
    dr_grpo                completions x ``max_completion_length`` (arXiv 2503.20783)
    luspo                  completions
    dapo, cispo, vespo     ``tokens_per_step``: one rank's share of an optimizer step's tokens (arXiv 2503.14476)
    =====================  =============================================================

    The sum is also divided by ``accumulation``, the micro-batches of an optimizer step, except in the last line, which
    counts them already. Linear in ``values``. A micro-batch without a token gives 0.

    >>> values, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> {name: aggregate(values, mask, name, 5, 8).item() for name in ("grpo", "bnpo", "dr_grpo", "luspo", "dapo")}
    {'grpo': 3.0, 'bnpo': 2.5, 'dr_grpo': 1.0, 'luspo': 5.0, 'dapo': 1.25}
    """
    rows = (values * mask).sum(dim=1)
    lengths = mask.sum(dim=1)
    if loss_type in ("dapo", "cispo", "vespo"):
        return rows.sum() / tokens_per_step
    if loss_type == "bnpo":
        total = rows.sum() / lengths.sum().clamp(min=1)
    elif loss_type == "dr_grpo":
        total = rows.mean() / max_completion_length
    elif loss_type == "luspo":
        total = rows.mean()
    else:
        total = (rows / lengths.clamp(min=1)).mean()
    return total / accumulation


def weight_of_micro_batch(
    loss_type: str, scored: torch.Tensor, rows: int, tokens: torch.Tensor
) -> float | torch.Tensor:
    """Return the factor of a micro-batch's loss with which the losses add up to the loss of TRL's micro-batches.

    ``scored`` (n, T) marks the tokens of the micro-batch that count; ``rows`` is the number of rows of TRL's
    micro-batch, ``tokens`` the number of its tokens that count. ``loss_type`` divides by rows (grpo, sapo, dr_grpo,
    luspo), by the micro-batch's tokens (bnpo), or by a constant count over the whole batch (dapo, cispo, vespo).

    >>> scored = torch.ones(2, 3)
    >>> weight_of_micro_batch("grpo", scored, 8, torch.tensor(40))
    0.25
    >>> weight_of_micro_batch("bnpo", scored, 8, torch.tensor(40))
    tensor(0.1500)
    """
    if loss_type in ("dapo", "cispo", "vespo"):
        return 1.0
    if loss_type == "bnpo":
        return scored.sum().clamp(min=1) / tokens.clamp(min=1)
    # Rows that were added to fill the micro-batch count in TRL's mean, so they count here, too.
    return scored.size(0) / rows
