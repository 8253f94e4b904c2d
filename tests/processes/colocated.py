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
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_generation
from vllm.distributed.device_communicators import cpu_communicator
from vllm.model_executor.layers import utils as linear_layers
from vllm.platforms import current_platform

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.generation.adapters import logps
from grpo_math.generation.completions import token_ids

QUESTIONS = ["What is 3 + 4?", "Name a colour.", "What is 12 times 3?", "Say hello."]
PROMPTS = [[{"role": "user", "content": question}] for question in QUESTIONS]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
told: list[list] = []


def recorded(call, *args, **kwargs):
    """Write down the call with what tells it from others of its name."""
    told.append([call.__name__, kwargs.get("tags") or kwargs.get("level") or kwargs.get("device_ids")])
    return call(*args, **kwargs)


def engine(**settings):
    """vLLM in float32, so that only rounding lies between its log-probs and the trainer's, and without a compiler."""
    llm = vllm.LLM(dtype="float32", enforce_eager=True, **settings)
    for method in (llm.generate, llm.sleep, llm.wake_up):
        setattr(llm, method.__name__, partial(recorded, method))
    return llm


def vowels(completions, **columns):
    """Dense, so that every group has a signal."""
    return [sum(text[0]["content"].count(letter) for letter in "aeiou") / 10 for text in completions]


def unpacked(layer, remove_weight):
    """vLLM's CPU build drops a weight once it is packed, and cannot load it a second time: keep it."""
    layer.cpu_linear = torch.nn.functional.linear


def of_this_run(original, communicator):
    """vLLM names the ranks' shared memory the same in every run of the machine."""
    return f"{os.environ['MASTER_PORT']}-{original(communicator).strip('/')}"


def make_trainer(
    model: str, folder: Path, adapter: LoraConfig | None, dtype: str = "float32", quantization=None, **settings
) -> MathGRPOTrainer:
    """Return a trainer that samples from an engine in this process. one_copy.py uses it, too."""
    return MathGRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=MathGRPOConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            report_to="none",
            disable_tqdm=True,
            use_vllm=True,
            max_steps=2,
            num_generations=4,
            max_completion_length=6,
            model_init_kwargs={"dtype": dtype},
            vllm_mode="colocate",
            vllm_max_model_length=256,
            vllm_tensor_parallel_size=RANKS,
            **{"save_strategy": "no", **settings},
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 4]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        quantization_config=quantization,
        peft_config=adapter,
    )


def trained(model: str, folder: Path, adapter: LoraConfig | None, **settings) -> dict:
    settings |= {"gradient_checkpointing": False, "lr_scheduler_type": "constant"}
    trainer = make_trainer(model, folder, adapter, **settings)
    generation, policy, rollouts = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model), []
    generate, untrained = generation.generate, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def compared(*args, **kwargs):
        told.clear()
        answer = generate(*args, **kwargs)
        rows = [(list(prompt), list(tokens)) for prompt, tokens in zip(*answer[:2], strict=True)]
        ours, first = (torch.cat([logps(of, *row) for row in rows]) for of in (policy, untrained))
        of_vllm = torch.tensor([token[0] for row in answer[2] for token in row])
        rollouts.append(
            {
                "apart": (ours - of_vllm).abs().mean().item(),
                "moved": (ours - first).abs().mean().item(),
                "told": [*told],
                "sent": generation.sampler.store.sent if adapter else None,
            }
        )
        return answer

    generation.generate = compared
    trainer.train()
    if adapter:
        # As after a longer training: a wake-up then needs no canary.
        generation.canary.effect = 1.0
    generation.sync_weights()
    for _ in range(2):  # two turns of a conversation
        generation.generate(token_ids(trainer.processing_class, PROMPTS), None, 1)
    rows = [{"id": str(i), "prompt": prompt, "answer": "7"} for i, prompt in enumerate(PROMPTS)]
    evaluated = evaluate(trainer, rows)
    plain = evaluate(policy, rows, tokenizer=trainer.processing_class, max_new_tokens=6)
    return {
        "rollouts": rollouts,
        "agreed": getattr(getattr(generation, "canary", None), "agreed", None),
        "answers": [[row["completion"] for row in results["rows"]] for results in (evaluated, plain)],
        "backend": evaluated["backend"],
    }


def main(model: str, folder: str) -> None:
    vllm_generation.LLM = engine
    torch.distributed.barrier = partial(recorded, torch.distributed.barrier)
    shared = cpu_communicator._CPUSHMDistributed
    shared.make_group_name = partial(of_this_run, shared.make_group_name)
    # The engine pauses and resumes as on a GPU. Its CPU worker frees no memory, so vLLM would refuse the setting.
    type(current_platform).is_sleep_mode_available = lambda platform: True
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    record = {
        "adapter": trained(model, Path(folder) / "adapter", lora, learning_rate=2e-3, vllm_enable_sleep_mode=True)
    }
    if RANKS == 1:
        linear_layers.dispatch_cpu_unquantized_gemm = unpacked
        record["all_weights"] = trained(model, Path(folder) / "all_weights", None, learning_rate=1e-4)
    Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
