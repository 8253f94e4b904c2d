"""Colocated vLLM with one copy of the base and with two, on a CPU: one_copy.py RECORD MODEL ..., for test_shared.py.

Each model is trained twice for two steps. RECORD has for each what was sampled, the trained adapter, the share of base
parameters in the engine's memory, and the anonymous memory that the trainer took.
"""

import gc
import hashlib
import inspect
import json
import os
import sys
import tempfile
from pathlib import Path

import vllm
from colocated import PROMPTS, make_trainer, unpacked
from peft import LoraConfig
from trl.generation import vllm_generation
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.cpu_worker import CPUWorker

from grpo_math import evaluate
from grpo_math.errors import ConfigError
from grpo_math.generation.shared import storage_address, storage_addresses


def anonymous_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def engine(**settings):
    settings["dtype"] = "float32"
    return vllm.LLM(**settings, enforce_eager=True)


def discard(worker, tags):
    """The CPU's worker frees no memory. On a GPU the cache has any contents afterwards."""
    assert tags == ("kv_cache",)
    for cache in worker.model_runner.kv_caches:
        cache.fill_(7.5)


def trained(model: str, **settings) -> dict:
    # TRL sets these for vLLM. A second trainer of this process would take itself for one rank of several.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    before = anonymous_bytes()
    settings |= {"gradient_checkpointing": True, "learning_rate": 5e-3, "vllm_enable_sleep_mode": True}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    trainer = make_trainer(model, Path(tempfile.mkdtemp()), lora, **settings)
    taken = anonymous_bytes() - before
    generation, completions = trainer.vllm_generation, []
    generate = generation.generate

    def noted(*args, **kwargs):
        answer = generate(*args, **kwargs)
        completions.append([list(tokens) for tokens in answer[1]])
        return answer

    generation.generate = noted
    trainer.train()
    rows = [{"id": str(i), "prompt": prompt, "answer": "7"} for i, prompt in enumerate(PROMPTS)]
    policy = trainer.accelerator.unwrap_model(trainer.model)
    named = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    inside = storage_addresses(generation.llm.llm_engine.model_executor.driver_worker.model_runner.model)
    of_base = [storage_address(tensor) in inside for name, tensor in named.items() if "lora_" not in name]
    adapter = {name: tensor for name, tensor in named.items() if "lora_" in name}
    merging = ""
    try:
        policy.merge_adapter()
    except ConfigError as error:
        merging = str(error)
    return {
        "bytes": taken,
        "completions": completions,
        "adapter": {name: hashlib.sha1(tensor.numpy().tobytes()).hexdigest() for name, tensor in adapter.items()},
        "moved": sum(tensor.abs().sum().item() for name, tensor in adapter.items() if "lora_B" in name),
        "shared": sum(of_base) / len(of_base),
        "answers": [row["completion"] for row in evaluate(trainer, rows)["rows"]],
        "merging": merging,
    }


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


def main(record: str, *models: str) -> None:
    check_vllm()
    vllm_generation.LLM = engine
    linear_layers.dispatch_cpu_unquantized_gemm = unpacked
    type(current_platform).is_sleep_mode_available = lambda platform: True
    CPUWorker.discard = discard
    records = {}
    for model in models:
        two, one = (trained(model, vllm_share_weights=shares) for shares in (False, True))
        size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        records[Path(model).name] = {"two": two, "one": one, "base_bytes": size}
    Path(record).write_text(json.dumps(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
