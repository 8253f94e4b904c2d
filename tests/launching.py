"""Starting real processes for tests: accelerate or torchrun, free ports on this machine alone, the CPU as the device.

A DeepSpeed file is run as shipped but for two settings that a CPU demands: its optimizer is PyTorch's, since
DeepSpeedCPUAdam is compiled on first use, and no memory is pinned.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_math.system.gpus import run_once

ROOT = Path(__file__).parents[1]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc_per_node", "2"),
]
# The first lines of a Python program that is started by its name. sh starts Python, because the path of an interpreter
# may contain a space, which #! does not allow.
SHEBANG = f"""#!/bin/sh
'''exec' "{sys.executable}" -P "$0" "$@"
' '''
"""
# Of the training program: steps of a tiny model that take a fraction of a second.
TINY = [
    "--use_cpu=true",
    "--bf16=false",
    "--gradient_checkpointing=false",
    "--per_device_train_batch_size=4",
    "--num_generations=2",
    "--max_completion_length=8",
    "--learning_rate=1e-3",
    "--dataset=generated:sums",
]


def write_program(path: Path, text: str) -> None:
    """Write a program that stands in for another one."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def nvidia_smi(folder: Path, gpus: str, processes: str = "", code: int = 0, slices: str = "") -> None:
    """Write a nvidia-smi that prints these rows, with \\n for a line end, and ends with this exit code; first in PATH.

    ``gpus``: number, UUID, MB of memory and MB in use; then perhaps the capability, the driver, the MIG mode and the
    name. ``processes``: the UUID of a GPU, a process and its program. ``slices``: of ``-L``.
    """
    rest = ["[N/A]", "580.65.06", "[N/A]", "NVIDIA RTX"]
    rows = [row.split(", ") for row in gpus.split("\\n")]
    gpus = "\\n".join(", ".join([*row, *rest[len(row) - 4 :]]) if len(row) > 3 else row[0] for row in rows)
    of_query = f"case $1 in -L) printf '{slices}';; *apps*) printf '{processes}';; *) printf '{gpus}';; esac"
    write_program(folder / "nvidia-smi", f"#!/bin/sh\n{of_query}\nexit {code}\n")
    os.environ["PATH"] = f"{folder.resolve()}{os.pathsep}{os.environ['PATH']}"
    run_once.cache_clear()


def accelerate(name: str, folder: Path, *options: str) -> list[str]:
    """The command that launches accelerate_configs/``name``.yaml; a program or `-m MODULE` follows.

    ``options`` are accelerate's own. DeepSpeed's file, as a CPU takes it, is written to ``folder``.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / f"accelerate_configs/{name}.yaml"), "--main_process_port", "0"]
    if (shipped := ROOT / f"deepspeed/{name}.json").exists():
        # On a CPU, DeepSpeed compiles an operator, and torch passes its own path to the linker without quotes.
        if " " in sys.prefix:
            pytest.skip("torch cannot link DeepSpeed's operator in an environment whose path has a space")
        command += ["--deepspeed_config_file", str(for_cpu(shipped, folder))]
    return [*command, *options]


def for_cpu(shipped: Path, folder: Path) -> Path:
    config = {**json.loads(shipped.read_text()), "zero_force_ds_cpu_optimizer": False}
    for part in ("offload_optimizer", "offload_param"):
        if part in config["zero_optimization"]:
            config["zero_optimization"][part]["pin_memory"] = False
    path = folder / shipped.name
    path.write_text(json.dumps(config))
    return path


def run(command: list[str], timeout: float = 900, cwd: Path = ROOT, **environment: str) -> str:
    """Wait for it; its standard output. A failure shows what it said last."""
    done = subprocess.run(
        command, env=variables(**environment), cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def variables(PYTHONPATH: str = f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **more: str) -> dict[str, str]:
    """Return the environment of a process, to which this package looks installed without its extras."""
    alone = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    base = str(ROOT / "tests/processes/base_install")
    path = os.pathsep.join(filter(None, (base, PYTHONPATH, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **alone, "PYTHONPATH": path, **more}


def ranks(folder: Path, name: str, distributed_type: str, processes: int, zero: list | None = None) -> list[dict]:
    """What every rank of tests/processes/train.py wrote of a run, held to what its launch was to be.

    ``zero``: DeepSpeed's stage, and where optimizer state and parameters are offloaded to. The training itself has to
    be real: losses are finite, weights moved, and are the same on all ranks.
    """
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.*.json"))]
    assert len(seen) == processes
    for rank in seen:
        assert rank["distributed_type"] == f"DistributedType.{distributed_type}"
        assert (rank["processes"], rank["zero"]) == (processes, zero)
        assert rank["losses"]
        assert all(map(math.isfinite, rank["losses"]))
        assert rank["weights"] != rank["weights_before"]
        assert rank["weights"] == seen[0]["weights"]
    return seen
