"""A script's `trainer.train()` leaves a run directory: reported, diagnosed, evaluated and pushed as any other run."""

import fcntl
import json
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
import transformers
import yaml
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from small_trainers import KINDS, letters
from synthetic_run import quick_to_draw
from transformers import TrainerCallback, TrainerState

from grpo_math import evaluate
from grpo_math.errors import ConfigError, RewardError
from grpo_math.evaluation import from_run
from grpo_math.problems.datasets import load_problems
from grpo_math.report import report
from grpo_math.report.run_dir import read_run
from grpo_math.run import lock, speed_ups
from grpo_math.trainer import run_files

__all__ = ["quick_to_draw"]
ROWS = [{"prompt": f"What is {i} + 1?", "solution": str(i + 1)} for i in range(8)]


PEFT = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}
SAVED = {"max_steps": 2, "logging_steps": 1, "save_strategy": "steps", **PEFT}


@pytest.mark.slow
def test_the_directory_holds_what_a_run_of_the_program_holds_and_is_reported(ours, tmp_path):
    trainer, held_out = ours(letters, ROWS, **SAVED), Dataset.from_list(ROWS[:4])
    evaluate(trainer, held_out)
    trainer.train()
    evaluate(trainer, held_out)
    assert from_run.read(str(tmp_path)).models["trained"][1] == str(tmp_path / "adapter")
    assert not (tmp_path / "adapter/README.md").exists()  # peft's card, in which nothing is filled in
    files = report(tmp_path)
    assert "Held-out accuracy before and after" in files.html.read_text(encoding="utf-8")
    assert not any("missing" in note for note in files.notes)


def test_a_speed_up_that_is_off_is_on_the_console_in_the_directory_and_on_the_page(ours, tmp_path, caplog):
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = ours(letters, ROWS, max_steps=1, logging_steps=1, **checkpointing)
    trainer.train()
    assert caplog.text.count("Switched off: ") == 1
    assert json.loads((tmp_path / speed_ups.FILE).read_text()) == {"switched_off": {"tiled MLP": ["use_reentrant"]}}
    assert "Switched off: tiled MLP (use_reentrant)." in report(tmp_path).html.read_text(encoding="utf-8")


def test_files_of_a_script_are_not_taken_for_those_of_an_earlier_run(ours, tmp_path, capsys):
    """A script may save its own settings before it trains, or train in the current folder."""
    mine = ["config.yaml", "history.jsonl", "report.html", "plots/mine.png", "completions/mine.txt", "adapter/mine.bin"]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("model: mine")
    trainer = ours(max_steps=1)
    trainer.train()
    stay = [name for name in mine if name not in ("config.yaml", "history.jsonl")]
    assert {(tmp_path / name).read_text() for name in stay} == {"model: mine"}
    assert (tmp_path / "earlier/1/config.yaml").read_text() == "model: mine"
    assert f"moved    config.yaml, history.jsonl to {tmp_path}/earlier/1\n" in capsys.readouterr().err
    ours(**SAVED).train()
    assert {(tmp_path / name).read_text() for name in stay} == {"model: mine"}
    assert [path.name for path in (tmp_path / "adapter").iterdir()] == ["mine.bin"]
    assert f"kept     {tmp_path}/adapter" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_that_starts_again_keeps_the_files_of_its_earlier_runs(ours, tmp_path, capsys):
    run_settings = {**SAVED, "save_steps": 2, "log_completions": True, "num_completions_to_print": 0}
    for number in range(3):
        trainer = ours(letters, ROWS, **{**run_settings, "max_steps": 2 - number % 2})
        evaluate(trainer, ROWS[:2])
        trainer.train()
        evaluate(trainer, ROWS[:2])
        report(tmp_path)
        mine = tmp_path / f"plots/{number}.png"
        mine.write_text("of the script")
    files = {"config.yaml", "history.jsonl", "training_history.json", "finished.json", "report.html", "adapter"}
    files |= {"before.json", "after.json", "plots", "completions"}
    for number, steps in (1, 2), (2, 1):
        earlier = tmp_path / f"earlier/{number}"
        assert {path.name for path in earlier.iterdir()} == files
        assert len(read_run(earlier).history) == len(read_run(earlier).completions) // 8 == steps
    assert {path.name for path in tmp_path.iterdir()} == {
        *files,
        "earlier",
        "checkpoint-1",
        "checkpoint-2",
        "README.md",
        ".lock",
    }
    assert {path.name for path in tmp_path.glob("plots/?.png")} == {"0.png", "1.png", "2.png"}
    lines = re.findall(rf"moved    (.*) to {tmp_path}/earlier/2\n", capsys.readouterr().err)
    assert [line.split(", ")[0] for line in lines] == ["before.json", "after.json"]
    assert {"history.jsonl", "completions/"} <= set(lines[1].split(", "))


def test_a_resumed_run_and_a_second_training_of_one_trainer_continue(ours, tmp_path, capsys):
    trainer = ours(letters, ROWS, **{**SAVED, "save_steps": 1})
    trainer.evaluate(trainer.train_dataset)
    evaluate(trainer, ROWS[:2])
    before = (tmp_path / "before.json").read_text()
    for steps in ([0, 1, 2], [0, 1, 2, 3, 4]):
        trainer.train()
        assert [line["step"] for line in read_run(tmp_path).history] == steps
        assert json.loads((tmp_path / "finished.json").read_text()) == {"step": steps[-1]}
    assert "resuming" not in capsys.readouterr().err
    resumed = ours(letters, ROWS, **SAVED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert f"resuming {tmp_path} from step 1 of 2\n" in capsys.readouterr().err
    assert [line["step"] for line in read_run(tmp_path).history] == [0, 1, 2]
    # The results of the last weights stay with a run that had ended.
    evaluate(resumed, ROWS[:2])
    ours(letters, ROWS, **SAVED).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "after.json").exists()
    assert not (tmp_path / "earlier").exists()
    assert (tmp_path / "before.json").read_text() == before


def test_a_script_holds_the_lock_of_its_folder_while_it_trains(ours, tmp_path):
    """An idle notebook does not: the lock ends with the training, however it ends."""
    locked = []

    def is_locked():
        with open(tmp_path / lock.NAME, "a") as other:  # as another process would
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def reward(completions, **columns):
        locked.append(is_locked())
        if len(locked) == 2:
            raise ValueError("wrong")
        return letters(completions)

    trainer = ours(reward, ROWS, max_steps=1)
    evaluate(trainer, ROWS[:2])
    assert not (tmp_path / lock.NAME).exists()
    trainer.train()
    assert (locked, is_locked()) == ([True], False)
    with pytest.raises(RewardError):
        trainer.train()
    assert (locked, is_locked()) == ([True, True], False)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with open(tmp_path / lock.NAME, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"output_dir=.* is in use: .* trains there: wait until it has ended"):
            ours(letters, ROWS, max_steps=1).train()
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_only_the_main_process_writes_the_directory(ours, tmp_path):
    trainer = ours(letters, ROWS)
    (writer,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, run_files.RunFiles))
    other_rank = TrainerState(max_steps=1, is_world_process_zero=False)
    for event in ("on_train_begin", "on_log", "on_train_end"):
        getattr(writer, event)(trainer.args, other_rank, None, logs={"loss": 0.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("log_completions", [True, False])
def test_a_run_writes_its_settings_and_table_and_leaves_nothing_of_an_old_one(
    log_completions, ours, small, tmp_path, capsys, monkeypatch
):
    old = {
        "before.json": '{"problems_hash": ""}',
        "after.json": '{"problems_hash": ""}',
        "finished.json": '{"step": 9}',
    }
    old |= {"completions/completions_00009.parquet": "in_format", "adapter/files.json": "{}"}
    for name, text in old.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = [{**row, "answer_format": "gsm8k"} for row in ROWS]
    trainer = ours(letters, rows, max_steps=1, logging_steps=1, log_completions=log_completions, **PEFT)
    sent = set[str]()
    monkeypatch.setattr("trackio.log", lambda values, **_: sent.update(values))
    trainer.args.report_to = ["trackio"]
    trainer.add_callback(callback := TrainerCallback())
    seen = []
    callback.on_log = lambda args, *others, **more: seen.append(args.report_to)
    trainer.train()
    assert seen == [["trackio"]] * 2, "callbacks get the script's own arguments"
    assert ("completions" in sent) == log_completions, "trackers get the table if it is asked for"
    assert f" to {tmp_path}/earlier/1\n" in capsys.readouterr().err
    assert {name: (tmp_path / "earlier/1" / name).read_text() for name in old} == old
    left = {path.name for path in tmp_path.iterdir()}
    files = {"config.yaml", "history.jsonl", "training_history.json", "finished.json"}
    assert left == {*files, "completions", "earlier", ".lock"}, "an adapter of the earlier run is not the new run's"
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["completions_00001.parquet"]
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    expected = {
        "model_name_or_path": small,
        "model_revision": "main",
        "rewards": [f"{letters.__module__}:letters"],
        "load_in_4bit": False,
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["q_proj"],
        "dataset": "data of a script",
        "prompt_template": "as_is",
        "answer_format": "gsm8k",
        "learning_rate": 0.05,
    }
    assert {name: settings[name] for name in expected} == expected
    assert {"trl", "torch", "grpo_math"} <= settings["versions"].keys()
    assert json.loads((tmp_path / "finished.json").read_text()) == {"step": 1}
    table = pandas.read_parquet(tmp_path / "completions/completions_00001.parquet")
    assert {"step", "completion", "letters", "verdict", "gold", "advantage"} <= set(table.columns)
    assert table["step"].tolist() == [1] * 8


@pytest.mark.parametrize("template", ["gsm8k", "direct"])
def test_a_run_names_the_template_that_made_its_prompts(template, ours):
    rows = Dataset.from_list(load_problems("generated:sums", template=template, limit=4))
    settings = run_files.settings_as_recipe(ours(letters, rows))
    assert (settings["prompt_template"], settings["answer_format"]) == (template, template)


def test_what_a_script_saves_or_pushes_has_the_training_arguments_without_a_token(ours, tmp_path, monkeypatch):
    trainer = ours(letters, ROWS, hub_token="hf_x")
    trainer.args.model_init_kwargs = {"token": "hf_y", "config": [{"api_key": "k"}]}
    tokens = []
    hub = SimpleNamespace(upload_folder=lambda token, **_: tokens.append(token) or Future())
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    trainer.hub_model_id, trainer.push_in_progress = "ada/sums", None
    file = Path(trainer.args.output_dir, "training_args.bin")
    for save in (trainer.save_model, lambda: trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))):
        file.unlink(missing_ok=True)
        save()
        saved = torch.load(file, weights_only=False)
        assert (saved.learning_rate, saved.hub_token) == (0.05, None)
        assert saved.model_init_kwargs == {"config": [{}]}
    assert tokens == ["hf_x"]


def test_a_script_publishes_what_trl_would(ours, tmp_path, monkeypatch):
    """Its completions and settings are published by `grpo-math push`, and only then."""
    published = {}

    def upload_folder(folder_path, ignore_patterns=(), repo_id="", **settings):
        files = (str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file())
        pushed = set(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        published.setdefault(Path(folder_path).name, []).append(pushed)
        return Future()

    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: SimpleNamespace(upload_folder=upload_folder))
    for kind in KINDS:
        trainer = ours(letters, ROWS, folder=kind, save_steps=1, **SAVED, **KINDS[kind])
        trainer.hub_model_id, trainer.push_in_progress = "ada/sums", None
        trainer.train()
        trainer._push_from_checkpoint(str(tmp_path / kind / "checkpoint-2"))
        trainer.push_in_progress = None  # which never ends here
        trainer.push_to_hub()
    assert published["ours"] == published["trl"]
    assert len(published["trl"]) == 2
    assert "adapter_model.safetensors" in published["trl"][1]


@pytest.mark.parametrize("log_completions", [True, False])
def test_no_value_that_a_script_logs_and_no_failed_write_ends_a_run(log_completions, ours, tmp_path, caplog, capsys):
    circle = {}
    circle["self"] = circle
    odd = {"mixed": [7, None, "x + 1", {}], "keys": [{(1, 2): 3}], "circle": [circle], "objects": [print, [], 1.5]}
    tables, seen = [], []

    def reward(completions, log_extra, trainer_state, **columns):
        for name, values in odd.items():
            log_extra(name, [values[row % len(values)] for row in range(len(completions))])
        if trainer_state.global_step == 1:
            tables.append(pandas.read_parquet(folder / "completions_00001.parquet"))
            folder.rename(tmp_path / "moved")
            folder.write_text("a file in place of the folder")
        return letters(completions)

    class Reads(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            seen.append(trainer._logs["extra"]["keys"][0])

    folder = tmp_path / "completions"
    trainer = ours(reward, ROWS, max_steps=2, logging_steps=1, log_completions=log_completions)
    trainer.add_callback(Reads())
    trainer.train()
    assert tables[0]["mixed"].dropna().tolist() == ["7", '"x + 1"', "{}"] * 2
    assert tables[0]["keys"][0] == '"{(1, 2): 3}"'
    assert seen[0] == {(1, 2): 3}, "a callback reads the script's own values"
    lines = {record.message.removeprefix("[RANK 0] ") for record in caplog.records if "table of" in record.message}
    assert len(lines) == 1, lines
    assert "is correct: read them" not in capsys.readouterr().err, "no reward of this script pays for correctness"


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
