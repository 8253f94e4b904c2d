"""Terms that can be counted exactly, against the tensors that peft, torch, bitsandbytes and transformers make."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.planner import memory
from grpo_math.planner.model import model_shape, stored
from grpo_math.planner.settings import Zero, resolve
from grpo_math.planner.work import Machine, Work
from grpo_math.settings.batch import Batch
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system import machine

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}


SHAPE = model_shape("q", stored("shapes.json")["Qwen/Qwen2.5-0.5B"])


def bytes_of(tensors) -> int:
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
    counted = memory.trainable(model_shape(family, {"model_type": family, **SMALL}), resolve(RunSettings(settings)))
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
    assert counted == sum(p.numel() for p in trained)
    # The plan leaves out the step that each tensor has.
    assert memory.optimizer_bytes(counted, "adamw_torch", 4) == bytes_of(kept) - 4 * len(trained)


@pytest.mark.parametrize("nested", [False, True])
def test_4_bit_weights_take_what_the_plan_says(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(torch.randn(896, 4864), quant_type="nf4", compress_statistics=nested)
    of_nested = [state.offset, state.state2.absmax, state.state2.code] if nested else []
    matrix = replace(SHAPE, matrices=896 * 4864, total=896 * 4864)
    settings = resolve(RunSettings({"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": nested}))
    assert memory.weights(matrix, settings, 2) == pytest.approx(
        bytes_of([packed, state.absmax, state.code, *of_nested]), rel=1e-3
    )


@pytest.mark.parametrize(
    ("recipe", "deepspeed", "expected"),
    [
        ({}, None, memory.Precision(4, 4, True)),
        ({"dtype": "bfloat16", "use_peft": True}, None, memory.Precision(2, 4, True)),
        ({"dtype": "auto", "use_peft": True, "load_in_4bit": True}, None, memory.Precision(2, 2, True)),
        ({"dtype": "auto", "use_peft": True}, None, memory.Precision(2, 4, True)),
        ({"dtype": "auto"}, None, memory.Precision(4, 4, True)),  # the weights that AdamW trains stay float32
        ({"dtype": "auto", "bf16": False}, {"zero_optimization": {"stage": 2}}, memory.Precision(2, 4, False)),
        ({"dtype": "bfloat16", "bf16": False}, None, memory.Precision(2, 4, False)),
        ({"use_cpu": True, "dtype": "auto"}, None, memory.Precision(4, 4, False)),
        ({"use_peft": True}, {"zero_optimization": {"stage": 2}}, memory.Precision(2, 2, False)),
        (
            {"dtype": "bfloat16", "bf16": False, "use_peft": True},
            {"zero_optimization": {"stage": 2}},
            memory.Precision(2, 4, False),
        ),
        (
            {"dtype": "bfloat16", "use_peft": True},
            {"bf16": {"enabled": False}, "zero_optimization": {"stage": 3}},
            memory.Precision(2, 2, True),
        ),
        ({}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, memory.Precision(2, 2, False)),
    ],
)
def test_the_dtypes_are_those_that_trl_and_peft_load(recipe, deepspeed, expected):
    assert memory.precision(resolve(RunSettings(recipe)), Zero(deepspeed, 64), deepspeed) == expected


# What follows is counted by hand: a model of 10,000 parameters, with 6,400 of them in linear maps.
MEASURED = {
    "forward": [1000, 10, 1],  # bytes per (1, tokens, keys)
    "backward": [2000, 10, 1],
    "moments": [[3000, 20, 2], [0, 30, 0]],
    "trained": [100, 3200],  # with an adapter of rank 16
    "prefill": [[50_000, 4, 0.5]],
}
TINY = replace(
    SHAPE,
    measured=lambda how: MEASURED,
    max_tokens=64,
    tied=True,
    cache=(4, 20),
    layers=10,
    hidden=8,
    vocab=100,
    total=10_000,
    matrices=6_400,
    largest=640,
)
ON_4 = Machine(TINY, gpus=1, gpu_bytes=4 * machine.GB, cpu_bytes=4 * machine.GB, prompt=10, accelerate=None)
BATCH = Batch(generations=8, processes=1, rows=8, steps=4, rollout=32)
ADAPTER = {"dtype": "bfloat16", "use_peft": True, "lora_dropout": 0.0}
WORK = [(3, [4, 4])]  # 11 tokens, 17 gathered keys, 8 scored tokens


def zero(stage, **settings):
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **settings}}


def read(recipe, deepspeed=None):
    settings, stages = resolve(RunSettings(recipe)), Zero(deepspeed, TINY.hidden)
    return settings, stages, memory.precision(settings, stages, deepspeed)


@pytest.mark.parametrize(
    ("recipe", "deepspeed", "processes", "expected"),
    [
        ({}, None, 1, {"base_weights": 40_000, "gradients": 40_000, "optimizer_state": 80_000}),
        (
            {"beta": 0.1, "optim": "adamw_8bit"},
            None,
            2,
            {
                "base_weights": 40_000,
                "reference": 40_000,
                "gradients": 40_000,
                "optimizer_state": 20_312,
                "gradient_buckets_and_NCCL": 40_000,
            },
        ),
        # The adapter has 100 + 3,200 x 8 / 16 = 1,700 parameters.
        (
            {**ADAPTER, "lora_r": 8, "reference_refresh_steps": 5, "beta": 0.1},
            None,
            1,
            {
                "base_weights": 20_000,
                "adapter": 6_800,
                "reference": 6_800,
                "gradients": 6_800,
                "optimizer_state": 13_600,
            },
        ),
        # 6,400 x 9 / 16 bytes in 4 bit, and 3,600 x 2.
        (
            {**ADAPTER, "load_in_4bit": True},
            None,
            1,
            {"base_weights": 10_800, "adapter": 6_600, "gradients": 6_600, "optimizer_state": 13_200},
        ),
        (
            {"dtype": "bfloat16", "cast_lm_head_to_fp32": True},
            None,
            1,
            {"base_weights": 21_600, "gradients": 20_000, "optimizer_state": 40_000},
        ),
        # The state of ZeRO: two moments and a copy of the weights, 12 bytes a parameter, over 4 processes.
        (
            {},
            zero(1, overlap_comm=True),
            4,
            {
                "base_weights": 20_000,
                "gradients": 20_000,
                "optimizer_state": 30_000,
                "gradient_buckets_and_NCCL": 4_000,
            },
        ),
        (
            {},
            zero(2, offload_optimizer={"device": "cpu"}),
            4,
            {
                "base_weights": 20_000,
                "gradients": 5_000,
                "gradient_buckets_and_NCCL": 2_000,
                "main_optimizer_state": 160_000,
            },
        ),
        # DeepSpeedCPUAdam in place of the optimizer, unless DeepSpeed's file says otherwise.
        (
            {"optim": "adamw_8bit"},
            zero(2, offload_optimizer={"device": "cpu"}),
            4,
            {
                "base_weights": 20_000,
                "gradients": 5_000,
                "gradient_buckets_and_NCCL": 2_000,
                "main_optimizer_state": 160_000,
            },
        ),
        (
            {"optim": "sgd"},
            {**zero(2, offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False},
            4,
            {
                "base_weights": 20_000,
                "gradients": 5_000,
                "gradient_buckets_and_NCCL": 2_000,
                "main_optimizer_state": 80_000,
            },
        ),
        (
            {},
            zero(3, offload_param={"device": "cpu"}),
            4,
            {
                "gradients": 5_000,
                "optimizer_state": 30_000,
                "gradient_buckets_and_NCCL": 4_000,
                "main_base_weights": 20_000,
            },
        ),
        (
            ADAPTER,
            zero(3, reduce_bucket_size="auto"),
            3,
            {
                "base_weights": 6_667,
                "adapter": 2_200,
                "gradients": 2_200,
                "optimizer_state": 13_200,
                "gradient_buckets_and_NCCL": 256,
            },
        ),
    ],
)
def test_stored_tensors_by_hand(recipe, deepspeed, processes, expected):
    always, backward, main = memory.resident_memory(TINY, *read(recipe, deepspeed), processes)
    assert main.pop("processes") == processes * 2 * machine.GB
    terms = {**always, **backward, **{f"main_{name}": size for name, size in main.items()}}
    assert {name: size for name, size in terms.items() if size} == expected


@pytest.mark.parametrize("more", [{}, {"load_in_4bit": True}])
def test_a_teacher_is_a_model_of_its_own_beside_an_adapter(more):
    recipe = {**ADAPTER, "beta": 1.0, "reference_model": "x", **more}
    always, _, _ = memory.resident_memory(TINY, *read(recipe, None), 1, TINY)
    assert always["reference"] == 20_000


@pytest.mark.parametrize(
    ("recipe", "measured", "vocab", "expected"),
    [
        # The head's backward pass. It has a tile of 8 x 32,768 x 2 bytes, and gradients of 8 x 8 x 6.
        (ADAPTER, {}, 100, {"activations": 2127 + 8 * 32, "fused_LM_head": 524_288 + 384}),
        # Offloading leaves 5 of 10 layers' inputs on the GPU.
        (
            {**ADAPTER, "activation_offloading": True},
            {},
            100,
            {"activations": 2127 + 256 - 5 * 11 * 16, "fused_LM_head": 524_672},
        ),
        # Trained in float32: autocast casts 100 x 8 weights of the head, and gradients have (8 + 100) x 8 x 4 bytes.
        ({}, {}, 100, {"activations": 2127 + 8 * 48, "fused_LM_head": 524_288 + 1600 + 3456}),
        (
            {"use_cpu": True},
            {},
            100,
            {"activations": 2127 + 8 * 48, "fused_LM_head": 2 * 524_288 + 3456 + 7 * 4 * 8 * 100},
        ),
        # The head's forward pass, because autocast holds copies until its end.
        (ADAPTER, {"forward": [900_000, 10, 1]}, 100, {"activations": 900_127 + 256, "fused_LM_head": 524_288}),
        # A layer's backward pass, with the largest matrix of 640 weights in 16 bit, and its constants.
        (
            {**ADAPTER, "load_in_4bit": True},
            {"moments": [[0, 0, 0], [800_000, 0, 0]]},
            100,
            {"activations": 2127, "temporaries_of_a_layer": 800_000 + 1320 - 2127, "gradients_on_their_way": 0},
        ),
        # Three gradients of the head and the tied embedding, of 100,000 x 8 x 4 bytes.
        ({}, {}, 100_000, {"gradients_on_their_way": 3 * 3_200_000}),
    ],
)
def test_the_fullest_moment_of_an_update_by_hand(recipe, measured, vocab, expected):
    shape, (settings, _, precise) = replace(TINY, measured=lambda how: MEASURED | measured, vocab=vocab), read(recipe)
    assert memory.update(shape, settings, precise, Work(WORK)) == expected


@pytest.mark.parametrize(
    ("recipe", "prompt", "cache", "sampling"),
    [
        # At the end: 16 rows of 4 + (10 + 195) x 20 elements, a layer of ten twice, and 20 bytes for each logit.
        ({}, 10, 131_328 + 13_132, 16 * 100 * 20),
        # transformers keeps no free tokens: 4 + (10 + 190) x 20.
        ({"lora_dropout": 0.1}, 10, 128_128 + 12_812, 32_000),
        # The prefill of two prompts of 1,000 tokens, and a dequantised matrix.
        ({"load_in_4bit": True}, 1000, 2 * (8 + 1000 * 40), 50_000 + 4 * 2000 + 2000 * 500 + 1320),
    ],
)
def test_generation_by_transformers_by_hand(recipe, prompt, cache, sampling):
    settings, zero, precise = read({**ADAPTER, "max_completion_length": 190, **recipe})
    machine, two = ON_4._replace(prompt=prompt), BATCH._replace(processes=2)
    terms = memory.transformers_generation(machine, settings, zero, precise, two).generation
    assert terms == {"KV_cache": cache, "prefill_and_sampling": sampling}


VLLM = {**ADAPTER, "use_vllm": True, "vllm_gpu_memory_utilization": 0.5}
CACHE = 2 * machine.GB - memory.VLLM_OVERHEAD - 20_000  # half of 4 GB, without vLLM's overhead and the weights


@pytest.mark.parametrize(
    ("recipe", "deepspeed", "generates", "processes", "expected"),
    [
        # 4% of base, adapter, gradients, optimizer, activations and head.
        (
            ADAPTER,
            None,
            "server",
            1,
            {"fragmentation": (23_994, 2_384, None), "gradient_buckets_and_NCCL": (None,) * 3},
        ),
        (ADAPTER, None, "server", 2, {"gradient_buckets_and_NCCL": (memory.COMMUNICATION + 13_200,) * 2 + (None,)}),
        (VLLM, None, "colocate", 1, {"vLLM_KV_cache": (CACHE, CACHE, None), "fragmentation": (46_788, 4_648, None)}),
        ({**VLLM, "vllm_enable_sleep_mode": True}, None, "colocate", 1, {"vLLM_KV_cache": (None, CACHE, None)}),
        (
            ADAPTER,
            zero(3),
            "transformers",
            2,
            {"weights_gathered_by_ZeRO-3": (20_000, 20_000, None), "KV_cache": (None, 373_260, None)},
        ),
        (ADAPTER, zero(3), "server", 2, {"weights_gathered_by_ZeRO-3": (20_000, None, None)}),
        # Two processes on a CPU share its memory.
        (
            {"use_cpu": True, "activation_offloading": True},
            None,
            "server",
            2,
            {
                "base_weights": (80_000, 80_000, None),
                "processes": (4 * machine.GB,) * 3,
                "CUDA_context": (None,) * 3,
                "activations": (2 * (2127 + 8 * 48 - 5 * 11 * 32), None, 2 * 10 * 11 * 32),
            },
        ),
    ],
)
def test_a_phase_adds_what_is_outside_the_model(recipe, deepspeed, generates, processes, expected):
    """Bytes in training, in generation and in main memory."""
    phases, main = memory.phases(
        ON_4, *read(recipe, deepspeed), BATCH._replace(processes=processes), generates, Work(WORK)
    )
    terms = {name: tuple(where.get(name) for where in (*phases.values(), main)) for name in expected}
    assert terms == expected
