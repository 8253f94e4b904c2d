"""Where the trained weights of a run are: adapter/ or model/, or where ``trainer.save_model()`` of a script puts them;
and whether each process has all of them while it runs.

Does not load them.
"""

from pathlib import Path
from typing import Any

MARKS = {"adapter": "adapter_config.json", "model": "config.json"}  # of a folder with such weights


def weights_in(run_dir: Path) -> tuple[str, Path] | None:
    """("adapter" or "model", its folder); None where there are none, as before a run has ended.

    >>> weights_in(Path("nowhere")) is None
    True
    """
    places = [(kind, run_dir / kind) for kind in MARKS] + [(kind, run_dir) for kind in MARKS]
    whole = ((kind, place) for kind, place in places if (place / MARKS[kind]).exists())
    return next(((kind, place) for kind, place in whole if any(place.glob("*.safetensors"))), None)


def split_by(accelerator: Any) -> str:
    """What leaves each process with a part of every weight: FSDP, ZeRO-3, or "" where each has all of them."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP"
    zero = getattr(accelerator.state, "deepspeed_plugin", None)
    return "ZeRO-3" if zero is not None and zero.zero_stage == 3 else ""
