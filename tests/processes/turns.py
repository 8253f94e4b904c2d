"""One training with a tool against a vLLM server, in each of several processes: turns.py MODEL FOLDER URL.

Writes FOLDER/RANK.json: what each completion was asked and what it says, how many prompts each turn sent, the weights.
"""

import json
import sys
from pathlib import Path

from peft import LoraConfig
from small_tools import python
from small_trainers import KINDS, make
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

    trainer = make(
        **KINDS["ours"],
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(model, padding_side="left"),
        folder=Path(folder) / "run",
        rewards=rewards,
        rows=QUESTIONS,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        tools=[python],
        per_device_train_batch_size=4,
        max_steps=2,
        num_generations=2,
        max_completion_length=150,
        logging_steps=1,
        use_vllm=True,
        vllm_importance_sampling_correction=False,
        vllm_mode="server",
        vllm_server_base_url=url,
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
