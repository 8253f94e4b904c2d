"""Every kind of training on the pretended GPU: no two devices meet, and it ends with the weights of a CPU.

Two steps each. In float32 the weights agree to rounding: the device computes with the CPU's kernels, but keys are
repeated for query heads, TRL's head leaves out what is not scored, and the largest micro-batch is tried first. In
bfloat16 they are near: CUDA's autocast rounds in other places than a CPU's.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
import trl
import yaml
from accelerate import dispatch_model
from datasets import Dataset
from peft import LoraConfig
from small_trainers import PROMPTS, SMALL, config, letters, relative, weights

from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

pytestmark = [pytest.mark.pretended_gpu, pytest.mark.full]

ROOT = Path(__file__).parents[2]
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
KINDS = {
    **{f"loss {name}": {"loss_type": name, "num_iterations": 2} for name in LOSSES},
    "loss luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "lora": {"peft_config": LORA},
    "kl": {"beta": 0.1},
    "kl with lora": {"beta": 0.1, "peft_config": LORA},
    "k1": {"beta": 0.1, "kl_estimator": "k1"},
    "reinforce": {"surrogate": "reinforce", "baseline": "none"},
    "resampling": {"resample_groups": 2},
    "resampling with lora and kl": {"resample_groups": 1, "peft_config": LORA, "beta": 0.1},
    "reference refresh": {"beta": 0.1, "reference_refresh_steps": 1},
    "reference refresh with lora": {"beta": 0.1, "reference_refresh_steps": 1, "peft_config": LORA},
    "activation offloading": {"activation_offloading": True, "gradient_checkpointing": True},
    "offloading with lora": {"activation_offloading": True, "gradient_checkpointing": True, "peft_config": LORA},
    "no largest micro-batch first": {"longest_first": False},
    "small passes": {"update_token_budget": 40},
    "length limit": {"max_seq_length_train": 20},
    "as TRL computes": {"pack_updates": False},
    "entropy bonus": {"entropy_coef": 0.01},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
    "truncated completions masked": {"mask_truncated_completions": True},
    "sequence ratios": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "older rollouts": {"steps_per_generation": 8},
    "clipped gradients": {"max_grad_norm": 1.0},
    "qwen2": {"family": "qwen2", "gradient_checkpointing": True},
    "qwen3": {"family": "qwen3"},
    "gemma": {"family": "gemma"},
}
ROWS = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(PROMPTS * 4)]


def trained(tiny, tokenizer, folder, cpu: bool, **settings):
    """The trainable weights after two steps, on the CPU, and before."""
    settings = {**SMALL, "max_steps": 2, "use_cpu": cpu, **settings}
    if cpu:  # which has nothing to offload from
        settings.pop("activation_offloading", None)
    trainer = MathGRPOTrainer(
        model=tiny(settings.pop("family", "llama")),
        reward_funcs=letters,
        peft_config=settings.pop("peft_config", None),
        args=config(MathGRPOConfig, folder, **settings),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )
    assert trainer.accelerator.device.type == ("cpu" if cpu else "cuda")
    before = weights(trainer.model).cpu()
    trainer.train()
    assert trainer.state.global_step == 2
    assert {p.device.type for p in trainer.model.parameters()} == {trainer.accelerator.device.type}
    return weights(trainer.model).cpu(), before


@pytest.mark.full(keep=["full]"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_end_with_the_weights_of_a_cpu(kind, tiny, tokenizer, tmp_path):
    there, before = trained(tiny, tokenizer, tmp_path, False, **KINDS[kind])
    here, _ = trained(tiny, tokenizer, tmp_path, True, **KINDS[kind])
    assert relative(here, before) > 1e-4, "nothing was trained"
    assert relative(there - before, here - before) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "lora", "kl with lora"])
def test_float32_weights_under_autocast_end_near_those_of_float32(kind, tiny, tokenizer, tmp_path):
    settings = KINDS.get(kind, {})
    there, before = trained(tiny, tokenizer, tmp_path, False, bf16=True, gradient_checkpointing=True, **settings)
    here, _ = trained(tiny, tokenizer, tmp_path, True, **settings)
    assert there.dtype == torch.float32
    assert 0 < relative(there - before, here - before) < 0.5


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "lora", "kl with lora"])
def test_bfloat16_weights_are_trained(kind, tiny, tokenizer, tmp_path):
    """Their rounding samples other completions: there is nothing to compare with."""
    settings = {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}, "gradient_checkpointing": True}
    there, before = trained(tiny, tokenizer, tmp_path, False, **settings, learning_rate=1.0, **KINDS.get(kind, {}))
    assert there.isfinite().all()
    assert not torch.equal(there, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "kl with lora", "as TRL computes"])
def test_a_model_with_layers_on_two_devices_is_not_packed_and_trains(kind, tiny, tokenizer, tmp_path, caplog):
    """As TRL loads it in one process that sees two GPUs, with ``device_map="auto"``."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    model = dispatch_model(loaded, {**places, "model.rotary_emb": 0}, force_hooks=True)
    settings = {**KINDS.get(kind, {}), "family": model}
    there, before = trained(lambda model: model, tokenizer, tmp_path, False, **settings)
    here, _ = trained(tiny, tokenizer, tmp_path, True, **KINDS.get(kind, {}))
    assert relative(here, before) > 1e-4, "nothing was trained"
    assert relative(there - before, here - before) < 1e-5
    assert ("has layers on several devices" in caplog.text) == (kind != "as TRL computes")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "kl with lora"])
def test_two_steps_with_a_tool_end_with_the_weights_of_a_cpu(kind, tiny, tokenizer, tmp_path):
    """Every other completion calls it: the words of its answer are in the row, and not in the loss."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = Path(trl.__file__).parent.joinpath("chat_templates/qwen3.jinja").read_text()
    results = []
    for cpu in (False, True):
        settings = {"max_completion_length": 120, "per_device_train_batch_size": 8, "use_cpu": cpu, "max_steps": 2}
        settings |= KINDS.get(kind, {})
        trainer = MathGRPOTrainer(
            model=tiny("qwen3"),
            reward_funcs=lambda completions, **columns: letters([str(messages) for messages in completions]),
            peft_config=settings.pop("peft_config", None),
            args=config(MathGRPOConfig, tmp_path, **settings),
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS * 4]
            ),
            processing_class=tokenizer,
            tools=[add],
        )
        sampled, masks, loss_of = trainer._generate_single_turn, [], trainer._loss_of

        def calling(prompts, *rest, sampled=sampled, **turn):
            ids, logprobs = sampled(prompts, *rest, **turn)
            if len(prompts) == 8:  # the first turn, of every completion
                ids[::2] = [tokenizer.encode(CALL, add_special_tokens=False)] * 4
            return ids, logprobs

        def seen(model, rows, masks=masks, loss_of=loss_of):
            masks.append(rows["tool_mask"])
            return loss_of(model, rows)

        trainer._generate_single_turn, trainer._loss_of, trainer._dry_run_due = calling, seen, False
        before = weights(trainer.model).cpu()
        trainer.train()
        assert any((mask == 0).any() for mask in masks), "no answer of a tool was trained past"
        results.append((weights(trainer.model).cpu(), before))
    (there, before), (here, _) = results
    assert relative(here, before) > 1e-5, "nothing was trained"
    assert relative(there - before, here - before) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(ROOT.glob("launch/configs/*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_trains_two_steps(path, tiny, tmp_path, monkeypatch):
    """By the training program, in one process, with every other field as shipped: checkpoint and adapter included."""
    from grpo_math.train.program import main as train

    problems = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(32)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    recipe = yaml.safe_load(path.read_text())
    recipe |= {
        "model_name_or_path": tiny(),
        "dataset": str(tmp_path / "problems.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "max_completion_length": 8,
        "use_vllm": False,
        "eval_n": 4,
        "heldout_every": 2,
    }
    for field in ("vllm_mode", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"):
        recipe.pop(field, None)
    for field in ("use_cpu", "bf16", "eval_split", "generation_kwargs"):  # the last in vLLM's words
        recipe.pop(field, None)
    for field in [name for name in recipe if "4bit" in name or "bnb" in name]:
        recipe.pop(field)  # quantised weights are a class of tensors of their own
    if "8bit" in recipe.get("optim", ""):
        recipe["optim"] = "adamw_torch"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert train(["--config", str(tmp_path / "recipe.yaml")]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "step_time" in step] == [1, 2]
    assert all("memory/allocated" in step for step in steps if "step_time" in step), "it was not on the device"
