"""A full disk, or another rank that is gone: one line, and what was saved is whole."""

import errno
import json
import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from types import SimpleNamespace

import pandas
import pytest
import torch
import waiting
from launching import ROOT, TORCHRUN, run, variables
from safetensors.torch import save_file
from small_runs import history, rank, settings, start, steps_done, two, until
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed import distributed_c10d

from grpo_math.run.checkpoints import write_manifest
from grpo_math.run.failures import LostRank, failure, limit_waiting
from grpo_math.train.ranks import GRACE

NUMBERS = torch.rand(1_000_000)
WRITERS = {
    "text": lambda path: path.write_text("x" * 2_000_000),
    "parquet": lambda path: pandas.DataFrame({"a": NUMBERS}).to_parquet(path),
    "safetensors": lambda path: save_file({"a": NUMBERS}, path),
    "torch": lambda path: torch.save({"a": NUMBERS}, path),
    "tokenizers": lambda path: Tokenizer(WordLevel({"x" * 2_000_000: 0})).save(str(path)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_fails_is_known_for_one_whoever_writes(writer, size_limit, tmp_path):
    size_limit(1_000_000)
    with pytest.raises(Exception) as caught:
        WRITERS[writer](tmp_path / "x")
    line = str(failure(caught.value, tmp_path))
    assert line.startswith(f"a file in {tmp_path} could not be written (")
    assert float(line.split("; ")[1].removesuffix(" GB free)")) < 1 << 20
    assert line.endswith(" GB free); the same command starts over")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_any_other_error_is_one_if_it_names_a_file_of_the_run(number, tmp_path):
    error = OSError(number, os.strerror(number), str(tmp_path / "run/history.jsonl"))
    assert f"{os.strerror(number)}: '{tmp_path}/run/history.jsonl'" in str(failure(error, tmp_path / "run"))
    for name in (str(tmp_path / "run2/x"), "my_problems.jsonl", None):
        assert failure(OSError(number, "", name), tmp_path / "run") is None


def test_a_collective_that_another_rank_did_not_answer_is_known_for_one(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/state_0.pt").write_text("")
    write_manifest(tmp_path / "checkpoint-3")
    after = RuntimeError("gloo: Connection closed by peer\nmore")
    wrapped = ValueError("while logging")
    wrapped.__context__ = after
    line = (
        "another rank does not answer (gloo: Connection closed by peer): see its machine; "
        "the same command continues from checkpoint-3"
    )
    assert [str(failure(error, tmp_path)) for error in (after, wrapped)] == [line, line]
    assert isinstance(failure(torch.distributed.DistBackendError("NCCL"), tmp_path), LostRank)
    assert failure(RuntimeError("CUDA error"), tmp_path) is failure(ValueError("gloo"), tmp_path) is None


@pytest.mark.parametrize(("processes", "backend", "limits"), [(2, "gloo", [7]), (2, "nccl", []), (1, "gloo", [])])
def test_ddp_timeout_counts_for_gloo_and_for_the_groups_of_deepspeed_too(processes, backend, limits, monkeypatch):
    changed, state = [], SimpleNamespace(num_processes=processes, backend=backend)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # what torch gives a group without a timeout
        monkeypatch.setattr(distributed_c10d, name, timedelta(minutes=10))
    monkeypatch.setattr("grpo_math.run.failures.PartialState", lambda: state)
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", changed.append)
    limit_waiting(7)
    assert changed == [timedelta(seconds=seconds) for seconds in limits]
    assert {distributed_c10d._get_default_timeout(kind) for kind in ("nccl", "gloo")} == {timedelta(seconds=7)}


# Ranks

# The first rank waits as one does in a collective over NCCL: no signal handler of Python runs there.
RANKS = """
import ctypes, os, pathlib, signal, time
if os.environ["RANK"] == "1":
    time.sleep(1)
    pathlib.Path("{killed}").write_text(str(time.time()))
    os.kill(os.getpid(), 9)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.CDLL(None).sleep(600)
"""


@pytest.mark.full
def test_the_others_end_with_a_line_and_the_run_goes_on_from_its_checkpoint(tiny, tmp_path):
    pytest.importorskip("deepspeed.ops")
    run_dir, log = tmp_path / "run", tmp_path / "log"
    saving = ("--max_steps=10", "--save_strategy=steps", "--save_steps=2", "--ddp_backend=gloo")
    command = [*two(tmp_path, "grpo_math.train.ranks", "zero2"), *settings(tiny, run_dir, *saving)]
    process = start(command, log)
    until(lambda: steps_done(run_dir, 3), process, log)
    rank(process, 1).kill()
    assert process.wait(120) == 128 + signal.SIGKILL
    output = log.read_text()
    assert "error: another rank does not answer (" in output
    assert "error: rank 1 (process " in output
    assert "the same command continues from checkpoint-" in output
    waiting.until(lambda: not waiting.alive(str(run_dir)))
    process = start(command, log)
    assert process.wait(300) == 0, log.read_text()[-4000:]
    assert [line["step"] for line in history(run_dir)] == list(range(1, 11))


@pytest.mark.full
def test_a_rank_that_waits_outside_of_python_is_ended_within_ten_seconds(tmp_path):
    (tmp_path / "waits.py").write_text(RANKS.format(killed=tmp_path / "killed"))
    done = subprocess.run(
        [*two(tmp_path, "grpo_math.train.ranks")[:-2], "-m", "waits"],
        env=variables(PYTHONPATH=f"{ROOT}:{tmp_path}"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert GRACE < 10
    # A loaded machine needs more to notice it; torch alone would wait for 30 seconds.
    assert time.time() - float((tmp_path / "killed").read_text()) < 25
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: rank 1 \(process \d+\) was ended by SIGKILL ", line)
    assert done.returncode == 128 + signal.SIGKILL


@pytest.mark.full
def test_work_of_a_process_may_outlast_a_collective_and_any_error_of_the_main_one_reaches_every_process(tmp_path):
    run([*TORCHRUN, str(ROOT / "tests/processes/from_main.py"), str(tmp_path)])
    main, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert main == [[1, 2], "UserError: this cannot be", "KeyError: 'nothing there'", "on", ["0", [1, 2]]]
    assert other == [*main[:2], "RuntimeError: on the main process: KeyError: 'nothing there'", *main[3:]]
