"""Decide where a run resumes: at its newest whole checkpoint, at a named one, or at the start.

Does not load the checkpoint: transformers and trainer/state.py do.
"""

import sys
from pathlib import Path

from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError
from grpo_math.run import checkpoints, resume
from grpo_math.run.main_process import on_main
from grpo_math.run.weights import kinds_of_checkpoint
from grpo_math.trainer.config import MathGRPOConfig


def choose_checkpoint(setup: Setup, config: MathGRPOConfig, run_dir: Path) -> bool:
    """Set ``config.resume_from_checkpoint`` to the folder of a checkpoint, or to None for the start.

    Return True if the folder contains the finished run of these settings. Raises `UserError` on every process for a run
    with other settings, problems or processes, and for a damaged checkpoint.
    """
    config.resume_from_checkpoint, finished = on_main(lambda: _decide(setup, config, run_dir))
    return finished


def _decide(setup: Setup, config: MathGRPOConfig, run_dir: Path) -> tuple[str | None, bool]:
    """Return the checkpoint, and True if the run is finished. Print a line about each damaged checkpoint."""
    asked, mode = config.resume_from_checkpoint, setup.settings["resume"]
    named, held_in = resume.source(run_dir, asked)
    held = resume.config_of(held_in)
    if held is not None:
        lines = resume.changed_problems(held_in, setup.problems.rows)
        of_checkpoints = {"DEEPSPEED", "FSDP"} & {str(held.get("distributed_type"))}
        if of_checkpoints != (now := kinds_of_checkpoint(config)):  # each reads only its own kind
            lines.append(f"distributed_type: {', '.join(of_checkpoints) or 'NO'} -> {', '.join(now) or 'NO'}")
        # Each process has saved its part of the rollout, and under DeepSpeed and FSDP of the optimizer.
        processes = held.get("num_processes", config.world_size)
        if processes != config.world_size and checkpoints.checkpoints(held_in):
            lines.append(f"num_processes: {processes} -> {config.world_size}")
        resume.refuse_changed(held_in, lines, mode)
        if named is None and mode == "auto" and (run_dir / checkpoints.FINISHED).exists():
            return None, True
    if named:
        ours = checkpoints.unfinished(named) or (named / checkpoints.FILES).exists()
        if ours and (reason := checkpoints.damage(named)):
            raise ConfigError("resume_from_checkpoint", asked, f"is damaged ({reason})", "give another checkpoint")
        checkpoint: Path | None = named
    else:
        checkpoint, damaged = checkpoints.newest_whole(run_dir)
        for line in damaged:
            print(f"warning: {line}: continuing from {checkpoint}", file=sys.stderr)
        if checkpoint is None and asked:
            raise ConfigError("resume_from_checkpoint", asked, f"finds no checkpoint in {run_dir}", "leave it out")
    step = checkpoints.step_of(checkpoint) if checkpoint else 0
    checkpoints.set_aside_after(run_dir, step)
    if checkpoint:
        print(f"Going on from {checkpoint}.", file=sys.stderr)
    return str(checkpoint) if checkpoint else None, False
