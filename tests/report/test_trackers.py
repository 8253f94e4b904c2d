"""What wandb and trackio hold after a run without a network: read back from the files that they wrote."""

import json
import os
import sqlite3
import subprocess
import sys
from unittest.mock import Mock

import pytest
from launching import ROOT
from small_runs import history

from grpo_math.generation.embedded import cache_dir
from grpo_math.report.trackers import Trackers

pytest.importorskip("trackio")
pytest.importorskip("wandb")
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
report_to: [wandb, trackio]
"""


def test_the_users_variables_win_and_the_settings_come_without_secrets(tmp_path, monkeypatch, capsys):
    trackers = {name: Mock() for name in ("wandb", "trackio")}
    for name, module in trackers.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "WANDB_PROJECT": "mine"})
    settings = {"hub_token": SECRET, "seed": 1, "folder": tmp_path, "project": "ours"}
    Trackers(["wandb", "trackio"], tmp_path, settings).on_train_begin(None, None, None)
    assert [os.environ[f"WANDB_{name}"] for name in ("PROJECT", "DIR", "MODE", "CONSOLE")] == [
        *("mine", str(tmp_path), "offline", "off")
    ]
    assert "wandb    offline (there is no key" in capsys.readouterr().err
    logged = {"seed": 1, "folder": str(tmp_path), "project": "ours"}
    trackers["wandb"].config.update.assert_called_once_with(logged, allow_val_change=True)
    trackers["trackio"].config.update.assert_called_once_with(logged)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The folder of a run of two steps that reports to both trackers and has no key. Nobody answers its questions."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "recipe.yaml").write_text(RECIPE)
    command = [
        *(sys.executable, "-m", "grpo_math.train", "--config", str(folder / "recipe.yaml"), "--hub_token", SECRET),
        *("--model_name_or_path", tiny(), "--output_dir", str(folder / "run")),
    ]
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))},
        "NETRC": str(folder / "netrc"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "HOME": str(folder),
        "GRPO_MATH_CACHE": str(cache_dir()),
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return folder


def told_as(name):
    """The name that transformers gives a metric of the history."""
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"


def test_wandb_without_a_key_stays_offline_and_holds_all_that_the_run_directory_does(run):
    (path,) = run.glob("run/wandb/offline-run-*/run-*.wandb")
    written = path.read_bytes()
    names = {told_as(name) for line in history(run / "run") for name in line if name != "step"}
    assert {"eval/generated_sums_accuracy", "train/reward", "train/memory/resident"} <= names
    assert [word for word in (*names, "tried", "generated:sums") if word.encode() not in written] == []
    tables = [json.loads(p.read_text()) for p in path.parent.glob("files/media/table/completions*.json")]
    assert {"step", "prompt", "completion", "accuracy", "advantage"} <= set(tables[0]["columns"])
    assert [len(table["data"]) for table in tables] == [4] * len(tables)
    assert SECRET.encode() not in written + b"".join(p.read_bytes() for p in path.parent.glob("files/*.json"))


def test_trackio_holds_every_figure_of_the_history_and_the_completions(run):
    with sqlite3.connect(run / "trackio/tried.db") as database:
        told = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
        (config, *_) = [json.loads(row) for (row,) in database.execute("select config from configs")]
    for line in history(run / "run"):
        step = line.pop("step")
        of_step = [row for row in told if row.get("train/global_step") == step]
        for name, value in line.items():
            assert next(row[told_as(name)] for row in of_step if told_as(name) in row) == pytest.approx(value), name
    assert {len(row["completions"]["_value"]) for row in told if "completions" in row} == {4}
    assert (config["dataset"], config["learning_rate"]) == ("generated:sums", 1e-3)
