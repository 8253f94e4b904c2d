"""Colocated vLLM with one copy of the base and with two, on a CPU: one_copy.py RECORD MODEL ..., for test_shared.py.

Each model is trained twice for two steps. RECORD has for each what was sampled, the trained adapter, the share of base
parameters in the engine's memory, the memory that the trainer took, and the answers of an evaluation.

A run on one copy of the first model is killed in its second step and resumed. Each run has a process of its own,
because a second trainer would use memory that the first one has freed.
"""

import ctypes
import gc
import hashlib
import inspect
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import vllm
from colocated import PROMPTS, make_trainer, unpacked
from peft import LoraConfig
from transformers import BitsAndBytesConfig, TrainerCallback
from trl.generation import vllm_generation
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.cpu_worker import CPUWorker

from grpo_math import evaluate
from grpo_math.generation.shared import storage_address, storage_addresses


def resident_bytes() -> int:
    """Return the process's memory. The weights that transformers has loaded may be pages of their file."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the allocator keeps freed pages, more or fewer of them
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def engine(**settings):
    # TRL passes bitsandbytes for a policy in 4 bit.
    settings["dtype"] = "bfloat16" if settings.get("quantization") else "float32"
    return vllm.LLM(**settings, enforce_eager=True)


def discard(worker, tags):
    """The CPU's worker frees no memory. On a GPU the cache has any contents afterwards."""
    assert tags == ("kv_cache",)
    for cache in worker.model_runner.kv_caches:
        cache.fill_(7.5)


class KilledInSecondStep(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def new_trainer(model: str, run_dir: Path, targets: str = "all-linear", in_4bit: bool = False, **settings):
    settings |= {"gradient_checkpointing": True, "learning_rate": 5e-3, "vllm_enable_sleep_mode": True}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    if in_4bit:
        nested = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        settings["quantization"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **nested
        )
        settings["dtype"] = "bfloat16"
    return make_trainer(model, run_dir, lora, **settings)


def adapter_hashes(trainer) -> dict[str, str]:
    """Return a hash of each tensor of the adapter."""
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {
        name: hashlib.sha1(p.detach().float().numpy().tobytes()).hexdigest() for name, p in named if "lora_" in name
    }


def in_child(function, *args, **kwargs):
    """Return the result of a function, called in a fork of this process. Results are JSON."""
    result = Path(tempfile.mkdtemp()) / "result.json"
    if not (pid := os.fork()):
        result.write_text(json.dumps(function(*args, **kwargs)))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(result.read_text())


def resumed(model: str) -> dict[str, str]:
    """Return the adapter of a run that was killed in its second step and resumed."""
    settings = {"vllm_share_weights": True, "save_strategy": "steps", "save_steps": 1}
    run_dir = Path(tempfile.mkdtemp())
    if not (pid := os.fork()):
        trainer = new_trainer(model, run_dir, **settings)
        trainer.add_callback(KilledInSecondStep)
        trainer.train()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    trainer = new_trainer(model, run_dir, **settings)
    trainer.train(resume_from_checkpoint=True)
    return adapter_hashes(trainer)


def run(model: str, **settings):
    """Return a trainer after two steps, and what was measured."""
    before = resident_bytes()
    trainer = new_trainer(model, Path(tempfile.mkdtemp()), **settings)
    generation, completions = trainer.vllm_generation, []
    generate = generation.generate

    def noted(*args, **kwargs):
        answer = generate(*args, **kwargs)
        completions.append([list(tokens) for tokens in answer[1]])
        return answer

    generation.generate = noted
    trainer.train()
    named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    inside = storage_addresses(generation.llm.llm_engine.model_executor.driver_worker.model_runner.model)
    of_base = [storage_address(tensor) in inside for name, tensor in named.items() if "lora_" not in name]
    record = {
        # After training, which has read all pages of the weights.
        "bytes": resident_bytes() - before,
        "completions": completions,
        "adapter": adapter_hashes(trainer),
        "moved": sum(tensor.abs().sum().item() for name, tensor in named.items() if "lora_B" in name),
        "shared": sum(of_base) / len(of_base),
    }
    return trainer, record


def trained(model: str, **settings) -> dict:
    trainer, record = run(model, **settings)
    rows = [{"id": str(i), "prompt": prompt, "answer": "7"} for i, prompt in enumerate(PROMPTS)]
    record["answers"] = [row["completion"] for row in evaluate(trainer, rows)["rows"]]
    return record


def check_vllm() -> None:
    """Name what a new version of vLLM has moved, of what generation/shared.py and sync.py use."""
    uses = {
        vllm.LLM.sleep: ["level"],
        vllm.LLM.wake_up: ["tags"],
        vllm.LLM.release_kv_cache_memory: [],
        LLMEngine.step: [],
        base_loader.process_weights_after_loading: ["model"],
        EngineArgs: ["dtype", "moe_backend", "enable_lora", "max_loras", "max_lora_rank"],
    }
    for function, arguments in uses.items():
        missing = set(arguments) - set(inspect.signature(function).parameters)
        assert not missing, f"vLLM {vllm.__version__}: {function.__qualname__} has no {missing}"
    # `SharedBase.locate` replaces the name that the loader calls when the weights are there.
    loads = inspect.getsource(base_loader.BaseModelLoader.load_model)
    assert loads.index("self.load_weights(") < loads.index(" process_weights_after_loading("), vllm.__version__


def make_cpu_like_gpu() -> None:
    """Leave the weights of vLLM's CPU build as they are loaded, and let its engine sleep."""
    vllm_generation.LLM = engine
    linear_layers.dispatch_cpu_unquantized_gemm = unpacked
    type(current_platform).is_sleep_mode_available = lambda platform: True
    CPUWorker.discard = discard


def weight_bytes(model: str) -> int:
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def main(record: str, *models: str) -> None:
    check_vllm()
    make_cpu_like_gpu()
    records, after_kill = {}, in_child(resumed, models[0])
    for model in models:
        two, one = (in_child(trained, model, vllm_share_weights=shares) for shares in (False, True))
        records[Path(model).name] = {"two": two, "one": one, "base_bytes": weight_bytes(model)}
    records[Path(models[0]).name]["one"]["resumed"] = after_kill
    Path(record).write_text(json.dumps(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
