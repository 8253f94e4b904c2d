"""The reference that follows the policy: zero KL after each refresh, nothing else changed, kept by a checkpoint."""

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_math.algorithm.reference import Reference
from grpo_math.errors import ConfigError

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
KINDS = {
    "full": None,
    "lora": LoraConfig(**LORA),
    "dora": LoraConfig(**LORA, use_dora=True, rank_pattern={"layers.0.self_attn.q_proj": 2}),
    "embedding": LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "v_proj"]}),
    "modules": LoraConfig(**LORA, modules_to_save=["norm"]),
    "pissa": LoraConfig(**LORA, init_lora_weights="pissa"),
}


BASE = {
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "beta": 0.5,
    "optim": "adamw_torch",
    "max_grad_norm": 1.0,
    "logging_steps": 1,
}


@pytest.fixture
def made(ours):
    """A trainer with an adapter that no other trainer changes."""
    return lambda adapter=None, **settings: ours(peft_config=copy.deepcopy(adapter), **BASE, **settings)


def kl(trainer):
    return [float(line["kl"]) for line in trainer.state.log_history if "kl" in line]


def weights(model):
    """Every weight but those of the reference's adapter."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".ref" not in name}


@pytest.mark.full(keep=["[lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_is_zero_after_each_refresh_and_above_zero_before_it_in_a_run_that_was_stopped_too(kind, made, tmp_path):
    settings = {"reference_refresh_steps": 2, "save_strategy": "steps", "save_steps": 3}
    whole = made(KINDS[kind], **settings)
    whole.train()
    values = kl(whole)
    assert max(map(abs, values[::2])) < 1e-7
    assert min(values[1::2]) > 1e-4
    assert {path.name for path in (tmp_path / "checkpoint-3").glob("*.safetensors")} == {
        "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    }
    assert (tmp_path / "adapter/adapter_model.safetensors").exists() == (kind != "full")
    resumed = made(KINDS[kind], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close(weights(resumed.model), weights(whole.model), atol=0, rtol=0)
    assert values[3:] == kl(resumed)[-2:]
    assert not (tmp_path / "checkpoint-3/ref").exists()


@pytest.mark.slow
def test_a_reference_that_trl_moves_is_in_the_checkpoint(made, tmp_path):
    moves = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "max_steps": 2}
    whole = made(**moves, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = made(**moves)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for model in ("model", "ref_model"):
        pair = (weights(getattr(trainer, model)) for trainer in (resumed, whole))
        torch.testing.assert_close(*pair, atol=0, rtol=0)
    (tmp_path / "checkpoint-1/reference/weights.safetensors").unlink()
    with pytest.raises(ConfigError, match="sync_ref_model=True cannot continue"):
        made(**moves).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.slow
@pytest.mark.full(keep=["modules"])
@pytest.mark.parametrize("kind", ["embedding", "modules"])
def test_the_second_adapter_is_not_trained_and_the_base_weights_stay(kind, made):
    plain = made(KINDS[kind])
    trainer = made(KINDS[kind], reference_refresh_steps=2)
    torch.testing.assert_close(weights(trainer.model), weights(plain.model), atol=0, rtol=0)
    trained = [{name for name, p in t.model.named_parameters() if p.requires_grad} for t in (plain, trainer)]
    assert trained[0] == trained[1]
    assert not any(".ref" in name for name in trained[1])
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained[1]


def test_a_checkpoint_without_a_reference_is_refused_and_so_is_one_whose_reference_would_be_lost(made, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    for first, then in ((0, 2), (2, 0)):
        folder = str(first)
        made(KINDS["lora"], folder=folder, **settings, reference_refresh_steps=first).train()
        again = made(KINDS["lora"], folder=folder, reference_refresh_steps=then)
        with pytest.raises(ConfigError, match=f"reference_refresh_steps={then} "):
            again.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-1"))


def test_training_goes_on_from_an_adapter_and_the_first_reference_is_that_adapter(small, made):
    """With an adapted embedding, which TRL's own copy leaves out."""
    base = AutoModelForCausalLM.from_pretrained(small)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(**{**LORA, "init_lora_weights": False, "target_modules": ["embed_tokens"]}))
    trainer = made(model=model, reference_refresh_steps=2)
    trainer.train()
    values = kl(trainer)
    assert max(abs(values[0]), abs(values[2]), abs(values[4])) < 1e-7
    assert min(values[1], values[3]) > 1e-6


def test_the_reference_of_a_bfloat16_adapter_is_bfloat16_too(small, made):
    base = AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16)
    trainer = made(model=get_peft_model(base, KINDS["lora"], autocast_adapter_dtype=False), reference_refresh_steps=2)
    assert {p.dtype for name, p in trainer.model.named_parameters() if ".ref" in name} == {torch.bfloat16}


def test_the_second_adapter_changes_neither_the_base_weights_nor_the_random_numbers():
    pissa = LoraConfig(target_modules=["0"], r=1, init_lora_weights="pissa")  # subtracts the adapter from the base
    policy = get_peft_model(nn.Sequential(nn.Linear(2, 2)), pissa)
    before = policy.base_model.model[0].base_layer.weight.clone(), torch.get_rng_state()
    Reference(policy, None, steps=2)
    assert torch.equal(policy.base_model.model[0].base_layer.weight, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_trained_weight_outside_the_adapter_is_refused():
    policy = get_peft_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    policy.base_model.model[1].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"cannot copy the trained base_model\.model\.1\.weight"):
        Reference(policy, None, steps=2)


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        (LoraConfig(**LORA, bias="all"), "bias"),
        (LoraConfig(**LORA, layer_replication=[(0, 2), (1, 2)]), "layer_replication"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "prompt learning"),
    ],
)
def test_an_adapter_that_cannot_be_copied_is_refused(adapter, named, made):
    with pytest.raises(ConfigError, match=named):
        made(adapter, reference_refresh_steps=2)
