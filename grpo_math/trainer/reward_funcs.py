"""Resolve a trainer's reward functions, which are names, functions or models, to what TRL takes.

Does not call them: rewards/guard.py does.
"""

from typing import Any

import torch

from grpo_math.rewards import REWARDS
from grpo_math.rewards.guard import RewardContext, checked


def resolved(reward_funcs: Any, context: RewardContext) -> Any:
    """Replace keys of `REWARDS` with their functions, and guard plain functions. TRL reads the others itself."""
    if isinstance(reward_funcs, list):
        return [resolved(func, context) for func in reward_funcs]
    if isinstance(reward_funcs, str):
        reward_funcs = REWARDS.get(reward_funcs, reward_funcs)
    # TRL calls a model itself, with tokens instead of columns.
    is_model = isinstance(reward_funcs, torch.nn.Module)
    return checked(reward_funcs, context) if callable(reward_funcs) and not is_model else reward_funcs
