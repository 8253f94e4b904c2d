"""GPUs by name: memory and number formats, from cards.yaml."""

import re
from pathlib import Path
from typing import NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.system.yaml_files import read_yaml

TABLES = read_yaml(Path(__file__).with_name("cards.yaml"))


class Card(NamedTuple):
    """GB of memory as nvidia-smi reports it, and the compute capability."""

    gb: float
    capability: float


MEMORY = "give --gpu_memory GB instead"
# Pattern of names that are not in cards.yaml -> the reason, and what to do.
UNLISTED = {
    r"laptop|mobile|max-?q": (
        "is a laptop's GPU, which is slower than the card of that name and often has less memory",
        MEMORY,
    ),
    r"radeon|amd|instinct|\bmi\d|\brx\W?\d": (
        "is an AMD GPU: the plan counts bytes alike, but training was never tried with torch's build for ROCm",
        MEMORY,
    ),
    r"apple|\bm[1-9]\b": (
        "is an Apple GPU, which was never tried: train on the CPU there",
        "plan with --use_cpu true --cpu_memory GB",
    ),
}


def find_card(text: str) -> Card:
    """Return a card by its name.

    >>> find_card("t4"), find_card("GeForce RTX 4060 Ti 16GB").gb
    (Card(gb=15, capability=7.5), 16)
    >>> find_card("5060 Ti")
    Traceback (most recent call last):
    grpo_math.errors.ConfigError: card='5060 Ti' is sold with 8 and with 16 GB: name 5060ti-8 or 5060ti-16
    """
    cards = TABLES["cards"]
    for part, (reason, remedy) in UNLISTED.items():
        if re.search(part, text, re.IGNORECASE):
            raise ConfigError("card", text, reason, remedy)
    name = _short_name(text)
    for known, numbers in cards.items():
        if name == _short_name(known):
            return Card(**numbers)
    # Cards with several memory sizes, for example a100-40 and a100-80.
    sizes = {int(known.split("-")[1]): known for known in cards if re.fullmatch(rf"{re.escape(name)}-\d+", known)}
    if sizes:
        reason = f"is sold with {' and with '.join(map(str, sorted(sizes)))} GB"
        raise ConfigError("card", text, reason, f"name {' or '.join(sizes[gb] for gb in sorted(sizes))}")
    raise ConfigError("card", text, "is not in the list of cards", f"{MEMORY}; --card list prints the cards")


def _short_name(name: str) -> str:
    short = re.sub(r"nvidia|geforce|tesla|ada|generation|pcie|sxm\d?|[^a-z0-9]", "", name.lower())
    return short.removeprefix("rtx").removesuffix("gb")
