"""An adapter's gradients share one buffer, and are the same there."""

from __future__ import annotations

import torch
from peft import LoraConfig
from small_trainers import letters, make, weights

from grpo_math.trainer import gradients
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 3, "gradient_accumulation_steps": 2}


def trained(small, chars, folder, **settings):
    """The trainer after its steps, and how many storages gradients lay in before each optimizer step."""
    trainer = make(MathGRPOTrainer, MathGRPOConfig, small, chars, folder, letters, **{**ADAM, **settings})
    norm, storages = trainer._get_grad_norm, []

    def seen(*args, **kwargs):
        results = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
        storages.append(len({gradient.untyped_storage().data_ptr() for gradient in results}))
        return norm(*args, **kwargs)

    trainer._get_grad_norm = seen
    trainer.train()
    return trainer, storages


def test_an_adapter_trains_to_the_same_weights_with_its_gradients_in_one_buffer(small, chars, tmp_path, monkeypatch):
    settings = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "max_tokens_per_micro_batch": 40}
    trainer, storages = trained(small, chars, tmp_path / "ours", **settings)
    assert storages == [1, 1, 1]
    _, of_all_weights = trained(small, chars, tmp_path / "all weights")
    monkeypatch.setattr(gradients.FlatGradientBuffer, "allocate", lambda buffer: None)
    plain, apart = trained(small, chars, tmp_path / "plain", **settings)
    assert min(of_all_weights + apart) > 1
    assert torch.equal(weights(trainer.model), weights(plain.model))


def test_a_weight_that_backward_does_not_reach_has_no_gradient_and_the_buffer_goes_with_the_gradients():
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    buffer = gradients.FlatGradientBuffer([used, unused])
    with torch.no_grad():
        buffer.allocate()  # as in an evaluation
    assert not buffer.free
    for factor in (1.0, 3.0):
        buffer.allocate()
        (factor * used).sum().backward()
        assert (used.grad.tolist(), unused.grad) == ([factor] * 2, None)
        assert used.grad.untyped_storage().nbytes() == 16
        used.grad = None
    buffer.allocate()
    (used.sum() + unused.sum()).backward()
    assert not buffer.free
