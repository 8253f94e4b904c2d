"""`train --measure`: a few optimizer steps on this machine, of which nothing is kept, and what they took.

All completions have full length and every group has a signal, so these are the longest steps of the run, and the hours
are an upper bound. The first rollout is a warm-up: kernels are compiled, and the largest micro-batch is computed before
the first update. The times are those of the second rollout, the peaks those of both.

On a CPU there is one rollout and no warm-up, and completions are cut to `SHORT` tokens, so that the answer comes in
minutes. The hours are scaled.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.utils import gather_object

from grpo_math import planner
from grpo_math.checks.check_machine import hardware
from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation.suite import evaluation_protocol
from grpo_math.planner.memory import OUTSIDE
from grpo_math.planner.memory_plan import MemoryPlan
from grpo_math.planner.remedies import faster
from grpo_math.report.progress import duration
from grpo_math.rewards.functions import no_reward
from grpo_math.rewards.inputs import Reward
from grpo_math.settings.batch import Batch, batch_from
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.machine import GB
from grpo_math.system.replaced import replaced
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.largest_batch import dry_run_enabled
from grpo_math.trainer.step_cost import GENERATION, SCORING, UPDATE, Cost, measure_steps

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer

SHORT = 32  # tokens of a completion on a CPU
PHASES = {"generation": (GENERATION,), "training": (SCORING, UPDATE)}  # of the plan

Steps = list[dict[str, Cost]]  # the phases of each optimizer step of a process


class WholeRun(NamedTuple):
    """The run that is measured.

    ``cycle``: optimizer steps on one rollout. ``cycles``: rollouts that are sampled and trained on. ``tokens``,
    ``length``: of a completion, as measured and in the run.
    """

    batch: Batch
    steps: int
    cycle: int
    cycles: int
    tokens: int
    length: int


def alternating(completions: list[Any], **columns: Any) -> list[float | None]:
    """Return rewards that differ within each group: a group without a signal is not trained on."""
    return [float(number % 2) for number, _ in enumerate(completions)]


def shorten(config: MathGRPOConfig, rewards: list[Reward], problems: int) -> tuple[WholeRun, list[Reward]]:
    """Make the settings those of a measurement. Return the whole run, and the rewards with one that gives a signal."""
    batch, length = batch_from(vars(config), config.world_size), int(config.max_completion_length or 0)
    kwargs: Any = config.generation_kwargs or {}
    epochs = config.num_train_epochs * problems * batch.generations / batch.total
    whole = WholeRun(
        batch,
        config.max_steps if config.max_steps > 0 else int(epochs),
        cycle=max(1, batch.rollout * config.num_iterations // batch.total),
        cycles=1 if config.use_cpu else 2,
        tokens=min(length, SHORT) if config.use_cpu else length,
        length=length,
    )
    least = "min_tokens" if config.use_vllm else "min_new_tokens"
    changed: dict[str, Any] = {
        "max_steps": whole.cycles * whole.cycle,
        "max_completion_length": whole.tokens,
        "generation_kwargs": {**kwargs, least: whole.tokens},
        "save_strategy": "no",
        "eval_strategy": "no",
        "eval_on_start": False,
        "load_best_model_at_end": False,
        "report_to": [],
        "logging_strategy": "no",  # the bar would show rewards of the measurement, not of the run
        "log_completions": False,
        "disable_tqdm": True,
    }
    # On-policy distillation has a signal without rewards. Other rewards take time, so they are computed.
    if rewards != [no_reward]:
        changed["reward_weights"] = [*[0.0] * len(rewards), 1.0]
        rewards = [*rewards, alternating]
    for name, value in changed.items():
        setattr(config, name, value)
    return whole, rewards


def measure_run(trainer: "TrlTrainer", setup: Setup, whole: WholeRun) -> dict[str, Any]:
    """Train, and return what `text` prints; {} if a signal has ended training. All ranks call this."""
    updates = trainer.grpo_math.updates
    on_gpu = trainer.accelerator.device.type == "cuda"
    # The largest micro-batch is not tried if a model is split over processes, or with reentrant checkpointing.
    with suppress(ConfigError), replaced(trainer.args, longest_first=on_gpu):
        updates.dry_run_due = dry_run_enabled(trainer.args, trainer.accelerator)
    ranks = gather_object([measure_steps(trainer)])
    if len(ranks[0]) < whole.cycles * whole.cycle:
        return {}
    # A model that has not been measured takes the planner seconds.
    return broadcast_from_main(lambda: {**times(ranks, setup, whole), **memory(ranks, setup, whole, on_gpu)})


def times(ranks: list[Steps], setup: Setup, whole: WholeRun) -> dict[str, Any]:
    """Return the seconds of the last rollout and of its updates, and the hours of the run, with its evaluations.

    The slowest process counts in each phase.
    """

    def seconds(*phases: str) -> float:
        last = [rank[-whole.cycle :] for rank in ranks]
        return max(sum(step[name].seconds for step in steps for name in phases if name in step) for steps in last)

    rollout, update = seconds(GENERATION, SCORING), seconds(UPDATE) / whole.cycle
    step = rollout / whole.cycle + update
    evaluated = evaluated_completions(setup, whole.steps)
    total = whole.steps * step + evaluated * seconds(GENERATION) / whole.batch.rollout
    return {
        "completions": whole.batch.rollout,
        "tokens": whole.tokens,
        "max_completion_length": whole.length,
        "seconds": {"rollout": rollout, "update": update, "step": step},
        "steps": whole.steps,
        "evaluated": evaluated,
        "hours": total / 3600 * whole.length / whole.tokens,
    }


def evaluated_completions(setup: Setup, steps: int) -> int:
    """Return the number of completions in the evaluations of a run."""
    whole, during, _ = setup.problems.evaluation
    interval = setup.settings.heldout_every
    sets = [(2, whole)] if whole else []
    sets += [(steps // interval if interval else 0, one) for one in during]
    protocols = [evaluation_protocol(one.data, None, one.samples, one.temperature) for _, one in sets]
    return sum(n * len(one.rows) * samples for (n, one), (_, samples, _) in zip(sets, protocols, strict=True))


def memory(ranks: list[Steps], setup: Setup, whole: WholeRun, on_gpu: bool) -> dict[str, Any]:
    """Return the peak of each phase next to the plan's, and the setting that would use the free memory.

    On GPUs the bytes are those that torch's allocator had reserved on the fullest one, on a CPU those of all processes.
    """
    peaks = {}
    for phase, names in PHASES.items():
        of_ranks = [
            max(cost.reserved if on_gpu else cost.peak for step in rank for name, cost in step.items() if name in names)
            for rank in ranks
        ]
        peaks[phase] = max(of_ranks) if on_gpu else sum(of_ranks)
    plan, whole_plan = (_planned(setup, length) for length in (whole.tokens, whole.length))
    outside = OUTSIDE if on_gpu else ()
    planned = {
        phase: sum(size for term, size in terms.items() if term not in outside)
        for phase, terms in (plan.phases if plan else {}).items()
    }
    answer: dict[str, Any] = {
        "memory": {
            phase: {"measured_gb": round(peak / GB, 3), "planned_gb": planned and round(planned[phase] / GB, 3)}
            for phase, peak in peaks.items()
        }
    }
    if not whole_plan:
        return {**answer, "faster": None}
    most = max(peak / planned[phase] for phase, peak in peaks.items())
    return {**answer, "faster": faster(whole_plan, most)}


def _planned(setup: Setup, length: int) -> MemoryPlan | None:
    """Return the plan of the run with completions of this length, or None if it cannot be planned."""
    settings, machine = hardware(setup)
    with suppress(UserError):
        return planner.choose(settings.changed(max_completion_length=length), setup.configs, **machine)[1]
    return None


def text(answer: Mapping[str, Any], run_dir: Path) -> str:
    """Return what `train --measure` prints.

    >>> answer = {
    ...     "completions": 64, "tokens": 512, "max_completion_length": 512, "steps": 200, "evaluated": 768,
    ...     "seconds": {"rollout": 12.34, "update": 5.67, "step": 18.01}, "hours": 1.23,
    ...     "memory": {"training": {"measured_gb": 4.123, "planned_gb": 4.2}},
    ...     "faster": {"gradient_checkpointing": False},
    ... }
    >>> print(text(answer, Path("runs/mine")))
    measure  a rollout takes 12.3 s (64 completions of 512 tokens), an update 5.67 s
    measure  at most 74 min: 200 steps and 768 completions of evaluations, all of full length
    measure  training: 4.12 GB at the peak, planned 4.20
    measure  faster with the memory that is left: gradient_checkpointing: false
    measure  nothing was written to runs/mine
    """
    seconds, length, cut = answer["seconds"], answer["max_completion_length"], []
    completions = f"{answer['completions']} completions of {answer['tokens']} tokens"
    bound = "at most"
    if length > answer["tokens"]:
        cut = [f"a CPU is slow, so there was one rollout, cut short: completions of the run may have {length} tokens"]
        bound = "about"
    counted = f"{answer['steps']} steps and {answer['evaluated']} completions of evaluations, all of full length"
    planned = [f", planned {one['planned_gb']:.2f}" if one["planned_gb"] else "" for one in answer["memory"].values()]
    changes = [f"{name}: {json.dumps(value)}" for name, value in (answer["faster"] or {}).items()]
    lines = [
        f"a rollout takes {seconds['rollout']:.3g} s ({completions}), an update {seconds['update']:.3g} s",
        *cut,
        f"{bound} {duration(3600 * answer['hours'])}: {counted}",
        *(
            f"{phase}: {one['measured_gb']:.2f} GB at the peak{plan}"
            for (phase, one), plan in zip(answer["memory"].items(), planned, strict=True)
        ),
        *(f"faster with the memory that is left: {change}" for change in changes),
        f"nothing was written to {run_dir}",
    ]
    return "\n".join(f"measure  {line}" for line in lines)
