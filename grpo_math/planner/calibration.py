"""The measurements of this machine's GPU that `grpo-math plan --calibrate` has made, for later plans.

One file for each card and versions, in the cache folder. calibrate.py makes the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.generation.embedded import cache_dir
from grpo_math.planner.cards import Card
from grpo_math.run.files import write_json
from grpo_math.system.gpus import visible_gpus
from grpo_math.system.machine import versions
from grpo_math.system.reading import read_object

FOLDER = "calibrated"
FORMAT = 1  # version of the file; files of other versions are ignored
SPREAD = 1.18  # a time may be this factor longer or shorter than measured: the ends of the range differ by 1.39
# Fields that change the shares: a calibration applies to recipes with the same values.
SAME = ("model_name_or_path", "dtype", "use_peft", "load_in_4bit", "gradient_checkpointing", "activation_offloading")


class Calibration(NamedTuple):
    """Rates of a GPU, and two steps of a recipe on the GPU.

    ``tflops``, ``float32``: TFLOP/s of large matrix products in 16 and in 32 bit; ``bandwidth``: GB/s of copies;
    ``launch_us``: microseconds to launch a kernel; ``context``: bytes outside torch's allocator. The others are None if
    the recipe could not be run: ``recipe``, its fields in `SAME`; ``shares`` of the rates, by phase; ``fragmentation``,
    the allocator's overhead as a share of the live bytes; ``rows``, plan and measurement of each phase.
    """

    date: str
    torch: str
    tflops: float
    float32: float
    bandwidth: float
    launch_us: float
    context: int
    recipe: dict[str, Any] | None = None
    fragmentation: float | None = None
    shares: dict[str, float] | None = None
    rows: list[list[str]] | None = None

    def shares_for(self, settings: Mapping[str, Any]) -> dict[str, float]:
        """Return the ``shares``, if they were measured with this recipe."""
        same = self.recipe == {name: settings[name] for name in SAME}
        return (self.shares or {}) if same else {}

    def card(self, gb: float) -> Card:
        return Card(gb, self.tflops, self.bandwidth, self.float32)

    def line(self) -> str:
        return f"measured on this card on {self.date} with torch {self.torch}"


def around(share: float) -> tuple[float, float]:
    """Return the range of a measured share.

    >>> low, high = around(0.4)
    >>> high / low < 1.5
    True
    """
    return share / SPREAD, share * SPREAD


def path() -> Path:
    """Return the file for the first GPU that this process may use and for the installed versions."""
    installed = versions()
    words = [
        *(gpu.name for gpu in visible_gpus()[:1]),
        *(f"{name}-{installed.get(name)}" for name in ("torch", "transformers", "grpo_math")),
    ]
    return cache_dir() / FOLDER / f"{FORMAT}-{'-'.join(words).replace(' ', '_').replace('/', '_')}.json"


def stored() -> Calibration | None:
    """Return the calibration of this machine, or None."""
    # nvidia-smi takes long enough to notice, and most machines were never calibrated.
    known = read_object(path()) if (cache_dir() / FOLDER).exists() else None
    return Calibration(**known) if known else None


def store(calibration: Calibration) -> None:
    write_json(path(), calibration._asdict())
