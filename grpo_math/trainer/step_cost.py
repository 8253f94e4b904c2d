"""Measure what each optimizer step takes: seconds and peak memory of sampling, scoring and the update.

`train --measure`, `grpo-math selftest` and the GPU tests call `measure_steps`. Works for TRL's trainer and for ours.
"""

import ctypes
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import TrainerCallback

from grpo_math.system.replaced import replaced

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer

GENERATION, SCORING, UPDATE = "generation", "scoring", "update"


class Cost(NamedTuple):
    """Seconds and bytes of a phase of one optimizer step.

    ``seconds`` of the clock, with the work that the GPU still had to do; ``cpu_seconds`` of this process, which other
    programs do not change. ``start`` and ``peak``: bytes at the start of the phase, and most bytes at once: of tensors
    on the GPU, or of the process (resident) on a CPU. ``reserved``: most bytes that torch's allocator had taken from
    the GPU, 0 on a CPU. ``peak - start`` is what the phase itself needed.
    """

    seconds: float
    cpu_seconds: float
    start: int
    peak: int
    reserved: int

    def __or__(self, other: "Cost") -> "Cost":
        """Add a phase that was entered again: seconds add up, bytes do not.

        >>> Cost(1.0, 2.0, 10, 30, 40) | Cost(0.5, 0.5, 20, 25, 50)
        Cost(seconds=1.5, cpu_seconds=2.5, start=10, peak=30, reserved=50)
        """
        seconds, cpu_seconds = self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds
        return Cost(seconds, cpu_seconds, self.start, max(self.peak, other.peak), max(self.reserved, other.reserved))


def measure_steps(trainer: "TrlTrainer") -> list[dict[str, Cost]]:
    """Call ``trainer.train()``, and return the cost of each phase of each optimizer step of this process.

    The phases are ``generation`` (sampling, with the sync of vLLM), ``scoring`` (the rest of a rollout: grading, old
    and reference log-probs) and ``update`` (the rest of the step). A step on an earlier rollout has ``update`` alone.
    The trainer's settings decide the number of steps and the length of completions. Logging, evaluation and checkpoints
    are not part of a step. The first step is slower than the others, because kernels are compiled. On a GPU its update
    includes the dry run of the largest micro-batch (trainer/largest_batch.py).

    >>> steps = measure_steps(trainer)  # doctest: +SKIP
    >>> steps[-1]["update"].seconds, max(step["update"].peak for step in steps)  # doctest: +SKIP
    (0.81, 3160211456)
    """
    stopwatch = _Stopwatch(trainer.accelerator.device.type == "cuda")
    generate, rollout = trainer._generate_single_turn, trainer._generate_and_score_completions
    trainer.add_callback(stopwatch)
    try:
        with replaced(
            trainer,
            _generate_single_turn=stopwatch.timed(generate, GENERATION),
            _generate_and_score_completions=stopwatch.timed(rollout, SCORING),
        ):
            trainer.train()
    finally:
        trainer.remove_callback(stopwatch)
    return stopwatch.steps


class _Stopwatch(TrainerCallback):
    """Charges each moment of an optimizer step to one phase."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.steps: list[dict[str, Cost]] = []
        self.phase: str | None = None
        self.started = self.cpu_started = 0.0
        self.start = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append({})
        self._enter(UPDATE)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter(None)

    def timed(self, method: Any, phase: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._inside(phase):
                return method(*args, **kwargs)

        return call

    @contextmanager
    def _inside(self, phase: str) -> Iterator[None]:
        outer = self.phase
        # An evaluation samples outside of a step.
        if outer is not None:
            self._enter(phase)
        yield
        if outer is not None:
            self._enter(outer)

    def _enter(self, phase: str | None) -> None:
        """End the current phase, and start the next one."""
        if self.cuda:
            torch.cuda.synchronize()
        if self.phase is not None:
            step, (peak, reserved) = self.steps[-1], self._peaks()
            seconds, cpu_seconds = time.perf_counter() - self.started, time.process_time() - self.cpu_started
            # Linux counts resident pages in batches: its peak can lie a few pages below what it said at the start.
            cost = Cost(seconds, cpu_seconds, self.start, max(peak, self.start), reserved)
            step[self.phase] = step[self.phase] | cost if self.phase in step else cost
        self.phase = phase
        if phase is not None:
            self.start = self._reset_peaks()
            self.started = time.perf_counter()
            self.cpu_started = time.process_time()

    def _peaks(self) -> tuple[int, int]:
        if self.cuda:
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return _resident("VmHWM"), 0

    def _reset_peaks(self) -> int:
        """Forget the peak so far. Return the bytes that are in use."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        # glibc keeps freed memory, which would hide what the next phase allocates.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        # Linux has a peak that can be reset. Elsewhere the peak is that of the process since its start.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")


def _resident(field: str) -> int:
    """Return the bytes of a field of /proc/self/status, or this process's peak if there is no /proc."""
    with suppress(OSError):
        [(kilobytes,)] = [re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())]
        return int(kilobytes) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
