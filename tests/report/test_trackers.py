"""What wandb and trackio hold after a run without a network: read back from the files that they wrote."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_math.generation.embedded import cache_dir

pytest.importorskip("wandb")
pytest.importorskip("trackio")
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
heldout_n: 4
save_strategy: "no"
log_completions: true
num_completions_to_print: 0
project: tried
report_to: [wandb, trackio]
"""


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The folder of a run of two steps that reports to both trackers and has no key. Nobody answers its questions."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "grpo_math.train", "--config", str(folder / "recipe.yaml")]
    command += ["--hub_token", SECRET, "--model_name_or_path", tiny(), "--output_dir", str(folder / "run")]
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))}
    own = {"NETRC": str(folder / "netrc"), "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}
    own["GRPO_MATH_CACHE"] = str(cache_dir())
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**bare, **own}, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "wandb    offline (there is no key" in done.stderr
    return folder


def check(told, folder):
    """Every value of the history stands among what the tracker was told, as train/NAME at its step."""
    history = [json.loads(line) for line in (folder / "run/history.jsonl").read_text().splitlines()]
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


def config_of(path):
    """The settings that a .wandb file holds."""
    found = {}
    for record in records(path):
        changed = record.config if record.WhichOneof("record_type") == "config" else record.run.config
        found |= {item.key: json.loads(item.value_json) for item in changed.update if item.key}
    return found


def test_wandb_without_a_key_stays_offline_and_holds_all_that_the_run_directory_does(run):
    (path,) = run.glob("run/wandb/offline-run-*/run-*.wandb")
    told = [row for record in records(path) if (row := row_of(record))]
    check(told, run)
    assert {record.run.project for record in records(path) if record.WhichOneof("record_type") == "run"} == {"tried"}
    tables = [json.loads(p.read_text()) for p in path.parent.glob("files/media/table/completions*.json")]
    assert {"step", "prompt", "completion", "accuracy", "advantage"} <= set(tables[0]["columns"])
    assert len(tables[0]["data"]) == 4
    config = config_of(path)
    assert config["dataset"] == "generated:sums"
    assert config["learning_rate"] == 1e-3
    assert SECRET.encode() not in path.read_bytes() + b"".join(p.read_bytes() for p in path.parent.glob("files/*.json"))


def test_trackio_holds_every_figure_of_the_history_and_the_completions(run):
    with sqlite3.connect(run / "trackio/tried.db") as database:
        told = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
        (config, *_) = [json.loads(row) for (row,) in database.execute("select config from configs")]
    check(told, run)
    (table, *_) = [row["completions"] for row in told if "completions" in row]
    assert len(table["_value"]) == 4
    assert config["dataset"] == "generated:sums"
