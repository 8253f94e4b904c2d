"""The training program: what a run prints and leaves."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import launching
import pytest
import yaml
from small_runs import TINY, history, promised

from grpo_math.evaluation.compare import SAME
from grpo_math.grading import Verdict
from grpo_math.run.metrics import VERDICT_PREFIX
from grpo_math.train.program import _lay_out_memory, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def train(tiny, tmp_path, capfd):
    """``train(*arguments)`` -> what a run in ``tmp_path / "run"`` prints on stdout and stderr."""

    def run(*arguments, output_dir=tmp_path / "run"):
        capfd.readouterr()
        words = ["--model_name_or_path", tiny(), "--output_dir", output_dir, *TINY, *arguments]
        assert main([str(word) for word in words]) == 0
        return capfd.readouterr()

    return run


def test_the_allocators_segments_grow_except_next_to_a_colocated_vllm(monkeypatch):
    name = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(name, "")  # so that it is restored
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    for stated, expected in (({"use_vllm": True}, None), ({}, "expandable_segments:True")):
        monkeypatch.delenv(name)
        _lay_out_memory(stated)
        assert os.environ.get(name) == expected
        monkeypatch.setenv(name, "backend:native")
        _lay_out_memory(stated)
        assert os.environ[name] == "backend:native"


@pytest.mark.full
def test_two_steps_on_real_gsm8k_rows_through_accelerate(data_dir, tiny, tmp_path):
    recipe = ROOT / "launch/configs/gsm8k_smoke_cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    command += ["-m", "grpo_math.train", "--config", str(recipe), "--output_dir", str(tmp_path / "run")]
    launching.run([*command, "--model_name_or_path", tiny(), "--max_completion_length", "24"])
    lines = history(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert {"loss", "reward", "reward_min", "reward_max", "accuracy", "grad_norm", "learning_rate"} <= set(line)
        shares = [value for name, value in line.items() if name.startswith(VERDICT_PREFIX)]
        assert sum(shares) == pytest.approx(1)
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert saved["distributed_type"] == "NO"
    assert saved["num_processes"] == 1
    assert saved["max_completion_length"] == 24, "the command line wins over the recipe"
    assert saved["versions"]["trl"].startswith("1.16")
    import pandas

    rows = pandas.read_parquet(next((tmp_path / "run/completions").glob("*.parquet")))
    asked = [message["content"] for message in rows["prompt"][0] if message["role"] == "user"][-1]
    known = {json.loads(line)["question"] for line in (data_dir / "gsm8k/train.jsonl").read_text().splitlines()}
    assert asked in known
    adapter = tmp_path / "run/adapter"
    assert (adapter / "adapter_model.safetensors").exists()


@pytest.mark.full
def test_every_logged_name_is_in_the_table_of_metrics_and_the_batch_is_said_in_a_line(train, tmp_path):
    out, _ = train("--max_steps", "1")
    (line,) = history(tmp_path / "run")
    assert set(line) == promised({"rollout", "graded", "clip"}, ["accuracy"], map(str, Verdict))
    assert "2 prompts x 2 completions = 4 = 1 CPU process x 4 rows x 1 step" in out
    # What is not said has a default that gives a verdict, and names its cost.
    output = r"before and after training 128 problems of \S+, heldout, are evaluated: 256 completions more \(eval_n: 0"
    assert re.search(output, out)
    results = [json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("before", "after")]
    assert [len(one["rows"]) for one in results] == [128, 128]
    assert list((tmp_path / "run/completions").glob("*.parquet"))


def refused(capsys, *arguments) -> str:
    """What a run that cannot work says, before it loads anything: one line."""
    assert main(["--model_name_or_path", "no/such/model", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--per_device_train_batch_size=3"], "not a whole number of groups of 2: use 4, or gradient_acc"),
        (["--dataset_limit=1"], "leaves 1 problem, and a step takes 2"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments, message, tmp_path, capsys):
    assert message in refused(capsys, *TINY, "--output_dir", tmp_path / "run", *arguments)


def test_an_evaluation_of_weights_that_accelerate_will_shard_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as accelerate launch does for fsdp2.yaml
    assert main(["--output_dir", str(tmp_path / "run"), "--eval_n=4", *TINY]) == 2
    assert "eval_n=4 needs the whole model on each process" in capsys.readouterr().err


OWN_COLUMNS = """
def by_column(completions, solution, ease, steps, **columns):
    assert set(solution) <= {"so $5$", "so $6$"} and set(ease) <= {1, None} and "prompt" not in columns
    return [float(len(str(completion)) % 7) + len(step or "") for completion, step in zip(completions, steps)]
"""


@pytest.mark.slow
def test_a_reward_gets_each_column_of_the_file_and_trls_own_reward_its_solution(train, tmp_path, monkeypatch):
    (tmp_path / "own_columns.py").write_text(OWN_COLUMNS)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"problem": "2 + 3?", "answer": "5", "solution": "so $5$", "ease": 1}]
    rows += [{"problem": "3 + 3?", "answer": "6", "solution": "so $6$", "steps": ["a", "b"]}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--dataset", tmp_path / "mine.jsonl", "--max_steps=1", "--eval_n=0", "--report_to=none"]
    words += ["--prompt_template=boxed", "--rewards", "own_columns:by_column", "trl.rewards:accuracy_reward"]
    train(*words)
    (line,) = history(tmp_path / "run")
    assert {"rewards/by_column/mean", "rewards/accuracy_reward/mean"} <= set(line)


def test_before_and_after_are_over_the_same_problems_and_the_report_is_written(train, tmp_path):
    out, err = train("--max_steps=2", "--eval_n=6", "--heldout_every=1")
    before, after = (json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("before", "after"))
    assert [row["id"] for row in before["rows"]] == [row["id"] for row in after["rows"]]
    assert before["n"] == after["n"] == 6
    assert sum(before["categories"].values()) == 6
    assert before["contamination"]["overlapping"] == 0
    assert "contamination" not in err
    assert {name: before.get(name) for name in SAME} == {name: after.get(name) for name in SAME}
    assert (tmp_path / "run/report.html").read_text().startswith("<!doctype html>")
    assert {path.name for path in (tmp_path / "run/plots").iterdir()} >= {"training.png"}
    held_out = [line for line in history(tmp_path / "run") if "heldout/accuracy" in line]
    assert [line["step"] for line in held_out] == [1, 2]
    assert not (tmp_path / "run/README.md").exists(), "TRL's card, of a base that it calls None"
    assert "95% paired interval" in out
    assert (tmp_path / "run/model/model.safetensors").exists()


@pytest.mark.full
def test_evaluating_in_between_changes_nothing_in_what_is_trained(train, tmp_path):
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    train("--max_steps=3", "--eval_n=0", output_dir=plain)
    between = ["--eval_n=4", "--heldout_every=1", "--eval_split=train", "--heldout"]
    between += [
        '{"data": "generated:sums", "n": 2}',
        '{"data": "generated:products", "n": 3, "samples": 2, "temperature": 1}',
    ]
    _, err = train("--max_steps=3", *between, output_dir=evaluated)
    weights = [(folder / "model/model.safetensors").read_bytes() for folder in (plain, evaluated)]
    assert weights[0] == weights[1]
    lines = [line for line in history(evaluated) if "eval_generated_sums_accuracy" in line]
    assert [(line["eval_generated_sums_n"], line["eval_generated_products_n"]) for line in lines] == [(2, 3)] * 3
    for figure in ("pass@2", "maj@2"):
        value, low, high = (
            lines[0][f"eval_generated_products_{figure}{end}"] for end in ("", "_ci95_low", "_ci95_high")
        )
        assert low <= value <= high
    assert "warning: contamination: 4 of 4 (100.0%) problems overlap" in err, "they are trained on"
    assert json.loads((evaluated / "after.json").read_text())["contamination"]["equal"] == 4
