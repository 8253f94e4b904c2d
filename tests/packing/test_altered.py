"""A script may change a model at any step: what cannot be packed any more is scored as TRL does."""

import pytest
import torch
from small_families import tiny_model
from small_trainers import KINDS, SMALL, STEPS, letters, relative, weights
from transformers import TrainerCallback

from grpo_math.packing.altered import is_altered
from grpo_math.run import speed_ups
from grpo_math.trainer import tiled_mlp


def packs(trainer):
    trainer.grpo_math.scorer.agree_to_pack()
    return trainer.grpo_math.scorer.packed is not None


def mixed(module, args, output):
    """Each token gets a little of the others, fewer of them in a packed row."""
    return output - 0.05 * output.mean(1, keepdim=True)


def clipped(module, grad_input, grad_output):
    return tuple(gradient.clamp(-1e-3, 1e-3) for gradient in grad_input)


def mlp(model):
    return model.model.layers[1].mlp


def patch_forward(model):
    forward = mlp(model).forward
    mlp(model).forward = lambda states: mixed(None, None, forward(states))


class Mixing(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, states):
        output = self.mlp(states)
        return output - 20 * output.mean(1, keepdim=True)


def wrap_mlp(model):
    model.model.layers[1].mlp = Mixing(mlp(model))


SCRIPT, DIFFERS = "a hook or a forward method of a script", "log-probs that change by"
# Changes after which packed rows might get another gradient, and the reason.
CHANGES = {
    "a hook that mixes tokens": (lambda model: mlp(model).register_forward_hook(mixed), SCRIPT),
    "a hook that only looks": (lambda model: mlp(model).register_forward_hook(print), SCRIPT),
    "a patched forward": (patch_forward, SCRIPT),
    "a gradient that is clipped": (lambda model: mlp(model).register_full_backward_hook(clipped), SCRIPT),
    "a hook on a parameter": (lambda model: model.lm_head.weight.register_hook(torch.sign), SCRIPT),
    "a hook on a gradient": (lambda model: model.lm_head.weight.register_post_accumulate_grad_hook(print), SCRIPT),
    "a module that mixes tokens": (wrap_mlp, DIFFERS),
    "eager attention": (lambda model: model.set_attn_implementation("eager"), "attention implementation"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_a_script_changes_is_packed_only_while_packing_changes_nothing(change, ours):
    model = tiny_model("llama").train()
    trainer = ours(model=model)
    assert packs(trainer)
    random = torch.get_rng_state()
    alter, expected = CHANGES[change]
    hook = alter(model)
    assert not packs(trainer)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config._attn_implementation == ("eager" if "eager" in change else "sdpa")
    [reason] = speed_ups._reasons["packing"]
    assert expected in reason
    if hook is not None:
        hook.remove()
        assert packs(trainer)


def test_attention_that_is_switched_and_switched_back_is_packed_again(ours):
    model = tiny_model("llama")
    trainer = ours(model=model)
    assert packs(trainer)
    model.set_attn_implementation("eager")
    model.set_attn_implementation("sdpa")
    assert packs(trainer)
    assert model.config._attn_implementation == "packed_sdpa"
    # A script may also remove the hooks of others.
    for module in model.modules():
        module._forward_hooks.clear()
    assert packs(trainer)
    assert len(model.model._forward_hooks) == 1


def test_code_of_libraries_is_no_alteration(ours):
    model = tiny_model("llama")
    assert packs(ours(model=model))
    assert not any(map(is_altered, model.modules()))
    wrap_mlp(model)
    assert is_altered(model.model.layers[1].mlp)


def test_a_step_looks_at_the_model_once_at_its_beginning_and_before_and_after_a_rollout(ours):
    events = []

    def rewards(completions, **columns):
        events.append("rewards")
        return letters(completions)

    settings = {**STEPS, "num_iterations": 2, "max_steps": 2, "gradient_accumulation_steps": 4}
    trainer = ours(rewards, **settings, per_device_train_batch_size=2)
    scorer = trainer.grpo_math.scorer
    agree = scorer.agree_to_pack
    scorer.agree_to_pack = lambda: (events.append("look"), agree())
    trainer.train()
    # The second step has the rollout of the first one.
    assert events == ["look", "look", "rewards", "look", "look"]


class AtStep(TrainerCallback):
    """Changes the model before the second step."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            self.change(model)


def replace_mlp(model):
    torch.manual_seed(3)
    size = mlp(model).gate_proj.in_features
    model.model.layers[1].mlp = torch.nn.Linear(size, size)


@pytest.mark.slow
@pytest.mark.parametrize("change", [CHANGES["a hook that mixes tokens"][0], patch_forward, replace_mlp])
def test_a_model_that_a_callback_changes_ends_with_trls_weights(change, ours, monkeypatch):
    """With tiles of a few tokens: in such a layer the norm is computed with the MLP."""
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", 8)
    trained = {}
    for name in KINDS:
        trainer = ours(letters, folder=name, **KINDS[name], **STEPS, **SMALL, gradient_checkpointing=True)
        trainer.add_callback(AtStep(change))
        trainer.train()
        trained[name] = weights(trainer.model)
    assert relative(trained["ours"], trained["trl"]) < 1e-6
    assert "tiled MLP" in speed_ups._reasons
