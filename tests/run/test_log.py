"""What a run writes under way: settings without secrets, a history, a bar, the stacks of a run that hangs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from launching import TINY, accelerate, run
from small_runs import PATH, RUN, promised, start, until
from small_trainers import make
from tqdm import tqdm
from transformers import AutoTokenizer

from grpo_math.checks.live import Diagnosis
from grpo_math.run import bar, metrics
from grpo_math.run.history import number, settled
from grpo_math.run.log import KEPT, History, Progress, Shortened, Watchdog, write_config
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.run_files import RunFiles
from grpo_math.trainer.trainer import MathGRPOTrainer


def state(step: int, main: bool = True, **more) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, is_world_process_zero=main, **more)


def test_settings_are_written_without_secrets_at_any_depth_and_an_old_report_goes(tmp_path):
    settings = {
        "seed": 1,
        "eos_token": "<end>",
        "hub_token": "s3cr3t",
        "model_init_kwargs": {"dtype": "auto", "token": "s3cr3t"},
        "judges": [{"url": "http://localhost", "api_key": "s3cr3t"}],
    }
    path = tmp_path / "config.yaml"
    (tmp_path / "plots").mkdir()
    for old in ("report.html", "plots/training.png"):
        (tmp_path / old).touch()
    command = ["a b.py", "--hub_token", "s3cr3t", "--judge-key=s3cr3t", "--lr=1", '{"token": "s3cr3t"}']
    write_config(path, settings, command, "NO", 2)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.yaml"]
    text = path.read_text()
    assert "s3cr3t" not in text
    written = yaml.safe_load(text)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert written.pop("hardware") == {"cpus": os.cpu_count(), "memory_gb": round(memory, 1)}
    assert written.pop("versions")["python"] == ".".join(map(str, sys.version_info[:3]))
    assert written == {
        "seed": 1,
        "eos_token": "<end>",
        "model_init_kwargs": {"dtype": "auto"},
        "judges": [{"url": "http://localhost"}],
        "distributed_type": "NO",
        "num_processes": 2,
        "command": "'a b.py' --hub_token *** --judge-key=*** --lr=1 '{}'",
    }


# The history


def test_a_history_that_was_cut_at_any_byte_has_its_whole_lines_and_goes_on(tmp_path):
    history = History(tmp_path)
    history.on_train_begin(None, state(0), None)
    lines = [{"step": step, "loss": 0.5, "reward": step / 8} for step in (1, 2, 3)]
    for line in lines:
        history.append(line["step"], line)
    assert history.lines(2) == lines[1:]
    whole = history.path.read_bytes()
    for cut in range(len(whole) + 1):
        history.path.write_bytes(whole[:cut])
        kept = (whole[:cut] + b"\n").count(b"}\n")
        assert history.lines() == lines[:kept]
        history.on_train_begin(None, state(3), None)
        for line in lines[kept:]:
            history.append(line["step"], line)
        assert history.path.read_bytes() == whole


def test_a_line_is_a_step_or_an_evaluation_of_the_main_process_and_steps_after_the_checkpoint_go(tmp_path):
    history = History(tmp_path)
    for main in (False, True):
        for logs in ({"loss": 1.0, "kl": float("nan")}, {"eval_sums_accuracy": 0.5}, {"train_runtime": 9.0}, {}, None):
            history.on_log(None, state(2, main), None, logs=logs)
        history.on_log(None, state(3, main), None, logs={"loss": 2.0})
    lines = [{"step": 2, "loss": 1.0}, {"step": 2, "eval_sums_accuracy": 0.5}, {"step": 3, "loss": 2.0}]
    for main, kept in ((False, lines), (True, lines[:2])):
        history.on_train_begin(None, state(2, main), None)
        history.on_train_end(None, state(2, main), None)
        assert history.lines() == kept
        assert (tmp_path / "training_history.json").exists() == main
    assert json.loads((tmp_path / "training_history.json").read_text()) == kept


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (0.5, 0.5), ("2e-4", 2e-4), (" 7 ", 7.0), (1e100, 1e100), (-1e100, -1e100), (1.1e100, None)]
    + [(value, None) for value in (None, True, "", "dapo", [1], {}, float("nan"), float("inf"), "nan", 10**400)],
)
def test_a_number_is_finite_or_none(value, expected):
    assert number(value) == expected
    assert type(number(value)) is type(expected)


def test_a_step_has_one_line_with_the_newest_finite_numbers():
    # transformers logs the figures of a step and its evaluation apart.
    rows = [
        {"step": "2", "reward": 0.5},
        {"reward": 9},
        {"step": 1.0, "loss": 3},
        {"step": 2, "loss": "x", "kl": "1e-3"},
    ]
    rows += [{"step": 2, "reward": 0.7, "loss": None}, {"step": float("inf")}]
    assert settled(rows) == [{"step": 1, "loss": 3}, {"step": 2, "reward": 0.7, "kl": 0.001}]
    assert [type(line["step"]) for line in settled(rows)] == [int, int]


def test_the_log_that_a_trainer_keeps_is_cut():
    kept = SimpleNamespace(log_history=list(range(KEPT + 5)))
    Shortened().on_step_end(None, kept, None)
    assert kept.log_history == list(range(5, KEPT + 5))


# A line of a real run holds what metrics.py promises, and its phases add up to the step

PHASES = (*metrics.PHASES, metrics.SECONDS_UPDATE)


@pytest.fixture
def trained(small, tmp_path):
    """``trained(**settings)`` -> the lines of a history of two steps."""

    def run(**settings):
        tokenizer = AutoTokenizer.from_pretrained(small, padding_side="left")
        settings = {"max_steps": 2, "max_completion_length": 8, "logging_steps": 1, **settings}
        trainer = make(MathGRPOTrainer, MathGRPOConfig, small, tokenizer, tmp_path, **settings)
        (history,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, RunFiles))
        trainer.train()
        return history.lines()

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "when"),
    [
        ({}, {"clip"}),
        ({"surrogate": "reinforce", "beta": 0.1, "num_iterations": 2}, {"clip", "kl"}),
        ({"loss_type": "sapo"}, set()),
        ({"pack_updates": False}, {"clip"}),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "steps_per_generation": 4}, {"clip"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_a_line_holds_exactly_what_the_table_promises(settings, when, trained):
    reused = "num_iterations" in settings or "steps_per_generation" in settings
    for i, line in enumerate(trained(**settings)):
        fresh = not (reused and i)
        assert line["step"] == i + 1
        assert set(line) == promised(when | ({"rollout"} if fresh else set()), rewards=["letters"] if fresh else [])
        assert (line[metrics.SECONDS_GENERATE] > 0) == fresh
        assert line[metrics.TOKENS_PER_SECOND] > 0
        seconds = [line[phase] for phase in PHASES if phase in line]
        assert sum(seconds) == pytest.approx(line[metrics.SECONDS_STEP], abs=1e-9)
        assert min(seconds) >= 0


@pytest.mark.slow
def test_each_phase_is_the_time_of_its_own_work(trained, monkeypatch):
    """A clock that only the slowed work moves: what a phase reports is then exact."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slowed(name, seconds):
        plain = getattr(MathGRPOTrainer.__mro__[1], name)

        def method(self, *args, **kwargs):
            now[0] += seconds
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(MathGRPOTrainer.__mro__[1], name, method)

    slowed("_generate_single_turn", 100.0)
    slowed("_calculate_rewards", 20.0)
    slowed("_compute_loss", 3.0)
    # Two passes over the rollout for the reference and the old log-probs, one inside the loss: 0.5 each.
    slowed("_get_per_token_logps_and_entropies", 0.5)
    (line,) = trained(beta=0.1, num_iterations=2, pack_updates=False, max_steps=1)
    names = (metrics.SECONDS_GENERATE, metrics.SECONDS_GRADE, metrics.SECONDS_SCORE, metrics.SECONDS_UPDATE)
    assert [line[name] for name in (*names, metrics.SECONDS_STEP)] == pytest.approx([100.0, 20.0, 1.0, 3.5, 124.5])
    assert line[metrics.TOKENS_PER_SECOND] == pytest.approx(line[metrics.TOKENS] / 124.5)


def test_a_finding_is_said_once_while_training_and_by_the_main_process_alone(tmp_path, capsys):
    history = History(tmp_path)
    main, other = (Diagnosis(history, {"max_completion_length": 64}) for _ in range(2))
    for step in range(1, 61):
        history.append(step, {metrics.TRUNCATED: 0.5, metrics.REWARD: 0.5})
        for callback, first in ((main, True), (other, False)):
            callback.on_log(None, state(step, first, max_steps=60), None, logs={metrics.LOSS: 0.0})
    main.on_train_end(None, state(60), None)
    output = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in output] == [["step 20", "warning"], ["step 40", "warning"]]
    assert "max_completion_length: 128 (truncation)" in output[0]
    assert output[1].endswith("(flat_reward)")


# The bar


def test_a_log_gets_a_line_a_minute_and_the_last_without_control_characters(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bar.time, "monotonic", lambda: now[0])
    with bar.Bar(total=10, desc="training") as progress:
        for _ in range(10):
            now[0] += 25.0
            progress.update()
            progress.refresh()
            tqdm.write("a line of its own")
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert [line[:14] for line in lines] == [f"training: {n:3}%" for n in (30, 60, 90, 100)]
    assert "\r" not in "".join(lines)


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with bar.Bar(total=10, desc="training") as progress:
        progress.update(5)
        progress.refresh()
        tqdm.write("a line of its own")
    assert capsys.readouterr().err.count("\rtraining:  50%") > 1


@pytest.mark.parametrize(("accuracy", "shown"), [(0.25, "accuracy=0.25, reward=0.50"), (0.5, "reward=0.50")])
def test_the_bar_has_room_at_80_columns_and_says_nothing_twice(accuracy, shown):
    progress, at = Progress(), state(100, max_steps=1000)  # resumed
    progress.then = 31.0  # seconds
    progress.on_train_begin(None, at, None)
    at.global_step = 550
    progress.on_step_end(None, at, None)
    for logs in ({"loss": 0.0, "accuracy": accuracy, "reward": 0.5}, {"accuracy": 0.9}, None):
        progress.on_log(None, at, None, logs=logs)
    progress.bar.start_t -= 3700
    line = tqdm.format_meter(**{**progress.bar.format_dict, "ncols": 80})
    progress.on_train_end()
    assert progress.bar.disable
    assert len(line) <= 80
    assert len(line.split("|")[1]) >= 8
    assert f"[1:01:40<1:02:11, {shown}]" in line  # the time left: 450 steps and the evaluation that follows


# A run that hangs


def test_a_stall_is_told_once_and_the_next_one_again(capfd):
    with Watchdog(0.002) as watchdog:
        for _ in range(2):
            time.sleep(0.4)  # several times as long as a stall
            watchdog.on_step_end(None, None, None)
    with Watchdog(0):
        time.sleep(0.3)
    output = capfd.readouterr().err
    assert output.count("Timeout (0:00:00.120000)!") == 2
    # faulthandler escapes letters of a path that are not ASCII.
    assert output.count(f'{Path(__file__).name}", line ') >= 2


@pytest.mark.full
def test_both_ranks_print_where_they_wait_and_the_run_goes_on(tiny, tmp_path):
    go, output = tmp_path / "go", tmp_path / "log"
    command = [*accelerate("multi_gpu", tmp_path, "--num_processes", "2"), "-m", "grpo_math.train"]
    command += ["--model_name_or_path", tiny(), "--output_dir", str(tmp_path / "run"), *RUN]
    command += ["--rewards", "faulty:hangs_on_one_rank", "--watchdog_minutes=0.1"]
    process = start(command, output, PYTHONPATH=PATH, GO=str(go), HANGS="1")
    until(lambda: output.read_text().count("Timeout (0:00:06)!") == 2, process, output)
    until(lambda: output.read_text().count("in training_step") >= 2, process, output)
    go.write_text("")
    assert process.wait(timeout=300) == 0, output.read_text()
    assert output.read_text().count("in hangs_on_one_rank") == 1


# Nothing grows with the steps

REWARD = """
import json, os, pathlib

def held(completions, trainer_state, **columns):
    with open("held.jsonl", "a") as file:
        names = {"files": "/proc/self/fd", "threads": "/proc/self/task"}
        counts = {name: len(os.listdir(folder)) for name, folder in names.items()}
        children = pathlib.Path("/proc/self/task").glob("*/children")
        counts["children"] = sum(len(path.read_text().split()) for path in children)
        counts["memory"] = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        file.write(json.dumps(counts) + "\\n")
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]
"""


@pytest.mark.full
def test_a_run_holds_no_more_files_threads_or_processes_at_its_end_than_in_its_middle(tiny, tmp_path):
    (tmp_path / "leaks.py").write_text(REWARD)
    command = [sys.executable, "-m", "grpo_math.train", "--model_name_or_path", tiny(), "--output_dir", "run", *TINY]
    command += ["--rewards", "accuracy", "leaks:held", "--max_steps=120", "--save_steps=20", "--save_total_limit=2"]
    run([*command, "--max_completion_length=4", "--eval_n=0", "--report_to=none"], cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    for name in ("files", "threads", "children"):
        last = [line[name] for line in lines[-25:]]  # a thread of a moment is not a leak
        assert min(last) <= max(line[name] for line in lines[:60]), name
    assert lines[-1]["memory"] - lines[60]["memory"] < 16 << 20
