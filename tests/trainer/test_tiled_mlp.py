"""When the MLP of a layer is computed in tiles. test_equivalence.py compares the gradients with TRL's."""

from types import SimpleNamespace

import pytest
import torch

from grpo_math.trainer.tiled_mlp import MIN_TOKENS, TiledMLP


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_with_gradients_only_a_layer_that_is_computed_again_is_tiled(training, checkpointing, needs_gradient):
    mlp = SimpleNamespace(forward=torch.nn.Identity())
    tiled = TiledMLP(SimpleNamespace(mlp=mlp, training=training, gradient_checkpointing=checkpointing))
    states = torch.zeros(2, MIN_TOKENS, 3, requires_grad=needs_gradient)
    assert tiled.tiles(states) == (2 if training and checkpointing and needs_gradient else 1)
    with torch.no_grad():
        assert tiled.tiles(states) == 2
