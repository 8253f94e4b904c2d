"""vLLM in the process that trains, on a CPU: colocated.py MODEL FOLDER, for tests/generation/test_colocated.py.

Trains an adapter, and in a single process all weights too, for two steps each. FOLDER/RANK.json says for each rollout
how far the engine's log-probs are from the trainer's, and what the engine was told; and the answers of an evaluation.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import vllm
from datasets import Dataset
from peft import LoraConfig
from served import SETTINGS, vowels
from transformers import AutoTokenizer
from trl.generation import vllm_generation
from vllm.distributed.device_communicators import cpu_communicator
from vllm.model_executor.layers import utils as linear_layers
from vllm.platforms import current_platform

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.generation.adapters import logps

QUESTIONS = ["What is 3 + 4?", "Name a colour.", "What is 12 times 3?", "Say hello."]
PROMPTS = [[{"role": "user", "content": question}] for question in QUESTIONS]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
told: list[str] = []


class Engine(vllm.LLM):
    """vLLM in float32, so that only rounding lies between its log-probs and the trainer's, and without a compiler."""

    def __init__(self, **settings) -> None:
        super().__init__(dtype="float32", enforce_eager=True, **settings)

    def generate(self, *args, **kwargs):
        told.append("generate")
        return super().generate(*args, **kwargs)

    def sleep(self, level=1, **kwargs):
        told.append(f"sleep {level}")
        super().sleep(level, **kwargs)

    def wake_up(self, tags=None):
        told.append(f"wake {tags[0]}")
        super().wake_up(tags)


def barrier(original, *args, device_ids=None, **kwargs):
    if device_ids is not None:  # as TRL and the canary call it before `generate`
        told.append("barrier")
    return original(*args, device_ids=device_ids, **kwargs)


def plain(layer, remove_weight):
    """vLLM's CPU build drops a weight once it is packed, and cannot load it a second time: keep it."""
    layer.cpu_linear = torch.nn.functional.linear


def of_this_run(original, communicator):
    """vLLM names the ranks' shared memory the same in every run of the machine."""
    return f"{os.environ['MASTER_PORT']}-{original(communicator).strip('/')}"


def trained(model: str, folder: Path, adapter: LoraConfig | None, **settings) -> dict:
    trainer = MathGRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=MathGRPOConfig(
            str(folder),
            **SETTINGS,
            max_steps=2,
            num_generations=4,
            max_completion_length=12,
            lr_scheduler_type="constant",
            model_init_kwargs={"dtype": "float32"},
            vllm_mode="colocate",
            vllm_max_model_length=256,
            vllm_tensor_parallel_size=RANKS,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 4]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=adapter,
    )
    generation, policy, rollouts = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model), []
    generate, before = generation.generate, {name: p.detach().clone() for name, p in policy.named_parameters()}

    def compared(*args, **kwargs):
        told.clear()
        answer = generate(*args, **kwargs)
        rows = [(list(prompt), list(tokens)) for prompt, tokens in zip(*answer[:2], strict=True)]
        ours = torch.cat([logps(policy, *row) for row in rows])
        of_vllm = torch.tensor([token[0] for row in answer[2] for token in row])
        apart = (ours - of_vllm).abs().mean().item()
        rollouts.append(
            {"apart": apart, "told": [*told], "rows": rows, "ours": ours, "sent": vars(generation).get("sent")}
        )
        return answer

    generation.generate = compared
    trainer.train()
    generation.sync_weights()
    template = partial(trainer.processing_class.apply_chat_template, add_generation_prompt=True)
    prompt_ids = [template(prompt)["input_ids"] for prompt in PROMPTS]
    for _ in range(2):  # two turns of a conversation
        generation.generate(prompt_ids, None, 1)
    rows = [{"id": str(i), "prompt": prompt, "answer": "7"} for i, prompt in enumerate(PROMPTS)]
    alone = {"tokenizer": trainer.processing_class, "max_new_tokens": 12}
    results = {"engine": evaluate(trainer, rows), "transformers": evaluate(policy, rows, **alone)}
    answers = {name: [row["completion"] for row in result["rows"]] for name, result in results.items()}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(before[name])
    for rollout in rollouts:  # how far training had moved the policy
        first = torch.cat([logps(policy, *row) for row in rollout.pop("rows")])
        rollout["moved"] = (rollout.pop("ours") - first).abs().mean().item()
    agreed = getattr(getattr(generation, "canary", None), "agreed", None)
    return {"rollouts": rollouts, "agreed": agreed, "answers": answers, "backend": results["engine"]["backend"]}


def main(model: str, folder: str) -> None:
    vllm_generation.LLM = Engine
    torch.distributed.barrier = partial(barrier, torch.distributed.barrier)
    shared = cpu_communicator._CPUSHMDistributed
    shared.make_group_name = partial(of_this_run, shared.make_group_name)
    # The engine pauses and resumes as on a GPU. Its CPU worker frees no memory, so vLLM would refuse the setting.
    type(current_platform).is_sleep_mode_available = lambda platform: True
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    record = {
        "adapter": trained(model, Path(folder) / "adapter", lora, learning_rate=2e-3, vllm_enable_sleep_mode=True)
    }
    if RANKS == 1:
        linear_layers.dispatch_cpu_unquantized_gemm = plain
        record["all_weights"] = trained(model, Path(folder) / "all_weights", None, learning_rate=1e-4)
    Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
