"""The settings that a run writes down: all of them but secrets, with what the run had and ran on."""

from __future__ import annotations

import os

import yaml

from grpo_math.run_log import write_config


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
