"""A script on a full disk ends with one line that names the file or checkpoint; the earlier one is whole."""

import os
import subprocess

import pytest
from small_runs import size_limit
from small_trainers import letters
from transformers import TrainerCallback

from grpo_math.errors import WriteError
from grpo_math.run import checkpoints

__all__ = ["size_limit"]
ROWS = [{"prompt": f"What is {i} + 1?", "solution": str(i + 1)} for i in range(8)]
SAVED = {"max_steps": 3, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}


def test_a_write_that_fails_names_its_checkpoint_and_the_one_to_resume_from(ours, tmp_path, size_limit):
    """tests/run/test_failures.py has what each library raises."""

    class Fills(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            size_limit((tmp_path / "checkpoint-1/optimizer.pt").stat().st_size - 100)

    trainer = ours(letters, ROWS, optim="adamw_torch", **SAVED)
    trainer.add_callback(Fills())
    with pytest.raises(WriteError) as caught:
        trainer.train()
    line = str(caught.value)
    assert line.startswith(f"checkpoint-2 in {tmp_path} could not be written (")
    assert line.endswith(" GB free); train(resume_from_checkpoint=True) continues from checkpoint-1")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert checkpoints.newest_whole(tmp_path) == (tmp_path / "checkpoint-1", [])


@pytest.fixture
def disk(tmp_path):
    """``disk(kilobytes)`` -> a small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size):
        options = ["-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        if subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("this process may not mount a file system")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("size", "named"), [(4, "disk/config.yaml"), (12, "disk/history.jsonl"), (40, "checkpoint-1 in ")]
)
def test_a_disk_that_fills_ends_a_run_in_one_line(size, named, ours, disk):
    trainer = ours(letters, ROWS, folder="disk", **SAVED)
    with_room = disk(size)
    with pytest.raises(WriteError) as caught:
        trainer.train()
    assert named in str(caught.value)
    assert str(caught.value).endswith("; 0.0 GB free); the same command starts over")
    assert checkpoints.checkpoints(with_room) == []
