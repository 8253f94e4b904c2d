"""The memory plan of one recipe on one machine: the layout, the bytes of each phase, and what does not fit.

plan.py reads the recipe and the machine. remedies.py changes settings until a plan fits.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from grpo_math.errors import UserError
from grpo_math.generation.dtypes import dtype_error
from grpo_math.planner import devices, memory
from grpo_math.planner.settings import Json, LaunchSettings, NotPlanned, Zero, resolve
from grpo_math.planner.work import Machine, largest
from grpo_math.settings import batch, rules
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.machine import GB

MARGIN = 0.95  # of a GPU that a plan may fill


class MemoryPlan:
    """The plan of one recipe on one machine: the layout, the terms of each phase, and the problems.

    ``refused``: the fields that training refuses. ``peak_phase``: the
    policy's phase with more memory; a server always fills its GPUs, so it is ignored. ``missing``: the missing bytes of
    each problem, and a line about the problem.
    ``severity``: (missing bytes, problems); lower is closer to fitting.
    """

    def __init__(self, machine: Machine, settings: RunSettings) -> None:
        self.machine = machine
        self.settings = settings
        self.refused = {error.field for level, error in rules.violations(settings) if level == "error"}
        shape = machine.shape
        config = deepspeed_config(settings.deepspeed, machine.accelerate)
        zero = Zero(config, shape.hidden)
        for name in ("load_in_4bit", "vllm_share_weights"):
            if getattr(settings, name) and zero.stage == 3:
                raise NotPlanned(name, True, "under ZeRO-3 is not known to the plan", "use ZeRO-2")
        self.sequence = machine.prompt + settings.max_completion_length
        if shape.packed and self.sequence >= shape.packed:
            reason = f"after {machine.prompt} tokens of prompt is not packed, which is not known to the plan"
            length = settings.max_completion_length
            raise NotPlanned("max_completion_length", length, reason, f"use less than {shape.packed - machine.prompt}")
        sizes = partial(devices.tensor_parallel, machine, settings, machine.gpus - 1)
        self.layout = devices.assign_gpus(settings, machine.gpus, sizes, partial(batch.divides, settings))
        self.batch = batch.resolve_batch(settings, self.layout.policy)
        work = largest(machine, settings, self.batch, zero.stage)
        self.precise = memory.precision(settings, zero, config)
        self.phases, self.main = memory.phases(
            machine, settings, zero, self.precise, self.batch, self.layout.generation, work
        )
        self.peak_phase = max(self.phases, key=lambda phase: memory.total(self.phases[phase]))
        self.peak = memory.total(self.phases[self.peak_phase])
        if self.layout.server:
            self.phases["server"] = memory.server(machine, settings, self.layout.tensor_parallel)
        self.missing = [(needed - limit, line) for needed, limit, line in self._bounds() if needed > limit]
        self.problems = [line for _, line in self.missing]
        self.fits = not self.missing
        self.severity = sum(size for size, _ in self.missing), len(self.missing)

    @property
    def vllm_bytes(self) -> int:
        """Return the bytes of a colocated vLLM: its share of the GPU, or the least that it needs."""
        return sum(size for term, size in self.phases["generation"].items() if term.startswith("vLLM"))

    def vllm_share(self) -> float:
        """Return the share of the GPU that the policy leaves to a colocated vLLM."""
        with_vllm = [terms for terms in self.phases.values() if "vLLM_weights" in terms]
        policy = max(memory.total(terms) for terms in with_vllm) - self.vllm_bytes
        return max(0.05, min(int(20 * (MARGIN - policy / self.machine.gpu_bytes)) / 20, 0.9))

    def changed(self, fields: LaunchSettings, machine: Machine) -> "MemoryPlan | None":
        """Return the plan with changed settings, or None if it cannot be planned.

        None, too, if training would refuse the settings, or if completions would be generated for more optimizer steps
        than before: their policy would be older.
        """
        with suppress(UserError):
            settings = resolve(self.settings.changed(**fields), self.machine.capability)
            then = MemoryPlan(machine, settings)
            older = then.batch.rollout * self.batch.total > max(self.batch.rollout, self.batch.total) * then.batch.total
            if then.refused <= self.refused and not older:
                return then
        return None

    def _bounds(self) -> Iterator[tuple[int, int, str]]:
        """Yield (bytes that are needed, bytes that are available, the problem if too few are available)."""
        settings, machine, limit = self.settings, self.machine, int(MARGIN * self.machine.gpu_bytes)
        where = "of memory" if settings.use_cpu else "per GPU"
        where += f"; {limit / GB:.1f} of {machine.gpu_bytes / GB:.4g} GB are usable"
        for phase, terms in self.phases.items():
            needed = memory.total(terms)
            yield needed, limit, f"{phase} needs {needed / GB:.1f} GB {where}"
        if not settings.use_cpu:
            main, most = memory.total(self.main), int(MARGIN * machine.cpu_bytes)
            yield main, most, f"{main / GB:.1f} GB of main memory are needed, and there are {most / GB:.1f}"
        if self.layout.generation == "colocate":
            share = int(settings.vllm_gpu_memory_utilization * machine.gpu_bytes)
            # The terms fill the share, or they are the least that vLLM needs.
            needed = self.vllm_bytes
            tokens = memory.context_length(machine.shape, settings, machine.prompt)
            line = f"vLLM's share is {share / GB:.1f} GB, and its weights, overhead and one sequence of {tokens} tokens"
            yield needed, share, f"{line} take {needed / GB:.1f}"
        longest = min(machine.shape.max_tokens or self.sequence, settings.vllm_max_model_length or self.sequence)
        line = f"prompt and completion come to {self.sequence} tokens, and the model is given {longest}"
        # One missing byte for any number of tokens: halving the tokens is no progress.
        yield self.sequence > longest, 0, line
        if error := dtype_error(settings, machine.capability, machine.family):
            yield 1, 0, str(error)

    def answer(self) -> Json:
        """Return the plan as JSON."""
        terms, layout, device = self.phases[self.peak_phase], self.layout.roles(), "GPU"
        if self.settings.use_cpu:
            layout, device = [{"role": "policy, and generation by transformers, on the CPU", "gpus": []}], "CPU process"
        one, processes = self.batch.rows * self.batch.steps / self.batch.generations, self.batch.processes
        notes = []
        if processes > 1 and not self.settings.prompts_per_step:
            keeps = f"; prompts_per_step: {one:g} keeps it" if one.is_integer() else ""
            notes = [f"the step grows with the processes: {one * processes:g} prompts in place of {one:g}{keeps}"]
        return {
            "fits": self.fits,
            "notes": notes,
            "problems": self.problems,
            "peak_gb": round(self.peak / GB, 3),
            "gpu_gb": round(self.machine.gpu_bytes / GB, 3),
            "largest": max(terms, key=lambda term: terms[term]),
            "bytes": terms,
            "phases": self.phases,
            "main_memory": self.main,
            "layout": layout,
            "why": self.layout.why,
            "batch": self.batch.line(device),
            "prompt_tokens": self.machine.prompt,
        }
