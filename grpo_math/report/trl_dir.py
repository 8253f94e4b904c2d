"""The output folder of another trainer, such as TRL's own: the log that transformers keeps in trainer_state.json, next
to the weights or in each checkpoint.

Does not open training_args.bin, which is a pickle, and does not guess settings.
"""

from pathlib import Path
from typing import Any

from grpo_math.reading import read_json, read_object, reading
from grpo_math.run import metrics

STATE = "trainer_state.json"
TRL_ACCURACY = metrics.reward_key("accuracy_reward")  # of TRL's reward of that name: 1 correct, 0 wrong
KNOWN = {"r": "lora_r", "lora_alpha": "lora_alpha", "base_model_name_or_path": "model_name_or_path"}


def state_file(folder: Path) -> Path | None:
    """Return the newest trainer_state.json: the one in the folder, or in its last checkpoint."""
    checkpoints = sorted(folder.glob(f"checkpoint-*/{STATE}"), key=lambda path: int(path.parent.name.split("-")[1]))
    final = folder / STATE
    return final if final.is_file() else checkpoints[-1] if checkpoints else None


def log_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, with the mean of TRL's own accuracy reward as the accuracy."""
    with reading(path):
        lines = read_json(path)["log_history"]
        return [{metrics.ACCURACY: line.get(TRL_ACCURACY), **line} for line in lines]


def settings_of(path: Path) -> dict[str, Any]:
    """Return the settings in the trainer's state and the adapter's configuration. Other settings are unknown."""
    state, adapter = read_json(path), read_object(path.parent / "adapter_config.json") or {}
    settings = {name: state[name] for name in ("logging_steps", "save_steps", "max_steps") if name in state}
    return settings | {field: adapter[name] for name, field in KNOWN.items() if name in adapter}
