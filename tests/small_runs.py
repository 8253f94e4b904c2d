"""Small runs of the training program: their settings, how they are started and waited for, and what they leave."""

import json
import os
import resource
import subprocess
from pathlib import Path

import psutil
import pytest
import waiting
from launching import ROOT, TINY, accelerate, variables

from grpo_math.run.metrics import METRICS, reward_key, verdict_key

# With the rewards of tests/processes/faulty.py, four steps.
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests/processes")))
RUN = [*TINY, "--report_to=none", "--max_steps=4"]
STEPS = 60


@pytest.fixture
def size_limit():
    """Sets the largest size of a file, which writers meet as they meet a full disk: a write fails in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def history(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]


def promised(when: set[str], rewards=(), verdicts=()) -> set[str]:
    """The keys of a line of the history: those that are always there, those of ``when``, of rewards and of verdicts."""
    names = {name for name, metric in METRICS.items() if metric.when in when | {"always"}}
    names |= {reward_key(reward, figure) for reward in rewards for figure in ("mean", "std")}
    return names | {verdict_key(verdict) for verdict in verdicts}


def settings(tiny, run_dir, *more) -> list[str]:
    """Without a checkpoint unless the run is stopped."""
    extra = ["--use_peft=true", "--lora_dropout=0", "--report_to=none", "--eval_split=heldout", "--save_strategy=no"]
    of_run = ["--model_name_or_path", tiny(), "--output_dir", str(run_dir), f"--max_steps={STEPS}"]
    return [*TINY, *extra, *of_run, *more]


def start(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=variables(**environment), stdout=file, stderr=subprocess.STDOUT)


def until(true, process: subprocess.Popen, log: Path, seconds: float = 400) -> None:
    """`waiting.until`, unless the process ends before."""

    def came() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        return true()

    waiting.until(came, seconds, pause=0.05)


def steps_done(run_dir: Path, n: int) -> bool:
    return (run_dir / "history.jsonl").exists() and len(history(run_dir)) >= n


def ends(process: subprocess.Popen, log: Path, code: int, seconds: float = 120) -> str:
    try:
        assert process.wait(seconds) == code, log.read_text()[-4000:]
    finally:
        process.kill()
    output = log.read_text()
    assert "Traceback" not in output
    return output


def two(folder: Path, program: str, config: str = "multi_gpu") -> list[str]:
    """The launch of two processes by ``program``, which takes what `accelerate launch` takes."""
    command = accelerate(config, folder, "--num_processes", "2")
    command[command.index("accelerate.commands.launch")] = program
    return [*command, "-m", "grpo_math.train"]


def rank(launcher: subprocess.Popen, number: int) -> psutil.Process:
    """Return the process of a rank, a child of ``launcher``. `descendants` lists what the ranks forked later."""
    below = waiting.descendants(launcher.pid)
    return next(process for process in below if process.environ().get("RANK") == str(number))


def write_adapter_run(folder: Path, base: str, settings: str = "") -> Path:
    """Write what a run with LoRA leaves: its settings, and an adapter whose answers are not those of the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"model_name_or_path: {base}\n{settings}")
    lora = LoraConfig(r=8, lora_alpha=400, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(folder / "adapter")
    return folder
