"""Reward functions as a trainer is given them: names, functions and models -> what TRL takes.

Does not call them: rewards/guard.py does.
"""

from typing import Any

import torch

from grpo_math.rewards import REWARDS
from grpo_math.rewards.guard import RewardContext, checked


def resolved(reward_funcs: Any, context: RewardContext) -> Any:
    """Keys of `REWARDS` become their functions, and plain functions are checked; anything else is TRL's to read."""
    if isinstance(reward_funcs, list):
        return [resolved(func, context) for func in reward_funcs]
    if isinstance(reward_funcs, str):
        reward_funcs = REWARDS.get(reward_funcs, reward_funcs)
    is_model = isinstance(reward_funcs, torch.nn.Module)
    return checked(reward_funcs, context) if callable(reward_funcs) and not is_model else reward_funcs
