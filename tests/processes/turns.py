"""One training with a tool against a vLLM server, in each of several processes: turns.py MODEL FOLDER URL.

Writes FOLDER/RANK.json: what each completion was asked and what it says, how many prompts each turn sent, the weights.
The tool says a text again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from served import SETTINGS
from train import digest
from transformers import AutoTokenizer

from grpo_math import MathGRPOConfig, MathGRPOTrainer

# Question n wants n % 4 calls, one after the other: a rank that has 0 and 1 waits for one that has 2 and 3.
QUESTIONS = [{"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(8)]


def python(code: str) -> str:
    """
    Say it again.

    Args:
        code: What to say.
    """
    return code


def main(model: str, folder: str, url: str) -> None:
    heard = []

    def rewards(prompts, completions, **columns):
        asked = [prompt[-1]["content"] for prompt in prompts]
        output = [[message["content"] for message in completion] for completion in completions]
        heard.extend(zip(asked, output, strict=True))
        return [float(len(prompt) % 3 + number) for number, prompt in enumerate(asked)]

    trainer = MathGRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=MathGRPOConfig(
            str(Path(folder) / "run"),
            **SETTINGS,
            max_steps=2,
            num_generations=2,
            max_completion_length=150,
            logging_steps=1,
            vllm_importance_sampling_correction=False,
            vllm_mode="server",
            vllm_server_base_url=url,
        ),
        train_dataset=Dataset.from_list(QUESTIONS),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        tools=[python],
    )
    turns, generate = [], trainer.vllm_generation.generate

    def counted(prompts, *args, **kwargs):
        turns.append(len(prompts))
        return generate(prompts, *args, **kwargs)

    trainer.vllm_generation.generate = counted
    trainer.train()
    told = [line for line in trainer.state.log_history if "tools/call_frequency" in line]
    record = {"heard": heard, "turns": turns, "weights": digest(trainer.model), "told": told}
    Path(folder, f"{trainer.accelerator.process_index}.json").write_text(json.dumps(record))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
