"""Which errors are failed writes, as Python, torch, safetensors and pyarrow really raise them, and what is said."""

from __future__ import annotations

import errno
import os
import resource

import pandas
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from grpo_math.run.disk import failed_write

NUMBERS = torch.rand(1_000_000)
WRITERS = {
    "text": lambda path: path.write_text("x" * 2_000_000),
    "parquet": lambda path: pandas.DataFrame({"a": NUMBERS}).to_parquet(path),
    "safetensors": lambda path: save_file({"a": NUMBERS}, path),
    "torch": lambda path: torch.save({"a": NUMBERS}, path),
}


@pytest.fixture
def small_files():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_fails_is_known_for_one_whoever_writes(writer, small_files, tmp_path):
    with pytest.raises((OSError, RuntimeError, SafetensorError)) as caught:
        WRITERS[writer](tmp_path / "x")
    line = str(failed_write(caught.value, tmp_path))
    assert line.startswith(f"a file in {tmp_path} could not be written (")
    assert line.endswith(" GB free); the same command starts over")
    wrapped = ValueError("while saving")
    wrapped.__cause__ = caught.value
    assert str(failed_write(wrapped, tmp_path)) == line


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_any_other_error_is_one_if_it_names_a_file_of_the_run(number, tmp_path):
    error = OSError(number, os.strerror(number), str(tmp_path / "run/history.jsonl"))
    assert f"{os.strerror(number)}: '{tmp_path}/run/history.jsonl'" in str(failed_write(error, tmp_path / "run"))
    for name in (str(tmp_path / "run2/x"), "my_problems.jsonl", None):
        assert failed_write(OSError(number, "", name), tmp_path / "run") is None
    assert failed_write(RuntimeError("CUDA error"), tmp_path / "run") is None
