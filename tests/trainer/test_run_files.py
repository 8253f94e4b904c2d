"""A script's `trainer.train()` leaves a run directory: reported, diagnosed, evaluated and pushed as any other run."""

import json
import re
import sys

import pandas
import pytest
import yaml
from datasets import Dataset
from launching import ROOT, run
from peft import LoraConfig
from small_trainers import KINDS, letters

from grpo_math import evaluate
from grpo_math.errors import ConfigError
from grpo_math.evaluation import of_run
from grpo_math.report import report

ROWS = [{"prompt": f"What is {i} + 1?", "solution": str(i + 1)} for i in range(8)]


PEFT = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}
SAVED = {"max_steps": 2, "logging_steps": 1, "save_strategy": "steps", **PEFT}


@pytest.mark.slow
def test_the_directory_holds_what_a_run_of_the_program_holds_and_is_reported(ours, tmp_path):
    trainer, held_out = ours(letters, ROWS, **SAVED), Dataset.from_list(ROWS[:4])
    evaluate(trainer, held_out)
    trainer.train()
    evaluate(trainer, held_out)
    assert of_run.read(str(tmp_path)).models["trained"][1] == str(tmp_path / "adapter")
    files = report(tmp_path)
    assert "Held-out accuracy before and after" in files.html.read_text(encoding="utf-8")
    assert not any("missing" in note for note in files.notes)


@pytest.mark.parametrize("log_completions", [True, False])
def test_a_run_writes_its_settings_and_table_and_leaves_nothing_of_an_old_one(log_completions, ours, small, tmp_path):
    (tmp_path / "completions").mkdir()
    for name in ("before.json", "after.json", "finished.json", "completions/completions_00009.parquet"):
        (tmp_path / name).write_text("{}")
    rows = [{**row, "answer_format": "gsm8k"} for row in ROWS]
    ours(letters, rows, max_steps=1, logging_steps=1, log_completions=log_completions, **PEFT).train()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"config.yaml", "history.jsonl", "training_history.json", "finished.json", "completions"}
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["completions_00001.parquet"]
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    expected = {
        "model_name_or_path": small,
        "model_revision": "main",
        "rewards": ["letters"],
        "load_in_4bit": False,
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["q_proj"],
        "dataset": "data of a script",
        "prompt_template": "gsm8k",
        "learning_rate": 0.05,
    }
    assert {name: settings[name] for name in expected} == expected
    assert {"trl", "torch", "grpo_math"} <= settings["versions"].keys()
    assert json.loads((tmp_path / "finished.json").read_text()) == {"step": 1}
    table = pandas.read_parquet(tmp_path / "completions/completions_00001.parquet")
    assert {"step", "completion", "letters", "verdict", "gold", "advantage"} <= set(table.columns)
    assert table["step"].tolist() == [1] * 8


@pytest.mark.slow
def test_trls_own_trainer_can_be_evaluated_too(ours, tmp_path):
    evaluate(ours(**KINDS["trl"]), ROWS[:2])
    assert json.loads((tmp_path / "before.json").read_text())["n"] == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [({"prompt": "1 + 1?", "target": "2"}, "no gold"), ({"question": "1 + 1?", "answer": "2"}, "no prompt")],
)
def test_a_row_that_cannot_be_evaluated_is_named(row, message):
    with pytest.raises(ConfigError, match=f"row 0.*{message}.*its columns: {', '.join(row)}"):
        evaluate("embedded", [row])


@pytest.mark.full
def test_the_script_of_the_docs_runs(tiny, tmp_path):
    text = (ROOT / "docs/training.md").read_text()
    (script,) = re.findall(r"^```python\n(# sums\.py\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for old, new in (('"embedded"', repr(tiny())), ("max_steps=40", "max_steps=2"), ("limit=64", "limit=4")):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "sums.py").write_text(script)
    run([sys.executable, "sums.py"], cwd=tmp_path)
    run_dir = tmp_path / "runs/sums"
    assert {"before.json", "after.json", "adapter"} <= {path.name for path in run_dir.iterdir()}
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["command"] == "python sums.py"
