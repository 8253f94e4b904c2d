"""The output folder of a trainer that wrote none of our files, TRL's own say: its log and what else it tells.

transformers keeps the log of a training in trainer_state.json, beside the weights or in each checkpoint.

Does not open training_args.bin, which is a pickle, and guesses no setting.
"""

from pathlib import Path
from typing import Any

from grpo_math.reading import Unreadable, from_yaml, read_json, read_object, read_text
from grpo_math.run import metrics
from grpo_math.run.history import number

STATE = "trainer_state.json"
TRL_ACCURACY = metrics.reward_key("accuracy_reward")  # of TRL's reward of that name: 1 right, 0 wrong
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def state_file(folder: Path) -> Path | None:
    """The newest trainer_state.json: the folder's own, or that of its last checkpoint; None where there is none."""
    return next((folder / STATE for folder in (folder, *_checkpoints(folder)) if (folder / STATE).is_file()), None)


def log_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a trainer_state.json's log, with the mean of TRL's own accuracy reward as the accuracy.

    Raises `ValueError` where the file is none of that kind.
    """
    state = read_json(path)
    lines = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise ValueError("no log_history")
    graded = [{metrics.ACCURACY: line[TRL_ACCURACY]} if TRL_ACCURACY in line else {} for line in lines]
    return [{**accuracy, **line} for accuracy, line in zip(graded, lines, strict=True)]


def settings_of(folder: Path, history: list[dict[str, float]]) -> dict[str, Any]:
    """The settings that can be known: of the trainer's state, the adapter's configuration, and the log."""
    settings: dict[str, Any] = {}
    state = read_object(state_file(folder) or "") or {}
    settings |= {
        name: value for name in ("logging_steps", "save_steps", "max_steps") if (value := number(state.get(name)))
    }
    cut = [line[metrics.LENGTH_MAX] for line in history if line.get(metrics.TRUNCATED) and metrics.LENGTH_MAX in line]
    if cut:  # a completion that was cut is as long as the limit
        settings["max_completion_length"] = int(max(cut))
    rewards = {name.split("/")[1] for line in history for name in line if name.startswith(metrics.REWARD_PREFIX)}
    if rewards:
        settings["rewards"] = sorted(rewards)
    if isinstance(name := _card(folder / "README.md").get("base_model"), str):  # TRL writes one
        settings["model_name_or_path"] = name
    for place in (folder, *_checkpoints(folder)):
        if adapter := read_object(place / "adapter_config.json"):
            settings |= {"use_peft": True, "model_name_or_path": adapter.get("base_model_name_or_path")}
            return settings | {ours: adapter[name] for name, ours in LORA.items() if name in adapter}
    return settings


def _card(path: Path) -> dict[str, Any]:
    """The metadata at the head of a model card."""
    try:
        found = from_yaml(read_text(path).split("---")[1])
    except (Unreadable, IndexError):
        return {}
    return found if isinstance(found, dict) else {}


def _checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    numbered = [(number(path.name.rpartition("-")[2]), path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    return [path for _, path in sorted(((n, path) for n, path in numbered if n is not None), reverse=True)]
