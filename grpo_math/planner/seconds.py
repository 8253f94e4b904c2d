"""Rough seconds of an optimizer step, and hours of a run, as ranges: arithmetic on parameters, tokens and a card.

Does not count grading, the network, or how well a kernel fits a shape. The shares in cards.yaml have never been
measured. On a GPU that was calibrated with the recipe, the measured shares replace them.
"""

from typing import Any

from grpo_math.planner.calibration import around
from grpo_math.planner.cards import TABLES, Card
from grpo_math.planner.devices import Layout
from grpo_math.planner.memory import Precision
from grpo_math.planner.settings import Settings
from grpo_math.planner.work import Machine
from grpo_math.problems.from_recipe import EVAL_N, HELDOUT_N
from grpo_math.settings.batch import Batch
from grpo_math.settings.vllm import teacher_url

Range = tuple[float, float]  # of the shares of a card's rates that a run may reach
COMPUTE: Range = tuple(TABLES["compute"])
DECODING: dict[str, Range] = {name: tuple(shares) for name, shares in TABLES["decoding"].items()}


def per_step(
    machine: Machine, settings: Settings, batch: Batch, layout: Layout, card: Card, precise: Precision
) -> dict[str, Any]:
    """Return {"ranges": {"generation": [low, high], "update": ..., "step": ...}, "run": `run_time`, "assumed": words}.

    The ranges are seconds of an optimizer step.

    All completions have full length. The update takes 2 FLOPs per parameter and token forward, 4 backward, 2 for
    recomputation and 2 for a reference. Generating one token in every row reads the weights and the rows' cache, or
    takes 2 FLOPs per parameter and row.

    A model of 10^9 parameters with 10^5 elements in the KV cache of a token generates 32 completions of 100 tokens,
    for 4 prompts of 50 tokens. The update takes 8 x 10^9 FLOPs for each of 3,400 tokens. Generation reads
    2 x (10^9 + 32 x (50 + 100 / 2) x 10^5) bytes for each of 100 tokens. Without autocast, float32 weights are computed
    with in float32. vLLM computes in 16 bit:

    >>> from types import SimpleNamespace
    >>> shape = SimpleNamespace(total=10**9, active=10**9, cache=(0, 10**5))
    >>> machine = SimpleNamespace(shape=shape, prompt=50, teacher=None, calibration=None)
    >>> card = Card(gb=24, tflops=100, bandwidth=1000, float32=10)
    >>> settings = {"max_completion_length": 100, "gradient_checkpointing": True, "beta": 0.0, "num_iterations": 1}
    >>> settings |= {"max_steps": -1, "heldout_every": 0, "reference_model": None}
    >>> batch, layout = Batch(8, 1, 8, 4, rollout=32), Layout("transformers", 1, 0, 1, "")
    >>> half = Precision(2, 4, True)
    >>> per_step(machine, settings, batch, layout, card, half)["ranges"]
    {'generation': [0.88, 5.3], 'update': [0.54, 1.4], 'step': [1.4, 6.6]}

    With a rollout for two optimizer steps, more rows share a read of the weights. An update takes as long as before:

    >>> per_step(machine, settings, batch._replace(rollout=64), layout, card, half)["ranges"]
    {'generation': [0.55, 3.3], 'update': [0.54, 1.4], 'step': [1.1, 4.6]}
    >>> per_step(machine, settings, batch, layout, card, Precision(4, 4, False))["ranges"]
    {'generation': [1.8, 11.0], 'update': [5.4, 14.0], 'step': [7.2, 24.0]}

    Two engines of two GPUs share the rows. A reference takes 2 FLOPs more:

    >>> server = Layout("server", 1, 4, 2, "")
    >>> per_step(machine, {**settings, "beta": 0.1}, batch, server, card, half)["ranges"]
    {'generation': [0.17, 0.39], 'update': [0.68, 1.7], 'step': [0.85, 2.1]}
    """
    compute, decoding, measured = _shares(machine, settings, layout)
    each = _completion(machine, settings, batch, layout, card, precise, decoding)
    generation = [seconds * batch.total / settings["num_iterations"] for seconds in each]
    flops, speed = update_flops(machine, settings, batch, batch.total), rate(card, precise)
    update = [flops / (batch.processes * speed * share) for share in reversed(compute)]
    ranges = {
        "generation": generation,
        "update": update,
        "step": [a + b for a, b in zip(generation, update, strict=True)],
    }
    words = (
        f"{measured}; {card.gb:.4g} GB card with {speed / 1e12:.4g} TFLOP/s and {card.bandwidth:.4g} GB/s, of "
        f"which {compute[0]:.0%} to {compute[1]:.0%} and {decoding[0]:.0%} to {decoding[1]:.0%} are reached; "
        f"{batch.total} completions of {settings['max_completion_length']} tokens, {batch.rollout} generated at a time"
    )
    return {
        "ranges": {name: _rounded(ends) for name, ends in ranges.items()},
        "run": run_time(settings, ranges["step"], each),
        "assumed": words,
    }


def run_time(settings: Settings, step: list[float], completion: list[float]) -> dict[str, Any] | None:
    """Return the hours of the run, as a range, and what they count. None without ``max_steps``.

    ``step`` and ``completion``: the seconds of an optimizer step, and of a completion in a batch. Evaluated are
    ``eval_n`` problems before and after training, and the held-out sets during it.

    >>> settings = {"max_steps": 1000, "eval_n": 64, "heldout_every": 100, "heldout": [{"data": "gsm8k", "n": 32}]}
    >>> run_time(settings, [7.2, 36.0], [0.225, 2.25])
    {'hours': [2.0, 10.0], 'counts': '1000 steps and 448 completions of evaluations'}
    """
    steps, every = settings["max_steps"], settings["heldout_every"]
    if steps <= 0:
        return None
    sets = settings["heldout"] or [{}]
    held_out = sum(one.get("n", HELDOUT_N) * one.get("samples", 1) for one in sets)
    evaluated = 2 * (EVAL_N if settings["eval_n"] is None else settings["eval_n"])
    evaluated += steps // every * held_out if every else 0
    hours = [(steps * one + evaluated * more) / 3600 for one, more in zip(step, completion, strict=True)]
    return {"hours": _rounded(hours), "counts": f"{steps} steps and {evaluated} completions of evaluations"}


def _rounded(numbers: list[float]) -> list[float]:
    return [float(f"{number:.2g}") for number in numbers]


def _shares(machine: Machine, settings: Settings, layout: Layout) -> tuple[Range, Range, str]:
    """Return the ranges of the shares that an update and generation reach, and what of them was measured."""
    compute, decoding, known = COMPUTE, DECODING[layout.generation], machine.calibration
    if not known:
        return compute, decoding, "never measured"
    if not (shares := known.shares_for(settings)):
        return compute, decoding, f"rates {known.line()}, the shares never"
    if layout.generation != "transformers":
        return around(shares["training"]), decoding, f"update {known.line()}, generation never measured"
    return around(shares["training"]), around(shares["generation"]), known.line()


def rate(card: Card, precise: Precision) -> float:
    """Return the FLOP/s of matrix products."""
    # Autocast multiplies in 16 bit, and reads the weights in their own format.
    return 1e12 * (card.tflops if precise.autocast or precise.stream == 2 else card.float32)


def update_flops(machine: Machine, settings: Settings, batch: Batch, completions: float) -> float:
    """Return the FLOPs of an update on this number of completions of full length."""
    # A packed update computes each prompt once for its group.
    tokens = completions * (settings["max_completion_length"] + machine.prompt / batch.generations)
    scores_reference = settings["beta"] > 0 and not teacher_url(settings)
    reference = (machine.teacher or machine.shape).active if scores_reference else 0
    return tokens * (machine.shape.active * (6 + 2 * settings["gradient_checkpointing"]) + 2 * reference)


def _completion(
    machine: Machine, settings: Settings, batch: Batch, layout: Layout, card: Card, precise: Precision, shares: Range
) -> list[float]:
    """Return the seconds of a completion, if a rollout is generated at a time.

    With many rows and fast memory, arithmetic takes longer than reading:

    >>> from types import SimpleNamespace
    >>> machine = SimpleNamespace(shape=SimpleNamespace(total=10**9, active=10**9, cache=(0, 10**5)), prompt=50)
    >>> card = Card(gb=24, tflops=100, bandwidth=10**6, float32=10)
    >>> batch, layout = Batch(8, 1, 800, 4, rollout=3200), Layout("transformers", 1, 0, 1, "")
    >>> _completion(machine, {"max_completion_length": 100}, batch, layout, card, Precision(2, 4, True), (0.05, 0.3))
    [0.004, 0.004]
    """
    by_transformers, gpus = layout.generation == "transformers", layout.tensor_parallel  # GPUs of an engine
    at_a_time = batch.rollout / ((layout.server or batch.processes) // gpus)
    # A small batch waits for memory, and a large one for arithmetic: the slower of the two counts.
    reading = reading_seconds(machine, settings, at_a_time, card, precise.stream if by_transformers else 2) / gpus
    computing = (
        2 * machine.shape.active * at_a_time / (gpus * (rate(card, precise) if by_transformers else card.tflops * 1e12))
    )
    ends = [max(reading / share, computing / COMPUTE[1]) for share in reversed(shares)]
    return [settings["max_completion_length"] * end / batch.rollout for end in ends]


def reading_seconds(machine: Machine, settings: Settings, rows: float, card: Card, width: int) -> float:
    """Return the seconds to read the weights, and the cache of ``rows`` rows at half of their length."""
    shape, tokens = machine.shape, machine.prompt + settings["max_completion_length"] / 2
    return width * (shape.total + rows * tokens * shape.cache[1]) / (card.bandwidth * 1e9)
