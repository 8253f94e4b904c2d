"""The least time of a training step on a card: the floating-point operations of the updates, and the bytes that
decoding reads, at the rates of the card's data sheet.

No card reaches these rates, so this is a lower bound. `grpo-math train RECIPE --measure` measures the time.
"""

from typing import Any

from grpo_math.planner import memory
from grpo_math.planner.cards import Card
from grpo_math.planner.memory_plan import MemoryPlan


def least_time(plan: MemoryPlan, card: Card) -> dict[str, float | None]:
    """Return {"step_seconds": of a training step, "hours": of ``max_steps`` training steps, None without}.

    All completions have full length, and each is trained on. Not counted: attention, recomputation, evaluations,
    grading, and waiting.

    A model of 10^9 parameters on a card of 10^14 FLOP/s and 10^12 bytes a second. A step has 32 completions of 100
    tokens for 4 prompts of 50 tokens. An update takes 4 x 10^9 FLOPs for each of 3,400 tokens, and 6 x 10^9 without an
    adapter. Generation reads 2 x 10^9 bytes for each of 100 tokens:

    >>> from types import SimpleNamespace
    >>> from grpo_math.planner.devices import Layout
    >>> from grpo_math.planner.memory import Precision
    >>> from grpo_math.settings.batch import Batch
    >>> shape = SimpleNamespace(total=10**9, active=10**9, matrices=10**9, vocab=0, hidden=0, tied=True)
    >>> from grpo_math.settings.run_settings import RunSettings
    >>> settings = RunSettings({"max_completion_length": 100, "max_steps": 3600, "use_peft": True})
    >>> plan = SimpleNamespace(
    ...     machine=SimpleNamespace(shape=shape, prompt=50, teacher=None), settings=settings,
    ...     batch=Batch(8, 1, 8, 4, rollout=32), layout=Layout("transformers", 1, 0, 1, ""),
    ...     precise=Precision(2, 4, True))
    >>> card = Card(gb=24, tflops=100, bandwidth=1000, float32=10, capability=8.0)
    >>> least_time(plan, card)  # 0.136 + 0.2 seconds
    {'step_seconds': 0.34, 'hours': 0.34}
    >>> plan.settings = settings.changed(use_peft=False, max_steps=-1)
    >>> least_time(plan, card)  # 0.204 + 0.2 seconds
    {'step_seconds': 0.4, 'hours': None}

    A server of two GPUs generates while an earlier rollout may be trained on. The longer of the two counts:

    >>> plan.layout = Layout("server", 1, 2, 2, "")
    >>> least_time(plan, card)["step_seconds"]
    0.2
    """
    machine, settings, batch, layout = plan.machine, plan.settings, plan.batch, plan.layout
    shape, length = machine.shape, settings.max_completion_length
    head = shape.vocab * shape.hidden
    looked_up = 0 if shape.tied else head  # an untied embedding is not multiplied
    layers = shape.active - head - looked_up
    in_16_bit = plan.precise.autocast or plan.precise.stream == 2 or settings.tf32
    rate = 1e12 * (card.tflops if in_16_bit else card.float32)
    # A packed update computes each prompt once for its group, and the LM head for the completions alone.
    tokens = batch.total * length
    products = tokens * head + (tokens + batch.total / batch.generations * machine.prompt) * layers
    update = products * (4 if settings.use_peft else 6)
    if settings.beta > 0 and not machine.teacher:
        update += products * 2 / settings.num_iterations
    # Generating one token in every row reads the weights once, and multiplies them with each row. The cards of a server
    # elsewhere are not known.
    width = plan.precise.stream if layout.generation == "transformers" else 2
    read = memory.weights(shape, settings, width) - width * (looked_up + shape.total - shape.active)
    gpus, elsewhere = layout.server or batch.processes, layout.generation == "server" and not layout.server
    sampled = 0 if elsewhere else tokens / settings.num_iterations
    reading = sampled / batch.rollout * read / (card.bandwidth * 1e9 * layout.tensor_parallel)
    multiplying = sampled * 2 * (layers + head) / (gpus * 1e12 * card.tflops)
    phases = update / (rate * batch.processes), max(reading, multiplying)
    step = max(phases) if layout.generation == "server" else sum(phases)
    steps = settings.max_steps
    return {"step_seconds": _rounded(step), "hours": _rounded(step * steps / 3600) if steps > 0 else None}


def _rounded(number: float) -> float:
    return float(f"{number:.2g}")


def line(least: dict[str, Any]) -> str:
    """Return the line of a plan.

    >>> line({"step_seconds": 12.0, "hours": 3.1})
    'time: at least 3.1 hours, 12 s a step, if all completions have full length and are trained on (no card is that \
fast); train RECIPE --measure measures yours'
    """
    hours = f"{least['hours']:g} hours, " if least["hours"] else ""
    bound = (
        f"at least {hours}{least['step_seconds']:g} s a step, if all completions have full length and are trained on"
    )
    return f"time: {bound} (no card is that fast); train RECIPE --measure measures yours"
