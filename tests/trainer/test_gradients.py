"""DDP looks for parameters without a gradient only in a model with a vision tower, where it can."""

from types import SimpleNamespace

import pytest
from torch import nn

from grpo_math.errors import ConfigError
from grpo_math.trainer.gradients import has_unused_parameters

REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def of_model(*parts, processes=2, frozen=False, gradient_checkpointing=False, gradient_checkpointing_kwargs=None):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(not frozen)
    model.config = SimpleNamespace(sub_configs=dict.fromkeys(parts))
    args = SimpleNamespace(
        gradient_checkpointing=gradient_checkpointing, gradient_checkpointing_kwargs=gradient_checkpointing_kwargs
    )
    return model, args, processes


@pytest.mark.parametrize(
    ("parts", "settings", "unused"),
    [
        ((), {}, False),
        (("text_config",), {}, False),
        (("text_config", "vision_config"), {}, True),
        (("vision_config",), {"gradient_checkpointing": True}, True),
        (("vision_config",), {**REENTRANT, "gradient_checkpointing": False}, True),
        # One process has no DDP. Next to an adapter the tower is frozen, and DDP waits for no gradient of it.
        (("vision_config",), {**REENTRANT, "processes": 1}, False),
        (("vision_config",), {**REENTRANT, "frozen": True}, False),
    ],
)
def test_ddp_looks_for_unused_parameters_in_a_model_with_a_vision_tower_without_reentrant_checkpointing(
    parts, settings, unused
):
    assert has_unused_parameters(*of_model(*parts, **settings)) is unused


def test_all_weights_of_a_model_with_a_vision_tower_are_not_trained_with_reentrant_checkpointing_and_ddp():
    with pytest.raises(ConfigError, match="vision tower gets no gradient: set use_reentrant to false"):
        has_unused_parameters(*of_model("vision_config", **REENTRANT))
