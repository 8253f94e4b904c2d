"""What a run writes down: its settings without secrets, a history that may be cut anywhere, and the numbers in it."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import yaml

from grpo_math.run.history import number, numbers, settled
from grpo_math.run.log import History, write_config


def test_no_secret_is_written_at_any_depth_and_all_else_is(tmp_path):
    settings = {
        "seed": 1,
        "eos_token": "<end>",
        "hub_token": "s3cr3t",
        "model_init_kwargs": {"dtype": "auto", "token": "s3cr3t"},
        "judges": [{"url": "http://localhost", "api_key": "s3cr3t"}],
    }
    path = tmp_path / "config.yaml"
    write_config(path, settings, ["train.py", "--hub_token", "s3cr3t", "--judge-key=s3cr3t"], "NO", 1)
    text = path.read_text()
    assert "s3cr3t" not in text
    written = yaml.safe_load(text)
    assert written["model_init_kwargs"] == {"dtype": "auto"}
    assert written["judges"] == [{"url": "http://localhost"}]
    assert (written["seed"], written["eos_token"]) == (1, "<end>")
    assert written["command"] == "train.py --hub_token *** --judge-key=***"
    assert written["hardware"]["cpus"] == os.cpu_count()
    assert written["hardware"]["memory_gb"] > 0


def test_a_history_that_was_cut_at_any_byte_has_its_whole_lines_and_goes_on(tmp_path):
    history = History(tmp_path)
    for step in (1, 2, 3):
        history.append(step, {"loss": 0.5, "reward": step / 8})
    assert [line["step"] for line in history.lines(2)] == [2, 3]
    whole, lines = history.path.read_bytes(), history.lines()
    for cut in range(len(whole) + 1):
        history.path.write_bytes(whole[:cut])
        kept = history.lines()
        assert kept == lines[: len(kept)]
        assert len(kept) == (whole[:cut] + b"\n").count(b"}\n")
        history.on_train_begin(None, SimpleNamespace(is_world_process_zero=True, global_step=3), None)
        for line in lines[len(kept) :]:
            history.append(line.pop("step"), line)
        lines = [json.loads(line) for line in whole.splitlines()]
        assert history.path.read_bytes() == whole


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (0.5, 0.5), ("2e-4", 2e-4), (" 7 ", 7.0)]
    + [(value, None) for value in (None, True, "", "dapo", [1], {}, float("nan"), float("inf"), "nan", 10**400)],
)
def test_a_number_is_finite_or_none(value, expected):
    assert number(value) == expected
    assert type(number(value)) is type(expected)


def test_a_row_without_a_step_is_no_line():
    assert numbers({"step": "4", "reward": "x"}) == {"step": 4}
    for row in ({}, {"step": None}, {"step": float("inf")}, {"reward": 1.0}):
        assert numbers(row) is None
    assert settled([{"reward": 1.0}, {"step": 2}]) == [{"step": 2}]
    # transformers logs the figures of a step and its evaluation apart.
    assert settled([{"step": 1, "reward": 0.1}, {"step": 1, "reward": 0.2}]) == [{"step": 1, "reward": 0.2}]
