"""A SLURM cluster for the tests of this folder, and jobs on it that train a tiny model."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from launching import ROOT, accelerate, for_cpu, run, variables
from slurm_cluster import Cluster, missing, wait_for

from grpo_math.system.machine import free_port

# A step takes about half a second, so that there is time to interrupt a run.
RECIPE = {
    "dtype": "float32",
    "use_peft": True,
    "lora_r": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "dataset": "generated:sums",
    "rewards": ["faulty:letters_slowly"],
    "use_cpu": True,
    "bf16": False,
    "max_steps": 12,
    "save_steps": 4,
    "learning_rate": 0.01,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "report_to": "none",
    "eval_n": 0,
}

ADAPTER = "adapter/adapter_model.safetensors"
WEIGHTS: dict[str, bytes] = {}  # of the undisturbed runs, by their accelerate config


@pytest.fixture(scope="session")
def cluster():
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as started:
        yield started


class Job:
    """A job that trains: its number, its log and its run."""

    def __init__(self, cluster: Cluster, folder: Path, number: str) -> None:
        self.cluster, self.number = cluster, number
        self.log_file = folder / f"slurm-{number}.out"
        self.run = folder / f"runs/grpo-math-{number}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def ended(self, state: str, restarts: int = 0) -> dict[str, str]:
        """Wait for the end, and require a state and a number of restarts."""
        details = self.cluster.wait(
            self.number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", seconds=900
        )
        assert (details["JobState"], details["Restarts"]) == (state, str(restarts)), f"{details}\n{self.log[-3000:]}"
        return details

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: self.steps() >= step, f"step {step} of job {self.number}", 240)

    def steps(self) -> int:
        """Return how many steps the history has."""
        history = self.run / "history.jsonl"
        return history.read_text().count('"loss"') if history.exists() else 0

    def weights(self) -> bytes:
        return (self.run / ADAPTER).read_bytes()


@pytest.fixture
def folder(tmp_path, tiny):
    """The folder that a job is submitted from, with a recipe: a checkout as far as the scripts can see."""
    for name in ("accelerate_configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "deepspeed").mkdir()
    for_cpu(ROOT / "deepspeed/zero3.json", tmp_path / "deepspeed")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "model_name_or_path": tiny()}))
    return tmp_path


@pytest.fixture
def environment():
    """The variables of a job: this environment's programs, the rewards of tests/processes, and what srun gets from
    `sbatch --export=NONE`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = os.pathsep.join([str(ROOT), str(ROOT / "tests/processes")])
    return variables(PATH=path, PYTHONPATH=sources, SLURM_EXPORT_ENV="NONE")


@pytest.fixture
def submit(cluster, folder, environment):
    """Submit a job: ``submit("multi_node", "zero2", nodes=2)`` returns a `Job`."""

    def submitted(
        script: str, config: str, *settings: str, nodes: int, options: Sequence[str] = (), **more: str
    ) -> Job:
        words = [f"--nodes={nodes}", "--gpus-per-node=1", "--cpus-per-task=1", *options]
        words += [f"launch/slurm/{script}.sbatch", "recipe.yaml", f"accelerate_configs/{config}.yaml"]
        number = cluster.run("sbatch", "--parsable", *words, *settings, cwd=folder, **{**environment, **more})
        return Job(cluster, folder, number)

    return submitted


@pytest.fixture
def undisturbed(folder, environment):
    """The weights of a run of two processes on one machine, without SLURM: ``undisturbed("multi_node")``."""

    def trained(config: str) -> bytes:
        if config not in WEIGHTS:
            options = ["--num_machines", "1", "--num_processes", "2", "--main_process_port", str(free_port())]
            training = ["-m", "grpo_math.train", "--config", "recipe.yaml", "--output_dir", "undisturbed"]
            run([*accelerate(config, folder, *options), *training], cwd=folder, **environment)
            WEIGHTS[config] = (folder / "undisturbed" / ADAPTER).read_bytes()
        return WEIGHTS[config]

    return trained
