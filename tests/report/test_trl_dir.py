"""`grpo-math report` on a folder that stock TRL wrote, without grpo_math."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
from datasets import Dataset
from small_trainers import config
from trl import GRPOConfig, GRPOTrainer

from grpo_math.cli import main
from grpo_math.report import trl_dir


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


def test_it_gets_a_page_with_plots_and_completions_and_no_pickle_is_opened(copy, tiny, capsys, monkeypatch):
    assert (copy / "checkpoint-4/training_args.bin").exists()
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    assert main(["report", str(copy), "--json"]) == 0
    output = capsys.readouterr()
    files = json.loads(output.out)
    assert [path.rpartition("/")[2] for path in files["plots"]] == ["training.png", "details.png"]
    assert "made without grpo_math: the curves are the log of checkpoint-4/trainer_state.json" in output.err
    page = (copy / "report.html").read_text(encoding="utf-8")
    for words in ("Mean of the weighted reward", "Training completions", "digits", "lora_r", tiny()):
        assert words in page
    assert "This run has no evaluation" in page
    assert "config.yaml does not say" not in page  # there is none
    lines = [line for line in trl_dir.log_of(trl_dir.state_file(copy)) if "loss" in line]
    assert [line["accuracy"] for line in lines] == [line["rewards/accuracy_reward/mean"] for line in lines]


def test_the_newest_checkpoint_counts_and_a_state_next_to_the_weights_comes_first(copy):
    assert trl_dir.state_file(copy) == copy / "checkpoint-4" / trl_dir.STATE
    shutil.copy(copy / "checkpoint-4" / trl_dir.STATE, copy)
    assert trl_dir.state_file(copy) == copy / trl_dir.STATE


@pytest.mark.parametrize("text", ["{", "[]", '{"log_history": 3}'])
def test_a_damaged_state_is_one_line(text, copy, capsys):
    (copy / "checkpoint-4" / trl_dir.STATE).write_text(text)
    assert main(["report", str(copy)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "trainer_state.json cannot be read" in line
