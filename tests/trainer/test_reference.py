"""The reference that follows the policy: zero KL after each refresh, nothing else changed, kept by a checkpoint."""

import copy
import json
import sys
from pathlib import Path

import pytest
import small_trainers
import torch
from launching import accelerate, run
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_math.errors import ConfigError
from grpo_math.generation.models import load_tokenizer
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
KINDS = {
    "full": None,
    "lora": LoraConfig(**LORA),
    "dora": LoraConfig(**LORA, use_dora=True, rank_pattern={"layers.0.self_attn.q_proj": 2}),
    "embedding": LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "v_proj"]}),
    "modules": LoraConfig(**LORA, modules_to_save=["norm"]),
    "pissa": LoraConfig(**LORA, init_lora_weights="pissa"),
}


def make(model, tokenizer, folder, peft_config=None, trainer=MathGRPOTrainer, config=MathGRPOConfig, **settings):
    base = {"max_completion_length": 8, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "beta": 0.5}
    base |= {"optim": "adamw_torch", "max_grad_norm": 1.0, "logging_steps": 1}
    adapter = copy.deepcopy(peft_config)
    return small_trainers.make(trainer, config, model, tokenizer, folder, peft_config=adapter, **{**base, **settings})


def kl(trainer):
    return [float(line["kl"]) for line in trainer.state.log_history if "kl" in line]


def weights(model):
    """Every weight but those of the reference's adapter."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".ref" not in name}


def same(a, b):
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.full(keep=["[lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_is_zero_after_each_refresh_and_above_zero_before_it_in_a_run_that_was_stopped_too(
    kind, small, chars, tmp_path
):
    settings = {"reference_refresh_steps": 2, "save_strategy": "steps", "save_steps": 3}
    whole = make(small, chars, tmp_path, KINDS[kind], **settings)
    whole.train()
    values = kl(whole)
    assert max(map(abs, values[::2])) < 1e-7
    assert min(values[1::2]) > 1e-4
    assert {path.name for path in (tmp_path / "checkpoint-3").glob("*.safetensors")} == {
        "model.safetensors" if kind == "full" else "adapter_model.safetensors"
    }
    resumed = make(small, chars, tmp_path, KINDS[kind], **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(whole.model), weights(resumed.model))
    assert values[3:] == kl(resumed)[-2:]
    assert not (tmp_path / "checkpoint-3/ref").exists()


@pytest.mark.slow
@pytest.mark.full(keep=["modules"])
@pytest.mark.parametrize("kind", ["embedding", "modules"])
def test_the_second_adapter_is_not_trained_and_the_base_weights_stay(kind, small, chars, tmp_path):
    plain = make(small, chars, tmp_path, KINDS[kind])
    trainer = make(small, chars, tmp_path, KINDS[kind], reference_refresh_steps=2)
    assert same(weights(plain.model), weights(trainer.model))
    trained = [{name for name, p in t.model.named_parameters() if p.requires_grad} for t in (plain, trainer)]
    assert trained[0] == trained[1]
    before = weights(trainer.model)
    trainer.train()
    optimised = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    named = dict(trainer.model.named_parameters())
    assert optimised == {id(named[name]) for name in trained[1]}
    assert all(torch.equal(value, named[name]) for name, value in before.items() if name not in trained[1])
    assert {p.dtype for name, p in named.items() if ".ref" in name} == {torch.float32}
    assert not any(p.requires_grad for name, p in named.items() if ".ref" in name)


@pytest.mark.slow
def test_a_checkpoint_without_a_reference_is_refused_and_so_is_one_whose_reference_would_be_lost(
    small, chars, tmp_path
):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    for first, then in ((0, 2), (2, 0)):
        folder = tmp_path / str(first)
        make(small, chars, folder, KINDS["lora"], **settings, reference_refresh_steps=first).train()
        again = make(small, chars, folder, KINDS["lora"], reference_refresh_steps=then)
        with pytest.raises(ConfigError, match=f"reference_refresh_steps={then} "):
            again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))


@pytest.mark.slow
def test_training_goes_on_from_an_adapter_and_the_first_reference_is_that_adapter(small, chars, tmp_path):
    """With an adapted embedding, which TRL's own copy leaves out."""
    base = AutoModelForCausalLM.from_pretrained(small)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(**{**LORA, "init_lora_weights": False, "target_modules": ["embed_tokens"]}))
    trainer = make(model, chars, tmp_path, reference_refresh_steps=2)
    trainer.train()
    values = kl(trainer)
    assert max(abs(values[0]), abs(values[2]), abs(values[4])) < 1e-7
    assert min(values[1], values[3]) > 1e-6


def test_the_reference_of_a_bfloat16_adapter_is_bfloat16_too(small, chars, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(small, dtype=torch.bfloat16)
    model = get_peft_model(base, KINDS["lora"], autocast_adapter_dtype=False)
    trainer = make(model, chars, tmp_path, reference_refresh_steps=2)
    assert {p.dtype for name, p in trainer.model.named_parameters() if ".ref" in name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        (LoraConfig(**LORA, bias="all"), "bias"),
        (LoraConfig(**LORA, layer_replication=[(0, 2), (1, 2)]), "layer_replication"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "prompt learning"),
    ],
)
def test_an_adapter_that_cannot_be_copied_is_refused(adapter, named, small, chars, tmp_path):
    with pytest.raises(ConfigError, match=named):
        make(small, chars, tmp_path, adapter, reference_refresh_steps=2)


@pytest.mark.full
def test_deepspeed_on_two_processes(tiny, tmp_path):
    """Real ZeRO-3 on the CPU: zero KL after the refresh, over the rows of both ranks, also after a checkpoint."""
    start = accelerate("zero3_offload", tmp_path, "--num_processes", "2")
    run([*start, __file__, tiny(), str(tmp_path)])
    for kind in ("full", "lora"):
        seen = json.loads((tmp_path / f"{kind}.json").read_text())
        assert seen["launched"] == ["DEEPSPEED", 2, 3]
        assert [abs(value) < 1e-7 for value in seen["kl"]] == [True, False, True, False, True], seen["kl"]
        assert seen["resumed"] == seen["kl"][3:]
        assert [path.name for path in (tmp_path / kind / "checkpoint-3/reference").iterdir()] == ["weights.safetensors"]


def two_runs(model, folder, kind):
    """What `test_deepspeed_on_two_processes` runs on each rank: five steps, and the last two again from step 3."""
    settings = {"reference_refresh_steps": 2, "save_strategy": "steps", "save_steps": 3, "max_completion_length": 4}
    logged = []
    for checkpoint in (None, str(folder / kind / "checkpoint-3")):
        tokenizer = load_tokenizer(model)
        trainer = make(model, tokenizer, folder / kind, KINDS[kind], per_device_train_batch_size=4, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        logged.append(kl(trainer))
    state = trainer.accelerator.state
    launched = [state.distributed_type.value, state.num_processes, trainer.deepspeed.zero_optimization_stage()]
    if state.is_main_process:
        seen = {"kl": logged[0], "resumed": logged[1][-2:], "launched": launched}
        (folder / f"{kind}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    for each in ("full", "lora"):
        two_runs(sys.argv[1], Path(sys.argv[2]), each)
