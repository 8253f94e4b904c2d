"""`grpo-math report` on a folder that stock TRL wrote, without grpo_math."""

from __future__ import annotations

import json
import shutil

import pytest
from datasets import Dataset
from small_trainers import config
from trl import GRPOConfig, GRPOTrainer

from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.report import report, trl_dir


def accuracy_reward(completions, solution, **columns):
    return [float(str(len(text))[-1] == gold) for text, gold in zip(completions, solution, strict=True)]


def digits(completions, **columns):
    return [float(sum(map(str.isdigit, text))) for text in completions]


@pytest.fixture(scope="module")
def folder(tiny, tokenizer, tmp_path_factory):
    """What a plain script with TRL's trainer leaves: two checkpoints and its table of completions."""
    from peft import LoraConfig

    path = tmp_path_factory.mktemp("plain")
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "log_completions": True}
    trainer = GRPOTrainer(
        tiny(),
        [accuracy_reward, digits],
        config(GRPOConfig, path, **settings),
        Dataset.from_list([{"prompt": f"What is {i}?", "solution": str(i)} for i in range(8)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
    )
    trainer.train()
    assert not (path / trl_dir.STATE).exists()  # only the checkpoints have one
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "plain")


def test_it_gets_a_page_with_plots_and_completions(copy, capsys):
    assert main(["report", str(copy), "--json"]) == 0
    said = capsys.readouterr()
    files = json.loads(said.out)
    assert [path.rpartition("/")[2] for path in files["plots"]] == ["training.png", "details.png"]
    assert "made without grpo_math: the curves are the log of checkpoint-4/trainer_state.json" in said.err
    page = (copy / "report.html").read_text(encoding="utf-8")
    assert "Mean of the weighted reward" in page
    assert "Training completions" in page
    assert "digits" in page
    assert "lora_r" in page
    assert "This run has no evaluation" in page
    assert "config.yaml does not say" not in page  # there is none


@pytest.mark.slow
def test_what_transformers_pickled_stays_closed(copy, monkeypatch):
    assert (copy / "checkpoint-4/training_args.bin").exists()
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    report(copy)


@pytest.mark.slow
def test_trls_accuracy_reward_is_the_accuracy(copy):
    lines = trl_dir.log_of(trl_dir.state_file(copy))
    assert [line["accuracy"] for line in lines if "loss" in line] == [
        line["rewards/accuracy_reward/mean"] for line in lines if "loss" in line
    ]


@pytest.mark.slow
def test_a_checkpoint_alone_is_enough_and_the_newest_counts(copy):
    shutil.rmtree(copy / "completions")
    shutil.rmtree(copy / "checkpoint-4")
    notes = report(copy).notes
    assert any("the log of checkpoint-2/trainer_state.json" in note for note in notes)


@pytest.mark.slow
def test_a_state_beside_the_weights_comes_first(copy):
    shutil.copy(copy / "checkpoint-4" / trl_dir.STATE, copy)
    assert any("the log of trainer_state.json" in note for note in report(copy).notes)


@pytest.mark.slow
def test_a_dead_run_gets_its_finding(copy):
    path = copy / "checkpoint-4" / trl_dir.STATE
    state = json.loads(path.read_text())
    dead = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0}
    state["log_history"] = [{"step": step, "learning_rate": 1e-5, **dead} for step in range(1, 41)]
    path.write_text(json.dumps(state))
    assert "flat_reward" in [finding.check for finding in report(copy).findings]


def test_the_model_is_named_by_the_adapter(copy, tiny):
    assert trl_dir.settings_of(trl_dir.state_file(copy))["model_name_or_path"] == tiny()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"log_history": 3}'])
def test_a_damaged_state_is_one_line(text, copy, capsys):
    (copy / "checkpoint-4" / trl_dir.STATE).write_text(text)
    assert main(["report", str(copy)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "trainer_state.json cannot be read" in line


def test_another_folder_is_refused_with_what_is_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"contains no config.yaml, .*, after.json or trainer_state.json"):
        report(tmp_path)
