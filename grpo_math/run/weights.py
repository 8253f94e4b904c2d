"""Where the trained weights of a run are: adapter/ or model/, or where ``trainer.save_model()`` of a script puts them.

Does not load them.
"""

from pathlib import Path

MARKS = {"adapter": "adapter_config.json", "model": "config.json"}  # of a folder with such weights


def weights_in(run_dir: Path) -> tuple[str, Path] | None:
    """("adapter" or "model", its folder); None where there are none, as before a run has ended.

    >>> weights_in(Path("nowhere")) is None
    True
    """
    places = [(kind, run_dir / kind) for kind in MARKS] + [(kind, run_dir) for kind in MARKS]
    whole = ((kind, place) for kind, place in places if (place / MARKS[kind]).exists())
    return next(((kind, place) for kind, place in whole if any(place.glob("*.safetensors"))), None)
