"""Refuse to resume another run, or a run with too many or too few processes; archive the steps that are trained again.

run/resume.py decides where a run begins.

transformers and trainer/state.py load the checkpoint.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError
from grpo_math.run import checkpoints, resume
from grpo_math.run.earlier import archive_later_checkpoints
from grpo_math.run.weights import checkpoint_kinds
from grpo_math.settings.batch import alternatives, batch_from, divisors
from grpo_math.trainer.config import MathGRPOConfig


def choose_checkpoint(setup: Setup, config: MathGRPOConfig, run_dir: Path) -> tuple[str | None, bool]:
    """Return the folder of the checkpoint, None for the start, and True if the run of these settings is finished.

    Print a line about each damaged checkpoint. Raises `UserError` for a run with other settings, problems or processes,
    and for a damaged checkpoint that is named.
    """
    requested, mode = config.resume_from_checkpoint, setup.settings.resume
    start = resume.where_to_start(run_dir, requested)
    existing = start.config
    if existing is not None:
        lines = resume.changed_problems(start.run_dir, setup.problems.hashes)
        saved = {"DEEPSPEED", "FSDP"} & {str(existing.get("distributed_type"))}
        # DeepSpeed, FSDP and transformers each read only their own kind of checkpoint.
        if saved != (now := checkpoint_kinds(config)):
            lines.append(f"distributed_type: {', '.join(saved) or 'NO'} -> {', '.join(now) or 'NO'}")
        resume.refuse_changed(start.run_dir, lines, mode)
        # Decide after the refusal: a finished run of other settings is not the requested run.
        if start.named is None and mode == "auto" and (run_dir / checkpoints.FINISHED).exists():
            return None, True
    checkpoint, damaged = start.checkpoint()
    for line in damaged:
        print(f"warning: {line}: continuing from {checkpoint}", file=sys.stderr)
    if checkpoint is None and requested and str(requested).lower() != "false":
        raise ConfigError("resume_from_checkpoint", requested, f"finds no checkpoint in {run_dir}", "leave it out")
    step = checkpoints.checkpoint_step(checkpoint) if checkpoint else 0
    if existing is not None and step:
        _refuse_processes(existing, config, step)
    # Archive after all refusals: a run that is refused changes nothing.
    if not setup.settings.keeps_nothing:
        archive_later_checkpoints(run_dir, step)
    if checkpoint:
        started = not start.named and Path(str(requested)).is_dir()
        why = f" (the run has started from {requested} already)" if started else ""
        print(f"Resuming from {checkpoint}{why}.", file=sys.stderr)
    return str(checkpoint) if checkpoint else None, False


def _refuse_processes(existing: Mapping[str, Any], config: MathGRPOConfig, step: int) -> None:
    """Raise `ConfigError` unless this number of processes can resume a checkpoint of ``existing``'s processes.

    With DDP every process has all weights and the whole optimizer, so another number of processes can load them. A step
    needs the same completions. Within a rollout the number has to be the same, because each process has a part of the
    rollout in memory.
    """
    before, now = existing.get("num_processes", config.world_size), config.world_size
    if before == now:
        return
    batch, batch_now = batch_from(existing, before), batch_from(vars(config), now)
    possible = [before]
    if existing.get("distributed_type") in ("DEEPSPEED", "FSDP"):
        reason = "its optimizer is divided among the processes"
    # A rollout is trained on num_iterations times.
    elif step * batch.total % (batch.rollout * existing["num_iterations"]):
        reason = "it lies within a rollout, of which each process has a part"
    elif not existing.get("stated", {}).get("prompts_per_step"):
        reason = "the recipe does not state prompts_per_step, and another number of processes would change it"
    else:
        reason = (
            f"a step of {batch.total} completions is to be shared evenly, and {batch.rollout} are generated at a time"
        )
        possible = divisors(batch.total)
    if now not in possible or (batch_now.total, batch_now.rollout) != (batch.total, batch.rollout):
        problem = f"cannot resume checkpoint-{step}, which {before} wrote ({reason})"
        raise ConfigError("num_processes", now, problem, f"start {alternatives(possible)} processes")
    print(f"{now} in place of {before} processes: sampling draws other random numbers from here on.", file=sys.stderr)
