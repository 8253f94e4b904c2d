"""What wandb and trackio hold after a run without a network: read back from the files that they wrote."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = """
use_cpu: true
bf16: false
gradient_checkpointing: false
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 8
learning_rate: 1.0e-3
max_steps: 2
dataset: generated:sums
eval_split: heldout
heldout_every: 2
heldout_n: 4
save_strategy: "no"
log_completions: true
num_completions_to_print: 0
project: tried
"""


def needs(tracker):
    return pytest.mark.skipif(find_spec(tracker) is None, reason=f"{tracker} is not installed")


def run(tracker, model, folder):
    """A run of two steps that reports to ``tracker``, without a key and without a network."""
    (folder / "recipe.yaml").write_text(f"{RECIPE}report_to: {tracker}\n")
    command = [sys.executable, "-m", "grpo_math.train", "--config", str(folder / "recipe.yaml")]
    command += ["--model_name_or_path", model, "--output_dir", str(folder / "run")]
    own = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **own})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "run/history.jsonl").read_text().splitlines()]


def check(told, history):
    """Every value of the history stands among what the tracker was told, as train/NAME at its step."""
    for line in history:
        for name, value in line.items():
            if name != "step":
                values = [
                    row[f"train/{name}"]
                    for row in told
                    if row.get("train/global_step") == line["step"] and f"train/{name}" in row
                ]
                assert values, (line["step"], name)
                assert values[0] == pytest.approx(value), (line["step"], name)
    assert {"heldout/accuracy", "reward", "memory/resident"} <= {name for line in history for name in line}
    assert sum("completions" in row or "completions/nrows" in row for row in told) >= 2


def wandb_rows(path):
    """The history records of a .wandb file: a LevelDB log of protobuf records, in blocks of 32 KB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@needs("wandb")
def test_wandb_holds_every_figure_of_the_history_and_the_completions(tiny, tmp_path):
    history = run("wandb", tiny(), tmp_path)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    check(list(wandb_rows(path)), history)
    tables = [json.loads(p.read_text()) for p in path.parent.glob("files/media/table/completions*.json")]
    assert {"step", "prompt", "completion", "accuracy", "advantage"} <= set(tables[0]["columns"])
    assert len(tables[0]["data"]) == 4


@needs("trackio")
def test_trackio_holds_every_figure_of_the_history_and_the_completions(tiny, tmp_path):
    history = run("trackio", tiny(), tmp_path)
    with sqlite3.connect(tmp_path / "trackio/tried.db") as database:
        told = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
    check(told, history)
    (table, *_) = [row["completions"] for row in told if "completions" in row]
    assert len(table["_value"]) == 4
