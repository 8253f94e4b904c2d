"""On a real GPU: a run samples from vLLM, in its own process and from a server, with the adapter that it has."""

import gc
import importlib.util
import shutil

import pytest
import torch
from peft import LoraConfig
from small_trainers import make, relative
from vllm_process import VLLM, serving

from grpo_math.generation.shared import storage_address, storage_addresses
from grpo_math.run import metrics
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

pytestmark = pytest.mark.gpu
SHARE = 0.3  # of the GPU's memory, for vLLM
STEPS = 3


def vowels(completions, **columns):
    return [sum(str(text).count(letter) for letter in "aeiou") / 10 for text in completions]


def trained(model, tokenizer, folder, **settings):
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings |= {"use_cpu": False, "bf16": True, "max_steps": STEPS, "learning_rate": 2e-3, "logging_steps": 1}
    settings |= {"use_vllm": True, "model_init_kwargs": {"dtype": "bfloat16"}, "max_completion_length": 64}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, model, tokenizer, folder, vowels, peft_config=adapter, **settings)
    trainer.train()
    return trainer


def told(trainer, figure):
    """The figure, and that the sampler's log-probs agreed with the policy's at each sync."""
    steps = [line for line in trainer.state.log_history if "loss" in line]
    names = (metrics.SECONDS_GENERATE, metrics.SECONDS_SYNC, metrics.SECONDS_UPDATE, metrics.TOKENS_PER_SECOND)
    generating, syncing = (steps[-1][name] for name in names[:2])
    says = f"{generating:.1f} s of generation, {syncing:.2f} s of sending the adapter"
    figure(says=says, steps=[{name: step.get(name) for name in names} for step in steps])
    assert len(steps) == STEPS
    assert trainer.vllm_generation.canary.agreed >= 1


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed beside torch")
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleeping"])
def test_a_run_with_vllm_in_its_own_process(sleeps, model, tokenizer, tmp_path, figure):
    vllm = {"vllm_gpu_memory_utilization": SHARE, "vllm_max_model_length": 512, "vllm_enable_sleep_mode": sleeps}
    told(trained(model, tokenizer, tmp_path, vllm_mode="colocate", **vllm), figure)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed beside torch")
def test_one_copy_of_the_base_trains_the_same_adapter_in_less_memory(model, tokenizer, tmp_path, figure):
    """With sleep, and with CUDA graphs, which are captured on the tensors that are trained."""
    settings = {"vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_enable_sleep_mode": True}
    settings |= {"vllm_gpu_memory_utilization": SHARE, "temperature": 1e-3}
    adapters, used = [], []
    for shares in (False, True):
        free_before, _ = torch.cuda.mem_get_info()
        trainer = trained(model, tokenizer, tmp_path / str(shares), vllm_share_weights=shares, **settings)
        policy = trainer.accelerator.unwrap_model(trainer.model)
        assert not trainer.vllm_generation.llm.llm_engine.model_config.enforce_eager
        told(trainer, figure)
        adapters.append(torch.cat([p.detach().flatten() for n, p in policy.named_parameters() if "lora_" in n]))
        base = [p for n, p in policy.named_parameters() if "lora_" not in n]
        size = sum(p.numel() * p.element_size() for p in base)
        gc.collect()
        torch.cuda.empty_cache()
        # vLLM takes the same share of the GPU in both runs.
        free_after, _ = torch.cuda.mem_get_info()
        used.append(free_before - free_after)
        inside = storage_addresses(
            trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
        )
        assert all((storage_address(p) in inside) == shares for p in base)
        del trainer, policy, base
        gc.collect()
        torch.cuda.empty_cache()
    figure(
        says=f"{used / size:.2f} times the bytes of the base",
        base_bytes=size,
        used_bytes=used,
        difference=relative(adapters[1], adapters[0]),
    )
    assert used[0] - used[1] > 0.8 * size
    assert relative(adapters[1], adapters[0]) < 1e-2


def test_a_run_with_a_vllm_server_on_the_same_gpu(model, tokenizer, tmp_path, figure):
    executable = VLLM or shutil.which("vllm")
    if not executable:
        pytest.skip("there is no vllm: neither GRPO_MATH_VLLM nor PATH has one")
    with serving(model, tmp_path, executable, extra=("--gpu-memory-utilization", str(SHARE))) as process:
        told(trained(model, tokenizer, tmp_path, vllm_mode="server", vllm_server_base_url=process.url), figure)
