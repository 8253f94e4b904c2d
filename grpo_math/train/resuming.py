"""What a run goes on from: its newest whole checkpoint, one that is named, or the start.

Does not load it: transformers does, and trainer/state.py.
"""

import shutil
import sys
from pathlib import Path

from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError
from grpo_math.run import checkpoints, files, metrics, resume
from grpo_math.run.main_process import on_main
from grpo_math.settings.conflicts import kinds_of_checkpoint
from grpo_math.train.pickles import code_in
from grpo_math.trainer.config import MathGRPOConfig

PICKLES, UNREAD = (".pt", ".pth", ".bin"), ("training_args.bin",)  # nothing reads the latter


def go_on(setup: Setup, config: MathGRPOConfig, run_dir: Path) -> bool:
    """Decide what the run goes on from: ``config.resume_from_checkpoint`` becomes a folder, or None for the start.

    True if there is nothing left to do: the folder holds the finished run of these settings. Raises `UserError`, on
    every process alike, for the run of other settings, problems or processes, and for a damaged checkpoint.
    """
    config.resume_from_checkpoint, finished = on_main(lambda: _decide(setup, config, run_dir))
    return finished


def _decide(setup: Setup, config: MathGRPOConfig, run_dir: Path) -> tuple[str | None, bool]:
    """(the checkpoint to go on from, whether the run is finished), with a line on stderr about each that is damaged."""
    asked, mode = config.resume_from_checkpoint, setup.settings["resume"]
    named, held_in = resume.source(run_dir, asked)
    held = resume.config_of(held_in)
    if held is not None:
        lines = resume.changed_problems(held_in, setup.rows)
        if (before := held.get("num_processes", config.world_size)) != config.world_size:
            lines.append(f"num_processes: {before} -> {config.world_size}")
        of_checkpoints = {"DEEPSPEED", "FSDP"} & {str(held.get("distributed_type"))}
        if of_checkpoints != (now := kinds_of_checkpoint(config)):  # each reads its own kind alone
            lines.append(f"distributed_type: {', '.join(of_checkpoints) or 'NO'} -> {', '.join(now) or 'NO'}")
        resume.refuse_changed(held_in, lines, mode)
        if named is None and mode == "auto" and (run_dir / checkpoints.FINISHED).exists():
            return None, True
    if named:
        if (named / checkpoints.SUMS).exists() and (reason := checkpoints.damage(named)):
            raise ConfigError("resume_from_checkpoint", asked, f"is damaged ({reason})", "give another checkpoint")
        for file in sorted(path for path in named.rglob("*") if path.suffix in PICKLES and path.name not in UNREAD):
            if why := code_in(file):
                reason = f"holds {file.relative_to(named)}, which is more than tensors and plain types ({why})"
                raise ConfigError("resume_from_checkpoint", asked, reason, "give another checkpoint")
        checkpoint: Path | None = named
    else:
        checkpoint, damaged = checkpoints.newest_whole(run_dir)
        for line in damaged:
            print(f"warning: {line}: going on from {checkpoint}", file=sys.stderr)
        if checkpoint is None and asked:
            raise ConfigError("resume_from_checkpoint", asked, f"finds no checkpoint in {run_dir}", "leave it out")
    step = checkpoints.step_of(checkpoint) if checkpoint else 0
    checkpoints.set_aside_after(run_dir, step)
    files.keep_lines(run_dir / "ungradable.jsonl", lambda line: line[metrics.STEP] < step)
    shutil.rmtree(run_dir / checkpoints.WRITING, ignore_errors=True)
    if checkpoint:
        print(f"Going on from {checkpoint}.", file=sys.stderr)
    return str(checkpoint) if checkpoint else None, False
