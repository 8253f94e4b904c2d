"""Small runs of the training program: their settings, how they are started and waited for, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import launching
from launching import ROOT, accelerate, variables
from waiting import alive

# With the rewards of tests/processes/faulty.py, four steps.
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests/processes")))
RUN = [*launching.TINY, "--report_to=none", "--max_steps=4"]
# Without a checkpoint unless a run is stopped.
TINY = [*launching.TINY, "--eval_split=heldout", "--save_strategy=no"]
STEPS = 60


def history(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]


def launch(model: str, folder: Path, reward: str, *arguments: object) -> list[str]:
    command = [sys.executable, "-m", "grpo_math.train", "--model_name_or_path", model, "--output_dir", folder]
    return [str(word) for word in (*command, "--rewards", f"faulty:{reward}", *RUN, *arguments)]


def settings(tiny, run_dir, *more) -> list[str]:
    own = ["--model_name_or_path", tiny(), "--output_dir", str(run_dir), "--use_peft=true", "--report_to=none"]
    return [*own, *TINY, "--lora_dropout=0", f"--max_steps={STEPS}", *map(str, more)]


def start(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=variables(**environment), stdout=file, stderr=subprocess.STDOUT)


def until(true, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 400
    while not true():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def steps_done(run_dir: Path, n: int) -> bool:
    return (run_dir / "history.jsonl").exists() and len(history(run_dir)) >= n


def ends(process: subprocess.Popen, log: Path, code: int) -> str:
    try:
        assert process.wait(120) == code, log.read_text()[-4000:]
    finally:
        process.kill()
    said = log.read_text()
    assert "Traceback" not in said
    return said


def two(folder: Path, program: str, config: str = "multi_gpu") -> list[str]:
    """The launch of two processes by ``program``, which takes what `accelerate launch` takes."""
    command = accelerate(config, folder, "--num_processes", "2")
    command[command.index("accelerate.commands.launch")] = program
    return [*command, "-m", "grpo_math.train"]


def rank(run_dir: Path, number: int) -> int:
    """The process of a rank: not that of its launcher, and none that it forked."""
    found = {}
    for pid in alive("grpo_math.train"):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        status = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if str(run_dir) in words and words[words.index("-m") + 1] == "grpo_math.train":
            found |= {pid: None} if b"RANK=%d" % number in status else {}
    return min(found)
