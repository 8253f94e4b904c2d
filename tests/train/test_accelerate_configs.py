"""Every accelerate and DeepSpeed file: read by the loader that will read it, and launched for real where a CPU can.

accelerate runs something else without a word where it cannot run what a file says, so the test asks the processes
themselves what they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from launching import ROOT, accelerate, ranks, run

PROGRAM = Path(__file__).parents[1] / "processes/train.py"
FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "deepspeed").glob("*.json"))
# file -> (distributed type, processes, [ZeRO's stage, optimizer offloaded to, parameters offloaded to])
LAUNCHED = {"single_gpu": ("NO", 1, None), "zero3": ("DEEPSPEED", 2, [3, None, None])}
ELSEWHERE = {
    "cpu": "tests/trainer/test_reference.py",
    "multi_gpu": "tests/trainer/test_processes.py",
    "zero2": "tests/train/test_resume.py",
    "zero2_offload": "tests/trainer/test_processes.py",
    "zero3_offload": "tests/trainer/test_processes.py",
    "fsdp2": "tests/trainer/test_processes.py",
    "multi_node": "tests/train/test_launch_scripts.py",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_its_own_files(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
    assert path.read_text().startswith("#")
    assert f"accelerate launch --config_file accelerate_configs/{path.name}" in path.read_text()
    if config.deepspeed_config:
        assert set(config.deepspeed_config) == {"deepspeed_config_file", "deepspeed_multinode_launcher"}
        assert (ROOT / config.deepspeed_config["deepspeed_config_file"]).is_file()


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_deepspeed_and_transformers_read_the_deepspeed_files(path, tmp_path, monkeypatch):
    """With every auto filled in by transformers, as at the start of a run."""
    deepspeed = pytest.importorskip("deepspeed.runtime.config")
    from transformers import LlamaConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    model = type("Model", (), {"config": LlamaConfig(hidden_size=64)})
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_grad_norm=0.5, per_device_train_batch_size=3)
    filled = HfTrainerDeepSpeedConfig(str(path))
    filled.trainer_config_process(args)
    filled.trainer_config_finalize(args, model, 10)
    unset_hf_deepspeed_config()
    assert "auto" not in json.dumps(filled.config)
    monkeypatch.setenv("WORLD_SIZE", "1")
    read = deepspeed.DeepSpeedConfig(filled.config)
    assert read.gradient_clipping == 0.5
    assert read.train_micro_batch_size_per_gpu == 3
    assert read.zero_config.contiguous_gradients
    assert read.zero_config.overlap_comm
    assert read.zero_config.reduce_bucket_size == 64 * 64
    offload = read.zero_config.offload_optimizer
    assert (offload is not None) == ("offload" in path.stem)
    assert offload is None or offload.pin_memory


def test_every_file_is_launched_in_a_test():
    assert {path.stem for path in FILES} == {*LAUNCHED, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text()


@pytest.mark.full
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_file_launches_the_processes_that_it_says(name, tiny, tmp_path):
    """Three steps of all weights, and three of a LoRA."""
    distributed_type, processes, zero = LAUNCHED[name]
    if zero:
        pytest.importorskip("deepspeed")
    adam = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 0.5, "logging_steps": 1}
    runs = json.dumps({"full": adam, "lora": {**adam, "lora": True}})
    start = accelerate(name, tmp_path, "--num_processes", str(processes))
    run([*start, str(PROGRAM), "ours", tiny("llama"), str(tmp_path), runs])
    for kind in ("full", "lora"):
        seen = ranks(tmp_path, kind, distributed_type, processes, zero)
        assert all(len(rank["losses"]) == 3 for rank in seen)
