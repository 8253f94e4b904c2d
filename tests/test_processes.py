"""Training in two processes, launched for real: plain DDP and DeepSpeed, against TRL in as many processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parent / "processes" / "train.py"
RUNS = {
    "dapo": {},
    "dapo_sparse": {"rewards": "sparse"},
    "grpo_sparse": {"rewards": "sparse", "loss_type": "grpo"},
    "bnpo_sparse": {"rewards": "sparse", "loss_type": "bnpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1},
    "small_budget": {"rewards": "sparse", "loss_type": "dr_grpo", "update_token_budget": 25},
    "several_updates": {"num_iterations": 2, "loss_type": "grpo"},
    "torn_groups": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.0,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


def accelerate_config(folder: Path, stage: int) -> Path:
    offload = {"device": "cpu", "pin_memory": False}
    stages = {"stage": stage, "offload_optimizer": offload, "stage3_gather_16bit_weights_on_model_save": True}
    zero = {**ZERO, "zero_optimization": stages}
    (folder / "zero.json").write_text(json.dumps(zero))
    path = folder / "accelerate.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nuse_cpu: true\nnum_machines: 1\n"
        f"num_processes: 2\nmachine_rank: 0\ndeepspeed_config:\n  deepspeed_config_file: {folder / 'zero.json'}\n"
    )
    return path


def launch(start: list[str], kind: str, model: str, folder: Path, runs: dict) -> None:
    folder.mkdir()
    command = [*start, str(PROGRAM), kind, model, str(folder), json.dumps(runs)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]


def relative(ours: Path, trl: Path) -> float:
    one, two = (torch.cat([v.flatten() for v in torch.load(path, weights_only=True).values()]) for path in (ours, trl))
    return ((one - two).norm() / two.norm()).item()


def both(start: list[str], distributed_type: str, model: str, tmp_path: Path, runs: dict, only_ours: Any = ()) -> None:
    launch(start, "trl", model, tmp_path / "trl", runs)
    launch(start, "ours", model, tmp_path / "ours", {**runs, **dict(only_ours)})
    for name in runs:
        seen = [json.loads((tmp_path / "ours" / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
        assert all(rank["processes"] == 2 and distributed_type in rank["distributed_type"] for rank in seen)
        assert relative(tmp_path / "ours" / f"{name}.pt", tmp_path / "trl" / f"{name}.pt") < 1e-6, name
        plain = [json.loads((tmp_path / "trl" / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
        assert sum(rank["tokens"] for rank in seen) < sum(rank["tokens"] for rank in plain)


POISONED = {"poisoned": {"poisoned_step": 1, "logging_steps": 1}}


def left_out_on_both(folder: Path) -> None:
    ranks = [json.loads((folder / f"poisoned.{rank}.json").read_text()) for rank in (0, 1)]
    assert all(rank["skipped"] == [0.0, 1.0, 0.0] for rank in ranks)
    assert all(value.isfinite().all() for value in torch.load(folder / "poisoned.pt", weights_only=True).values())


def test_two_ddp_processes_end_with_trls_weights_and_resample_alike(tiny, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29611"]
    resampled = {"resampled": {"resample_groups": 2, "logging_steps": 1}}
    both(
        start,
        "MULTI_CPU",
        tiny("llama"),
        tmp_path,
        {**RUNS, "dapo": {"longest_first": True}},
        only_ours={**resampled, **POISONED},
    )
    left_out_on_both(tmp_path / "ours")
    ranks = [json.loads((tmp_path / "ours" / f"resampled.{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["position"] == ranks[1]["position"] > 0
    seen = ranks[0]["resample"]
    assert seen["resample/drawn"] - seen["resample/thrown_away"] == 4
    assert seen["resample/kept"] > 4 / 3  # as many as chance would give


@pytest.mark.parametrize("stage", [2, 3])
def test_two_deepspeed_processes_end_with_trls_weights(stage, tiny, tmp_path):
    pytest.importorskip("deepspeed")
    start = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(accelerate_config(tmp_path, stage)),
    ]
    start += ["--main_process_port", "29612"]
    runs = {name: RUNS[name] for name in ("dapo", "grpo_sparse", "small_budget")}
    runs["dapo"] = {"longest_first": stage < 3}
    both(start, "DEEPSPEED", tiny("llama"), tmp_path, runs, only_ours=POISONED)
    left_out_on_both(tmp_path / "ours")
