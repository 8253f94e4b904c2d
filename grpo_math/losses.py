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


def without_zero_advantages(inputs: dict[str, Any], loss_type: str) -> tuple[dict[str, Any], float | torch.Tensor]:
    r"""The rows of a micro-batch that carry a gradient, and the factor that keeps the loss what it was.

    A row with :math:`A = 0` adds exactly 0 to loss and gradient when no other term (KL, entropy bonus, auxiliary
    loss) is on; the caller sees to that. Dropping it changes only what ``loss_type`` divides by: the number of rows
    (grpo, sapo, dr_grpo, luspo), of tokens (bnpo), or a count over the whole batch that stays as it is (dapo, cispo,
    vespo). One row always stays, since every rank has to run a forward and a backward pass.

    >>> inputs = {"advantages": torch.tensor([0.0, 2.0, 0.0, 0.0]), "completion_mask": torch.ones(4, 3).long()}
    >>> kept, factor = without_zero_advantages(inputs, "grpo")
    >>> kept["advantages"], factor
    (tensor([2.]), 0.25)
    """
    advantages, mask = inputs["advantages"], inputs["completion_mask"]
    rows = advantages.size(0)
    keep = advantages.reshape(rows, -1).ne(0).any(dim=1)
    if keep.all():
        return inputs, 1.0
    if not keep.any():
        keep[mask.sum(dim=1).argmin()] = True
    kept = {
        name: value[keep] if isinstance(value, torch.Tensor) and value.dim() > 0 and value.size(0) == rows else value
        for name, value in inputs.items()
    }
    if loss_type in ("dapo", "cispo", "vespo"):
        return kept, 1.0
    if loss_type == "bnpo":
        tool_mask = inputs.get("tool_mask")
        scored = mask if tool_mask is None else mask * tool_mask
        return kept, scored[keep].sum().clamp(min=1) / scored.sum().clamp(min=1)
    return kept, int(keep.sum()) / rows
