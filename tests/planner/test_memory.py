"""Terms that can be counted exactly, against the tensors that peft, torch, bitsandbytes and transformers make."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.planner import memory
from grpo_math.planner.memory import Precision
from grpo_math.planner.model import shape_of, stored
from grpo_math.planner.settings import Zero, resolve
from grpo_math.planner.work import Machine, Work, largest
from grpo_math.run import machine
from grpo_math.settings.batch import Batch

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}


SHAPE = shape_of("q", stored("shapes.json")["Qwen/Qwen2.5-0.5B"])
ON_24 = Machine(SHAPE, gpus=1, gpu_bytes=24 * machine.GB, cpu_bytes=64 * machine.GB, prompt=100, accelerate=None)


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets", "dora"),
    [
        ("qwen3", ["q_proj", "down_proj"], True),
        ("gemma", ["all-linear"], False),
        ("llama", r".*\.mlp\..*_proj", False),
        ("qwen2", None, False),
    ],
)
def test_an_adapter_and_its_optimizer_have_the_sizes_of_pefts_and_torchs(family, targets, dora):
    settings = {"use_peft": bool(targets), "lora_r": 5, "lora_target_modules": targets, "use_dora": dora}
    shape = shape_of(family, {"model_type": family, **SMALL})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL), dtype=torch.float32)
    if targets:
        target = targets[0] if len(targets) == 1 else targets  # as TRL's ModelConfig does
        model = get_peft_model(model, LoraConfig(r=5, target_modules=target, use_dora=dora, task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    counted = memory.trainable(shape, resolve(settings))
    assert counted == sum(p.numel() for p in trained)
    steps = 4 * len(trained)  # one of each tensor, which the plan leaves out
    assert memory.optimizer_bytes(counted, "adamw_torch", 4) == bytes_of(kept) - steps


@pytest.mark.parametrize("nested", [False, True])
def test_4_bit_weights_take_what_the_plan_says(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(torch.randn(896, 4864), quant_type="nf4", compress_statistics=nested)
    kept = [packed, state.absmax, state.code]
    if nested:
        kept += [state.offset, state.state2.absmax, state.state2.code]
    matrix = replace(SHAPE, matrices=896 * 4864, total=896 * 4864)
    settings = resolve({"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": nested})
    assert memory.weights(matrix, settings, 2) == pytest.approx(bytes_of(kept), rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "deepspeed", "expected"),
    [
        ({}, None, Precision(4, 4, True)),
        ({"dtype": "bfloat16", "use_peft": True}, None, Precision(2, 4, True)),
        ({"dtype": "auto", "use_peft": True, "load_in_4bit": True}, None, Precision(2, 2, True)),
        ({"dtype": "auto", "use_peft": True}, None, Precision(2, 4, True)),
        ({"dtype": "auto"}, None, Precision(4, 4, True)),  # the weights that AdamW trains stay float32
        ({"dtype": "auto", "bf16": False}, {"zero_optimization": {"stage": 2}}, Precision(2, 4, False)),
        ({"dtype": "bfloat16", "bf16": False}, None, Precision(2, 4, False)),
        ({"use_cpu": True, "dtype": "auto"}, None, Precision(4, 4, False)),
        ({"use_peft": True}, {"zero_optimization": {"stage": 2}}, Precision(2, 2, False)),
        (
            {"dtype": "bfloat16", "bf16": False, "use_peft": True},
            {"zero_optimization": {"stage": 2}},
            Precision(2, 4, False),
        ),
        (
            {"dtype": "bfloat16", "use_peft": True},
            {"bf16": {"enabled": False}, "zero_optimization": {"stage": 3}},
            Precision(2, 2, True),
        ),
        ({}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, Precision(2, 2, False)),
    ],
)
def test_the_dtypes_are_those_that_trl_and_peft_load(recipe, deepspeed, expected):
    assert memory.precision(resolve(recipe), Zero(deepspeed, 64), deepspeed) == expected


def batch_of(processes: int = 1) -> Batch:
    return Batch(generations=8, processes=processes, rows=8, steps=4, rollout=32)


@pytest.mark.parametrize(
    ("recipe", "groups"),
    [
        ({}, [[100] * 8, [100] * 6 + [2]]),  # 1600 tokens: 899 + 99 + 6 x 100 + 2
        ({"max_tokens_per_micro_batch": 500}, [[100] * 4 + [1]]),
        ({"max_tokens_per_micro_batch": 50}, [[100]]),  # one stays whole
        ({"max_tokens_per_micro_batch": 10**6}, [[100] * 8] * 4),  # all there are
    ],
)
def test_the_largest_micro_batch_is_filled_to_the_budget(recipe, groups):
    settings = resolve({"max_completion_length": 100, **recipe})
    tiles = 3 if len(groups) == 4 else 1  # of 3,596 tokens
    assert largest(ON_24, settings, batch_of(), 0) == Work([(99, lengths) for lengths in groups], tiles)


def test_zero_partitions_what_its_stages_say():
    total, terms = SHAPE.total, []
    for stage in (1, 2, 3):
        deepspeed = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000}}
        settings, zero, batch = resolve({}), Zero(deepspeed, SHAPE.hidden), batch_of(4)
        precise, work = memory.precision(settings, zero, deepspeed), largest(ON_24, settings, batch, stage)
        terms.append(memory.phases(ON_24, settings, zero, precise, batch, "transformers", work)[0]["training"])
    one, two, three = terms
    # float32 weights and two moments
    assert one["optimizer_state"] == two["optimizer_state"] == pytest.approx(12 * total / 4, rel=1e-6)
    assert (one["gradients"], two["gradients"]) == (2 * total, total * 2 // 4)
    assert (two["base_weights"], three["base_weights"]) == (2 * total, total * 2 // 4)
    assert "weights_gathered_by_ZeRO-3" in three
