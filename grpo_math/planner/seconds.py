"""Rough seconds of a training step on a card, as a range: arithmetic on parameters, tokens and the card's data.

Does not count grading, the network, or how well a kernel fits a shape. Nothing here has been measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_math.errors import ConfigError

if TYPE_CHECKING:
    from grpo_math.planner.plan import Counted


class Card(NamedTuple):
    """Memory in GB, dense 16-bit TFLOP/s, and GB/s of memory bandwidth, from the manufacturer."""

    gb: float
    tflops: float
    bandwidth: float


CARDS = {
    "h200": Card(141, 989, 4800),
    "h100": Card(80, 989, 3350),
    "a100-80": Card(80, 312, 2039),
    "a100-40": Card(40, 312, 1555),
    "l40s": Card(48, 362, 864),
    "a10": Card(24, 125, 600),
    "l4": Card(24, 121, 300),
    "t4": Card(16, 65, 320),
    "5090": Card(32, 210, 1792),
    "4090": Card(24, 165, 1008),
    "3090": Card(24, 71, 936),
    "4070": Card(12, 58, 504),
    "4060": Card(8, 30, 272),
}
# Shares of these rates that a run may reach, low and high.
COMPUTE = (0.2, 0.5)
DECODING = {"transformers": (0.05, 0.3), "colocate": (0.3, 0.7), "server": (0.3, 0.7)}


def card_of(text: str) -> Card:
    """Return a card by its name, or from its three numbers.

    >>> card_of("l4"), card_of("16,65,320") == CARDS["t4"]
    (Card(gb=24, tflops=121, bandwidth=300), True)
    """
    if text.lower() in CARDS:
        return CARDS[text.lower()]
    try:
        card = Card(*map(float, text.split(",")))
    except (TypeError, ValueError):
        card = Card(0, 0, 0)
    if min(card) <= 0:
        remedy = f"name one of {', '.join(CARDS)}, or give GB,TFLOP/s,GB/s as in 80,989,3350"
        raise ConfigError("card", text, "is not a card", remedy)
    return card


def per_step(counted: Counted, card: Card) -> dict[str, Any]:
    """Return {"ranges": {"generation": [low, high], "update": ..., "step": ...}, "assumed": words}.

    All completions have full length. The update takes 2 FLOPs per parameter and token forward, 4 backward, 2 for
    recomputation and 2 for a reference. Generating one token in every row reads the weights and the rows' cache, or
    takes 2 FLOPs per parameter and row.
    """
    s, run, shape = counted.settings, counted.run, counted.machine.shape
    length, rows = s["max_completion_length"], counted.batch.rollout
    # A packed update computes each prompt once for its group.
    tokens = rows * length + rows / s["num_generations"] * run.prompt
    flops = tokens * shape.active * (6 + 2 * s["gradient_checkpointing"] + 2 * (s["beta"] > 0))
    update = [flops / (counted.batch.processes * card.tflops * 1e12 * share) for share in reversed(COMPUTE)]
    gpus = counted.layout.tensor_parallel  # of an engine
    batch = rows / ((counted.layout.server or counted.batch.processes) // gpus)
    read = 2 * shape.total + batch * (run.prompt + length / 2) * shape.kv_bytes_per_token(2)
    # A small batch waits for memory, and a large one for arithmetic: the slower of the two counts.
    reading, computing = read / (gpus * card.bandwidth * 1e9), 2 * shape.active * batch / (gpus * card.tflops * 1e12)
    shares = DECODING[run.generation]
    generation = [length * max(reading / share, computing / COMPUTE[1]) for share in reversed(shares)]
    ranges = {"generation": generation, "update": update}
    ranges["step"] = [sum(ends) for ends in zip(generation, update, strict=True)]
    words = (
        f"not measured; {card.gb:g} GB card with {card.tflops:g} TFLOP/s and {card.bandwidth:g} GB/s, of which "
        f"{COMPUTE[0]:.0%} to {COMPUTE[1]:.0%} and {shares[0]:.0%} to {shares[1]:.0%} are reached; "
        f"{rows} completions of {length} tokens"
    )
    rounded = {name: [float(f"{x:.2g}") for x in ends] for name, ends in ranges.items()}
    return {"ranges": rounded, "assumed": words}
