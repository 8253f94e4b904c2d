"""A script's `trainer.train()` leaves a run directory: reported, diagnosed, evaluated and pushed as any other run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import yaml
from datasets import Dataset
from launching import ROOT
from peft import LoraConfig
from small_trainers import letters, make
from trl import GRPOConfig, GRPOTrainer

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.evaluation import of_run
from grpo_math.report import report

ROWS = [{"prompt": f"What is {i} + 1?", "solution": str(i + 1)} for i in range(8)]


PEFT = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}
SAVED = {"max_steps": 2, "logging_steps": 1, "save_strategy": "steps", **PEFT}


@pytest.fixture(scope="module")
def folder(small, chars, tmp_path_factory):
    """A run with an evaluation before and after."""
    path = tmp_path_factory.mktemp("script") / "run"
    trainer = make(MathGRPOTrainer, MathGRPOConfig, small, chars, path, letters, ROWS, **SAVED)
    held_out = Dataset.from_list(ROWS[:4])
    before = evaluate(trainer, held_out)
    trainer.train()
    after = evaluate(trainer, held_out)
    assert before["n"] == after["n"] == 4
    return path


@pytest.mark.slow
def test_the_directory_holds_what_a_run_of_the_program_holds_and_is_reported(folder, small):
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["model_name_or_path"] == small
    assert settings["rewards"] == ["letters"]
    assert (settings["use_peft"], settings["lora_r"], settings["lora_target_modules"]) == (True, 4, ["q_proj"])
    assert {"trl", "torch", "grpo_math"} <= settings["versions"].keys()
    assert settings["command"].startswith("python ")
    assert [json.loads(line)["step"] for line in (folder / "history.jsonl").read_text().splitlines()] == [1, 2]
    assert json.loads((folder / "finished.json").read_text())["step"] == 2
    table = pandas.read_parquet(folder / "completions/completions_00002.parquet")
    golds = {row["prompt"]: row["solution"] for row in ROWS}
    assert [golds[prompt] for prompt in table["prompt"]] == table["gold"].tolist()
    assert {"step", "completion", "letters", "verdict", "advantage"} <= set(table.columns)
    assert of_run.read(str(folder)).models["trained"][1] == str(folder / "adapter")
    files = report(folder)
    assert "Held-out accuracy before and after" in files.html.read_text(encoding="utf-8")
    assert not any("missing" in note for note in files.notes)


def test_a_new_run_in_the_folder_leaves_nothing_of_the_old_one(ours, tmp_path):
    for name in ("before.json", "after.json", "finished.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions/completions_00009.parquet").write_text("old")
    ours(letters, ROWS, max_steps=1, logging_steps=1, log_completions=True, **PEFT).train()
    assert not (tmp_path / "before.json").exists()
    assert not (tmp_path / "after.json").exists()
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["completions_00001.parquet"]
    assert not (tmp_path / "adapter").exists()  # nothing is saved where saving is off


@pytest.mark.slow
def test_trls_own_trainer_can_be_evaluated_too(small, chars, tmp_path):
    trainer = make(GRPOTrainer, GRPOConfig, small, chars, tmp_path)
    evaluate(trainer, ROWS[:2])
    assert json.loads((tmp_path / "before.json").read_text())["n"] == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [({"prompt": "1 + 1?", "target": "2"}, "no gold"), ({"question": "1 + 1?", "answer": "2"}, "no prompt")],
)
def test_a_row_that_cannot_be_evaluated_is_named(row, message):
    with pytest.raises(ConfigError, match=f"row 0.*{message}.*its columns: {', '.join(row)}"):
        evaluate("embedded", [row])


@pytest.mark.full
def test_the_script_of_the_docs_runs_and_is_reported(tiny, tmp_path):
    text = (ROOT / "docs/training.md").read_text()
    (script,) = re.findall(r"^```python\n(# sums\.py\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for old, new in (('"embedded"', repr(tiny())), ("max_steps=40", "max_steps=2"), ("limit=64", "limit=4")):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "sums.py").write_text(script)
    done = subprocess.run([sys.executable, "sums.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "run      runs/sums: grpo-math report runs/sums" in done.stderr
    assert main(["report", str(tmp_path / "runs/sums")]) == 0
    assert "Held-out accuracy before and after" in Path(tmp_path / "runs/sums/report.html").read_text()
    assert yaml.safe_load((tmp_path / "runs/sums/config.yaml").read_text())["command"] == "python sums.py"
