"""A run on a GPU with vLLM in its process: colocated_gpu.py MODEL FOLDER SETTINGS, for tests/gpu/test_vllm.py.

SETTINGS are those of the run as JSON. FOLDER/record.pt has what the run logged, its adapter, the memory that it took,
and how many base parameters are in the engine's memory. vLLM allows one engine that can sleep in a process, so each run
has its own.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from small_trainers import make

from grpo_math.generation.models import load_tokenizer
from grpo_math.generation.shared import storage_address, storage_addresses
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

STEPS = 3


def vowels(completions, **columns):
    return [sum(str(text).count(letter) for letter in "aeiou") / 10 for text in completions]


def trained(model, folder, **settings):
    """Return the trainer of a run with vLLM, colocated or on a server."""
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = {"use_cpu": False, "bf16": True, "max_steps": STEPS, "learning_rate": 2e-3, "logging_steps": 1}
    base |= {"use_vllm": True, "model_init_kwargs": {"dtype": "bfloat16"}, "max_completion_length": 64}
    settings = {**base, **settings, "peft_config": adapter}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, model, load_tokenizer(model), folder, vowels, **settings)
    trainer.train()
    return trainer


def logged(trainer):
    """Return what a run logged for each step, and how often its canary agreed."""
    return {
        "steps": [line for line in trainer.state.log_history if "loss" in line],
        "agreed": trainer.vllm_generation.canary.agreed,
    }


def main(model: str, folder: str, settings: str) -> None:
    free_before, _ = torch.cuda.mem_get_info()
    trainer = trained(model, folder, vllm_mode="colocate", **json.loads(settings))
    named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    llm = trainer.vllm_generation.llm
    inside = storage_addresses(llm.llm_engine.model_executor.driver_worker.model_runner.model)
    base = [tensor for name, tensor in named.items() if "lora_" not in name]
    gc.collect()
    torch.cuda.empty_cache()
    free_after, _ = torch.cuda.mem_get_info()
    record = {
        **logged(trainer),
        "adapter": torch.cat([p.detach().flatten().cpu() for name, p in named.items() if "lora_" in name]),
        "base_bytes": sum(p.numel() * p.element_size() for p in base),
        "used_bytes": free_before - free_after,
        "shared": sum(storage_address(p) in inside for p in base) / len(base),
        "captures_graphs": not llm.llm_engine.model_config.enforce_eager,
    }
    torch.save(record, Path(folder) / "record.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
