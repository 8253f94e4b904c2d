r"""The surrogate that TRL has no name for, as a change of what TRL's loss is given. Pure torch.

TRL's loss is built on the ratio :math:`\rho_t = \pi_\theta(y_t) / \pi_{old}(y_t)` (arXiv 1707.06347, eq. 7):

.. math:: \ell_t = -\min(\rho_t A, \mathrm{clip}(\rho_t, 1 - \epsilon, 1 + \epsilon_{high}) A)

``surrogate="clip"`` is that. ``surrogate="reinforce"`` holds the ratio at 1 in value but not in gradient
(:math:`\pi_{old}` is the policy itself, detached), so that
:math:`\nabla \ell_t = -A \nabla \log \pi_\theta(y_t)`: the plain score function, at every update of a rollout and
however far the policy has moved from the one that sampled.

Does not compute the loss: TRL does, with every one of its options.
"""

from __future__ import annotations

from typing import Any

import torch

SURROGATES = ("clip", "reinforce")


def hold_ratio_at_one(inputs: dict[str, Any]) -> dict[str, Any]:
    """TRL's loss inputs without ``old_per_token_logps``: TRL then takes the policy's own, detached.

    >>> hold_ratio_at_one({"advantages": 1, "old_per_token_logps": 2})
    {'advantages': 1}
    """
    return {name: value for name, value in inputs.items() if name != "old_per_token_logps"}


def weight_of_part(loss_type: str, scored: torch.Tensor, rows: int, tokens: torch.Tensor) -> float | torch.Tensor:
    """The factor of a part's loss with which the parts add up to the loss of the micro-batches they came from.

    ``scored`` (n, T) marks the part's tokens that count; ``rows`` is the number of rows of TRL's micro-batch,
    ``tokens`` the number of its tokens that count. ``loss_type`` divides by rows (grpo, sapo, dr_grpo, luspo), by the
    micro-batch's tokens (bnpo), or by a count over the whole batch, which a part leaves as it is (dapo, cispo, vespo).

    >>> scored = torch.ones(2, 3)
    >>> weight_of_part("grpo", scored, 8, torch.tensor(40))
    0.25
    >>> weight_of_part("bnpo", scored, 8, torch.tensor(40))
    tensor(0.1500)
    """
    if loss_type in ("dapo", "cispo", "vespo"):
        return 1.0
    if loss_type == "bnpo":
        return scored.sum().clamp(min=1) / tokens.clamp(min=1)
    return scored.size(0) / rows
