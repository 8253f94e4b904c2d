"""One training with LoRA against a vLLM server, in each of several processes, for tests/generation/test_sync.py.

train_with_vllm.py MODEL FOLDER URL SERVER_PID -> FOLDER/record.json: what kind of launch it was, whether the base is as
it was, the history, and after each sync the log-probs of the server's greedy answer, the server's and the trainer's.
Before the third rollout the process group SERVER_PID is killed, and the test starts a new server.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from small_vllm import trainer_of
from transformers import AutoTokenizer

from grpo_math.generation.adapters import logps

PROMPTS = ["What is 3 + 4?", "Name a colour.", "What is 12 times 3?", "Say hello.", "What is 9 - 5?", "Count to five."]


def main(model: str, folder: str, url: str, server_pid: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    trainer = trainer_of(
        url,
        model,
        tokenizer,
        Path(folder) / "run",
        rows=[{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS * 4],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        vllm_server_timeout=700.0,  # a slow machine needs minutes to start a server
        staleness=1,
        model_init_kwargs={"dtype": "float32"},
    )
    generation, accelerator = trainer.vllm_generation, trainer.accelerator
    probe = list(tokenizer("The sea is")["input_ids"])
    policy, answers, sync = accelerator.unwrap_model(trainer.model), [], generation.sync_weights

    def sync_and_ask() -> None:
        sync()
        if not accelerator.is_main_process:
            return
        sampler = generation.sampler
        (answer,) = sampler.server.generate(
            probe, model=sampler.store.current.name, temperature=0.0, max_tokens=12, extra={"ignore_eos": True}
        )
        answers.append({"vllm": answer.logps, "trainer": logps(policy, probe, answer.tokens).tolist()})
        if trainer.state.global_step == 2:
            os.killpg(int(server_pid), signal.SIGKILL)

    generation.sync_weights = sync_and_ask
    before = {name: p.detach().clone() for name, p in policy.named_parameters() if "lora_" not in name}
    trainer.train()
    if accelerator.is_main_process:
        record = {
            "distributed_type": str(accelerator.distributed_type),
            "processes": accelerator.num_processes,
            "base_is_as_it_was": all(torch.equal(p, before.get(name, p)) for name, p in policy.named_parameters()),
            "answers": answers,
            "canaries": generation.canary.agreed,
            "folders": len(list(generation.sampler.store.root.iterdir())),
            "history": [line for line in trainer.state.log_history if "loss" in line],
        }
        (Path(folder) / "record.json").write_text(json.dumps(record))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
