"""What a run writes under way: settings without secrets, a history, a bar, the stacks of a run that hangs."""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from launching import TINY, run
from small_runs import PATH, RUN, start, two, until
from tqdm import tqdm
from waiting import in_a_fork

from grpo_math.run import bar
from grpo_math.run.history import read_lines
from grpo_math.run.log import History, Watchdog, write_config


def state(step, main=True, **more):
    return SimpleNamespace(global_step=step, is_world_process_zero=main, **more)


def test_settings_are_written_without_secrets_at_any_depth(tmp_path):
    settings = {
        "seed": 1,
        "eos_token": "<end>",
        "hub_token": "s3cr3t",
        "model_init_kwargs": {"dtype": "auto", "token": "s3cr3t"},
        "judges": [{"url": "http://localhost", "api_key": "s3cr3t"}],
    }
    write_config(
        tmp_path / "config.yaml",
        settings,
        ["a b.py", "--hub_token", "s3cr3t", "--judge-key=s3cr3t", "--lr=1", '{"token": "s3cr3t"}'],
        "NO",
        2,
    )
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written.pop("hardware")["cpus"] == os.cpu_count()
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
    file = History(tmp_path)
    lines = [{"step": step, "loss": 0.5, "reward": step / 8} for step in (1, 2)]
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    for cut in range(len(whole) + 1):
        file.path.write_text(whole[:cut])
        kept = (whole[:cut] + "\n").count("}\n")
        assert read_lines(file.path) == lines[:kept]
        file.on_train_begin(None, state(3), None)
        for line in lines[kept:]:
            file.append(line["step"], line)
        assert file.path.read_text() == whole
    file.path.write_text(f'{{"note": 1}}\n{whole}')  # by another program
    file.on_train_begin(None, state(3), None)
    assert file.path.read_text() == whole


def test_a_line_is_a_step_or_an_evaluation_of_the_main_process_and_steps_after_the_checkpoint_go(tmp_path):
    file = History(tmp_path)
    for main in (False, True):
        for logs in ({"loss": 1.0, "kl": float("nan")}, {"eval_sums_accuracy": 0.5}, {"train_runtime": 9.0}, {}, None):
            file.on_log(None, state(2, main), None, logs=logs)
        file.on_log(None, state(3, main), None, logs={"loss": 2.0})
    lines = [{"step": 2, "loss": 1.0}, {"step": 2, "eval_sums_accuracy": 0.5}, {"step": 3, "loss": 2.0}]
    for main, kept in ((False, lines), (True, lines[:2])):
        file.on_train_begin(None, state(2, main), None)
        file.on_train_end(None, state(2, main), None)
        assert read_lines(file.path) == kept
        assert (tmp_path / "training_history.json").exists() == main
    assert json.loads((tmp_path / "training_history.json").read_text()) == kept


# The bar


@pytest.mark.parametrize(
    ("terminal", "total", "seconds", "shown"),
    [
        (False, 10, 20.0, ["training:  30%", "training:  60%", "training:  90%", "training: 100%"]),
        (False, 2, 60.0, ["training:  50%", "training: 100%"]),  # the last line is not printed twice
        (True, 10, 20.0, ["\rtraining:  50%"]),
    ],
)
def test_a_log_gets_a_line_a_minute_and_the_last_and_a_terminal_gets_a_bar(
    terminal, total, seconds, shown, capsys, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with bar.Bar(total=total, desc="training", miniters=1, mininterval=0) as progress:
        for _ in range(total):
            now[0] += seconds
            progress.update()
            progress.refresh()
            tqdm.write("a line of its own")
    output = capsys.readouterr().err
    assert all(f"{text}|" in output for text in shown)
    # A log has no control characters.
    assert terminal or [line[:14] for line in output.split("\n") if line] == shown


# A run that hangs


def test_a_stall_is_told_once_and_the_next_one_again(capfd):
    with Watchdog(0.002) as watchdog:
        for _ in range(2):
            watchdog.timer.join()  # until the stall is told
            assert not watchdog.timer.is_alive()  # once
            watchdog.on_step_end(None, None, None)
    with Watchdog(0) as off:
        assert not off.timer.is_alive()
    output = capfd.readouterr().err
    assert output.count("no step has ended for 0.002 minutes") == 2
    # faulthandler escapes letters of a path that are not ASCII.
    assert output.count(f'{os.path.basename(__file__)}", line ') >= 2


def test_a_process_that_is_only_slow_is_not_harmed(capfd):
    """faulthandler's own timer crashes one that computes when it prints."""

    def deep(n):
        return n and deep(n - 1)

    def busy():
        sys.setswitchinterval(1e-4)
        with Watchdog(1e-5) as watchdog:
            for _ in range(150):
                end = time.monotonic() + 0.004
                while time.monotonic() < end:
                    os.environ.get("HOME")
                    deep(20)
                watchdog.on_step_end(None, None, None)

    assert in_a_fork(busy) == 0
    assert capfd.readouterr().err.count("no step has ended") > 3


@pytest.mark.full
def test_both_ranks_print_where_they_wait_and_the_run_goes_on(tiny, tmp_path):
    go, output = tmp_path / "go", tmp_path / "log"
    process = start(
        [
            *(*two(tmp_path, "accelerate.commands.launch"), *RUN, "--watchdog_minutes=0.1"),
            *("--model_name_or_path", tiny(), "--output_dir", str(tmp_path / "run")),
            *("--rewards", "faulty:hangs_on_one_rank"),
        ],
        output,
        PYTHONPATH=PATH,
        GO=str(go),
    )
    until(lambda: output.read_text().count("no step has ended for 0.1 minutes") == 2, process, output)
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
    run(
        [
            *(sys.executable, "-m", "grpo_math.train", "--model_name_or_path", tiny(), "--output_dir", "run", *TINY),
            *("--rewards", "accuracy", "leaks:held", "--max_steps=80", "--save_steps=20", "--save_total_limit=2"),
            *("--max_completion_length=4", "--eval_n=0", "--report_to=none"),
        ],
        cwd=tmp_path,
    )
    lines = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    for name in ("files", "threads", "children"):
        last = [line[name] for line in lines[-25:]]  # a thread of a moment is not a leak
        assert min(last) <= max(line[name] for line in lines[:40]), name
    assert lines[-1]["memory"] - lines[40]["memory"] < 16 << 20
