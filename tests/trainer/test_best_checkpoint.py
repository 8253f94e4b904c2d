"""What transformers remembers of a checkpoint is what TRL's own trainer would: the best one, rotation, resuming."""

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from small_trainers import KINDS, PROMPTS, Evaluated, relative, weights

from grpo_math.run import checkpoints

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 4,
    "num_generations_eval": 2,
    "metric_for_best_model": "eval_reward",
    "greater_is_better": True,
}
SAVED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "logging_steps": 1}


def remembered(trainer, folder: Path) -> tuple[dict, str]:
    """What is known of checkpoints, with names in the place of paths, and the weights at the end."""
    states = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/trainer_state.json")}
    names = ("best_model_checkpoint", "best_global_step", "best_metric", "global_step")
    kept = {name: [str(held[key]).replace(str(folder), "RUN") for key in names] for name, held in states.items()}
    return kept, str(trainer.state.best_model_checkpoint).replace(str(folder), "RUN")


LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)}
RUNS = {
    "the best is loaded": ({**BEST, "load_best_model_at_end": True, "save_total_limit": 1}, [1.0, 3.0, 2.0, 0.0]),
    "an adapter": ({**BEST, "load_best_model_at_end": True, "save_total_limit": 2, **LORA}, [3.0, 1.0, 2.0, 0.0]),
    "only the best are saved": ({**BEST, "save_strategy": "best", "save_total_limit": 1}, [1.0, 3.0, 2.0, 4.0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_the_best_checkpoint_is_the_one_that_trl_would_keep_and_load(run, ours, tmp_path):
    settings, rewards = RUNS[run]
    ended = {}
    for kind, of_kind in KINDS.items():
        trainer = ours(
            folder=kind,
            eval_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[:2]]),
            **{**SAVED, **settings, **of_kind},
        )
        trainer.add_callback(Evaluated(rewards))
        trainer.train()
        ended[kind] = remembered(trainer, tmp_path / kind), weights(trainer.model)
    assert ended["ours"][0] == ended["trl"][0]
    assert ended["ours"][0][1].startswith("RUN/checkpoint-")
    assert relative(ended["ours"][1], ended["trl"][1]) < 1e-5


def test_a_second_run_in_the_folder_keeps_its_own_checkpoints(ours, tmp_path):
    for steps in (2, 1):
        ours(save_total_limit=1, **{**SAVED, "max_steps": steps, "save_steps": steps}).train()
        assert [step for step, _ in checkpoints.checkpoints(tmp_path)] == [steps]
        # transformers compares times only if they are over a second apart.
        os.utime(tmp_path / f"checkpoint-{steps}", (0, 0))
