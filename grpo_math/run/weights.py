"""The trained weights of a run: their folder (adapter/, model/, or the run's own for ``trainer.save_model()``), and
whether each process has all of them during the run."""

from pathlib import Path
from typing import Any

from grpo_math.run.checkpoints import unfinished
from grpo_math.system.machine import launched_with

# The file that marks a folder with such weights.
MARKS = {"adapter": "adapter_config.json", "model": "config.json"}


def weights_in(run_dir: Path) -> tuple[str, Path] | None:
    """Return "adapter" or "model", and the folder; None if there are no weights, as before a run has ended.

    >>> weights_in(Path("nowhere")) is None
    True
    """
    folders = [(kind, run_dir / kind) for kind in MARKS] + [(kind, run_dir) for kind in MARKS]
    finished = (
        (kind, folder) for kind, folder in folders if (folder / MARKS[kind]).exists() and not unfinished(folder)
    )
    return next(((kind, folder) for kind, folder in finished if any(folder.glob("*.safetensors"))), None)


def split_by(accelerator: Any) -> str:
    """Return the method that splits each weight over the processes, FSDP or ZeRO-3; "" if each process has all."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP"
    zero = getattr(accelerator.state, "deepspeed_plugin", None)
    return "ZeRO-3" if zero is not None and zero.zero_stage == 3 else ""


def checkpoint_kinds(config: Any) -> set[str]:
    """Return the libraries with their own format of the optimizer's state and a float32 copy of bfloat16 weights:
    DEEPSPEED, FSDP, or none."""
    fsdp = config.fsdp or launched_with("FSDP")
    return {"DEEPSPEED"} if config.deepspeed_plugin is not None else {"FSDP"} if fsdp else set()
