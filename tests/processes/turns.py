"""One training with a tool against a vLLM server, in each of several processes: turns.py MODEL FOLDER URL.

Writes FOLDER/RANK.json: what each completion was asked and what it says, how many prompts each turn sent, the weights.
"""

import json
import sys
from pathlib import Path

from small_tools import python
from small_vllm import trainer_of
from train import digest
from transformers import AutoTokenizer

# Question n wants n % 4 calls, one after the other: a rank that has 0 and 1 waits for one that has 2 and 3.
QUESTIONS = [{"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(8)]


def main(model: str, folder: str, url: str) -> None:
    heard = []

    def rewards(prompts, completions, **columns):
        asked = [prompt[-1]["content"] for prompt in prompts]
        output = [[message["content"] for message in completion] for completion in completions]
        heard.extend(zip(asked, output, strict=True))
        return [float(len(prompt) % 3 + number) for number, prompt in enumerate(asked)]

    trainer = trainer_of(
        url,
        model,
        AutoTokenizer.from_pretrained(model, padding_side="left"),
        Path(folder) / "run",
        rewards=rewards,
        rows=QUESTIONS,
        tools=[python],
        max_steps=2,
        max_completion_length=150,
        vllm_importance_sampling_correction=False,
        vllm_server_timeout=60.0,
    )
    turns, generate = [], trainer.vllm_generation.generate

    def counted(prompts, *args, **kwargs):
        turns.append(len(prompts))
        return generate(prompts, *args, **kwargs)

    trainer.vllm_generation.generate = counted
    trainer.train()
    record = {
        "heard": heard,
        "turns": turns,
        "weights": digest(trainer.model),
        "told": [line for line in trainer.state.log_history if "tools/call_frequency" in line],
    }
    Path(folder, f"{trainer.accelerator.process_index}.json").write_text(json.dumps(record))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
