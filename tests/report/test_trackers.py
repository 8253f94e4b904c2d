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
from typing import NamedTuple

import pytest

from grpo_math.generation.embedded import cache_dir

ROOT = Path(__file__).parents[2]
SECRET = "hf_abcdefghijklmnop"
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
heldout: [{data: "generated:sums", split: heldout, n: 4}]
save_strategy: "no"
log_completions: true
num_completions_to_print: 0
project: tried
"""


def needs(tracker):
    return pytest.mark.skipif(find_spec(tracker) is None, reason=f"{tracker} is not installed")


class Done(NamedTuple):
    history: list[dict]
    stderr: str


def run(tracker, model, folder, **own):
    """A run of two steps that reports to ``tracker``. Nobody answers its questions; a key it has from ``own`` alone."""
    (folder / "recipe.yaml").write_text(f"{RECIPE}report_to: {tracker}\n")
    command = [sys.executable, "-m", "grpo_math.train", "--config", str(folder / "recipe.yaml")]
    command += ["--hub_token", SECRET, "--model_name_or_path", model, "--output_dir", str(folder / "run")]
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))}
    own = {"NETRC": str(folder / "netrc"), "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder), **own}
    own["GRPO_MATH_CACHE"] = str(cache_dir())
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**bare, **own}, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    history = [json.loads(line) for line in (folder / "run/history.jsonl").read_text().splitlines()]
    return Done(history, done.stderr)


def check(told, history):
    """Every value of the history stands among what the tracker was told, as train/NAME at its step."""
    for line in history:
        for name, value in line.items():
            if name != "step":
                told_as = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"  # transformers' names
                values = [
                    row[told_as] for row in told if row.get("train/global_step") == line["step"] and told_as in row
                ]
                assert values, (line["step"], name)
                assert values[0] == pytest.approx(value), (line["step"], name)
    assert {"eval_generated_sums_accuracy", "reward", "memory/resident"} <= {name for line in history for name in line}
    assert sum("completions" in row or "completions/nrows" in row for row in told) >= 2


def records(path):
    """The records of a .wandb file: a LevelDB log of protobuf messages, in blocks of 32 KB."""
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
            yield record


def row_of(record):
    """What a call of wandb.log said; nothing for a record of another kind."""
    items = record.history.item if record.WhichOneof("record_type") == "history" else ()
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline_run(folder):
    (path,) = folder.glob("run/wandb/offline-run-*/run-*.wandb")
    return path


def config_of(path):
    """The settings that a .wandb file holds."""
    found = {}
    for record in records(path):
        changed = record.config if record.WhichOneof("record_type") == "config" else record.run.config
        found |= {item.key: json.loads(item.value_json) for item in changed.update if item.key}
    return found


@needs("wandb")
def test_wandb_without_a_key_stays_offline_and_holds_all_that_the_run_directory_does(tiny, tmp_path):
    done = run("wandb", tiny(), tmp_path)
    path = offline_run(tmp_path)
    told = [row for record in records(path) if (row := row_of(record))]
    check(told, done.history)
    assert {record.run.project for record in records(path) if record.WhichOneof("record_type") == "run"} == {"tried"}
    tables = [json.loads(p.read_text()) for p in path.parent.glob("files/media/table/completions*.json")]
    assert {"step", "prompt", "completion", "accuracy", "advantage"} <= set(tables[0]["columns"])
    assert len(tables[0]["data"]) == 4
    config = config_of(path)
    assert config["dataset"] == "generated:sums"
    assert config["learning_rate"] == 1e-3
    assert "wandb    offline (there is no key" in done.stderr
    assert SECRET.encode() not in path.read_bytes() + b"".join(p.read_bytes() for p in path.parent.glob("files/*.json"))


@pytest.mark.full
@needs("trackio")
def test_trackio_holds_every_figure_of_the_history_and_the_completions(tiny, tmp_path):
    done = run("trackio", tiny(), tmp_path)
    with sqlite3.connect(tmp_path / "trackio/tried.db") as database:
        told = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
        (config, *_) = [json.loads(row) for (row,) in database.execute("select config from configs")]
    check(told, done.history)
    (table, *_) = [row["completions"] for row in told if "completions" in row]
    assert len(table["_value"]) == 4
    assert config["dataset"] == "generated:sums"
