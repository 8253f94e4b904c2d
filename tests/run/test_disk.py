"""Which errors are failed writes, as Python, torch, safetensors and pyarrow really raise them, and what is said."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from grpo_math.run.disk import failed_write, naming

NUMBERS = torch.zeros(1_000_000)


def text(path: Path) -> None:
    with naming(path), open(path, "w") as file:
        file.write("x" * 2_000_000)


def parquet(path: Path) -> None:
    import pandas

    pandas.DataFrame({"a": NUMBERS + torch.rand(len(NUMBERS))}).to_parquet(path)


def save_model(path: Path) -> None:
    save_file({"a": NUMBERS}, path)


def _save_checkpoint(path: Path) -> None:
    torch.save({"a": NUMBERS}, path)


@pytest.fixture
def small_files():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("write", "output"),
    [
        (text, "FOLDER/x could not be written: File too large ("),
        (parquet, "a file in FOLDER could not be written: File too large ("),
        (save_model, "a file in FOLDER could not be written: File too large ("),
        (_save_checkpoint, "a file in FOLDER could not be written: the write failed ("),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_write_that_fails_is_known_for_one_whoever_writes(write, output, small_files, tmp_path):
    with pytest.raises((OSError, RuntimeError, SafetensorError)) as caught:
        write(tmp_path / "x")
    line = str(failed_write(caught.value, tmp_path))
    assert line.startswith(output.replace("FOLDER", str(tmp_path)))
    assert line.endswith(" GB free there); the same command starts over once there is room")
    wrapped = ValueError("while saving")
    wrapped.__cause__ = caught.value
    assert str(failed_write(wrapped, tmp_path)) == line


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_any_other_error_is_one_where_it_names_a_file_of_the_run(number, tmp_path):
    error = OSError(number, "", str(tmp_path / "run/history.jsonl"))
    output = f"run/history.jsonl cannot be read or written: {os.strerror(number)} ("
    assert output in str(failed_write(error, tmp_path / "run"))
    for name in (str(tmp_path / "run2/x"), "my_problems.jsonl", None):
        assert failed_write(OSError(number, "", name), tmp_path / "run") is None
    assert failed_write(RuntimeError("CUDA error"), tmp_path / "run") is None
