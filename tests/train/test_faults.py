"""What goes wrong in a run of the real training program: it goes on as if nothing had been, or ends with one line."""

from __future__ import annotations

import hashlib
import json
import math
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from launching import ROOT, variables
from small_runs import PATH, RUN, history, two
from small_trainers import letters

from grpo_math.run import metrics
from grpo_math.run.log import History
from grpo_math.run.signals import GONE


def only(lines: list[str], word: str) -> str:
    (line,) = [line for line in lines if word in line]
    return line


# Reward functions


def raises(completions, trainer_state, **columns):
    if trainer_state.global_step == 2:
        raise KeyError("grade")
    return letters(completions)


def exits(completions, trainer_state, **columns):
    if trainer_state.global_step == 2:
        sys.exit(0)
    return letters(completions)


def not_a_number(completions, trainer_state, **columns):
    return [math.nan if trainer_state.global_step == 2 else reward for reward in letters(completions)]


@pytest.mark.parametrize(
    ("reward", "output"),
    [
        (raises, f"raised KeyError: 'grade' at {__file__}:{raises.__code__.co_firstlineno + 2}: "),
        (exits, "raised SystemExit: 0 at "),
        (not_a_number, "returned nan for row 0: "),
    ],
    ids=["raises", "exits", "not_a_number"],
)
def test_a_reward_that_fails_ends_the_run_with_one_line_and_what_is_done_in_a_checkpoint(
    reward, output, train, tmp_path
):
    code, lines = train("--save_strategy=no", reward=reward)
    assert code == 2
    line = only(lines, "error: ")
    assert line.startswith(f"error: reward function {reward.__name__} {output}")
    assert "(checkpoint-2 is saved: " in line
    assert not any("Traceback" in line for line in lines)
    assert [step[metrics.STEP] for step in history(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())["global_step"] == 2


def ranks(tiny, folder: Path, reward: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the training program in two processes."""
    words = ["--model_name_or_path", tiny(), "--output_dir", str(folder / "run"), "--rewards", f"faulty:{reward}"]
    return [*two(folder, "grpo_math.train.ranks"), *words, *RUN, *arguments], variables(PYTHONPATH=PATH)


@pytest.mark.full
@pytest.mark.parametrize(
    ("reward", "code", "output"),
    [
        ("raises_on_one_rank", 2, "reward function raises_on_one_rank raised OSError: the judge is away at "),
        (
            "exits_on_one_rank",
            1,
            "training ended with exit code 0 before it was finished: look for os._exit in what it",
        ),
    ],
)
def test_a_reward_that_fails_on_one_rank_ends_both_with_its_line_and_a_checkpoint(reward, code, output, tiny, tmp_path):
    command, environment = ranks(tiny, tmp_path, reward, "--save_steps=1")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines[0].startswith(f"error: {output}")
    assert all(line.startswith("error: another rank does not answer (") for line in lines[1:])
    assert len(list((tmp_path / "run/checkpoint-1").glob("rng_state_*"))) == 2
    assert not (tmp_path / "run/finished.json").exists()


def test_an_advantage_function_that_calls_sys_exit_0_in_a_step_ends_the_run_with_an_error(train, tmp_path, monkeypatch):
    called = []

    def leaves(rewards):
        called.append(rewards)
        if len(called) > 2:  # after the check
            sys.exit(0)
        return rewards - rewards.nanmean(dim=1, keepdim=True)

    module = ModuleType("own_advantage")
    module.leaves = leaves
    monkeypatch.setitem(sys.modules, "own_advantage", module)
    code, lines = train("--baseline", "own_advantage:leaves")
    assert code == 2
    assert "something that training calls has ended it by sys.exit(0): raise" in only(lines, "error: ")
    assert not (tmp_path / "run/finished.json").exists()


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 75, "stopped: the same command starts again, and continues from its last checkpoint"),
    ],
)
def test_a_run_that_is_ended_before_its_first_step_has_a_code_and_a_line(number, code, line, train, monkeypatch):
    monkeypatch.setattr("grpo_math.train.program.check_weights", lambda _: signal.raise_signal(number))
    assert train() == (code, [line])


# The network

NETWORKS = """
trap 'kill $(jobs -p)' EXIT
run=$0; mkfifo "$run.up" "$run.go"
ip link set lo up && ip link add v0 type veth peer name v1 && ip addr add 10.9.0.1/24 dev v0 && ip link set v0 up
unshare -n sh -c 'ip link set lo up; echo >"$0.up"; read x <"$0.go"; ip addr add 10.9.0.2/24 dev v1; ip link set v1 up
    GLOO_SOCKET_IFNAME=v1 exec "$@" --machine_rank 1 '"$LATER" "$run" "$@" 2>"$run.other" &
other=$!
read x <"$run.up"; ip link set v1 netns $other
echo >"$run.go"
GLOO_SOCKET_IFNAME=v0 sh -c 'exec "$@" --machine_rank 0 '"$LATER" sh "$@" &
one=$!
until [ -e "$run/checkpoint-1/files.json" ] && [ ! -e "$run/.checkpoint-1.unfinished" ] || ! kill -0 $one; do
    sleep 0.1
done
ip link set v0 down
wait $one; one=$?
wait $other; echo "$one $?"
"""


@pytest.mark.full
def test_a_rank_whose_machine_vanishes_ends_the_others_with_a_line_after_ddp_timeout(tiny, tmp_path):
    """Two network namespaces, and the cable between them is cut: nobody closes a connection."""
    if subprocess.run(["unshare", "-rn", "ip", "link", "add", "v0", "type", "veth"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    command, environment = ranks(tiny, tmp_path, "letters", "--save_steps=1", "--max_steps=500", "--ddp_timeout=10")
    at = command.index("-m", 3)
    several = ["--num_machines", "2", "--main_process_ip", "10.9.0.1", "--main_process_port", "29500"]
    environment["LATER"] = shlex.join(command[at:])
    program = ["unshare", "-rn", "sh", "-c", NETWORKS, tmp_path / "run", *command[:at], *several]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.stdout.splitlines()[-1] == f"{GONE} {GONE}", done.stderr[-4000:]
    for output in (done.stderr, (tmp_path / "run.other").read_text()):
        line = only(output.splitlines(), "error: ")
        assert line.startswith("error: another rank does not answer (")
        assert "see its machine; the same command continues from checkpoint-" in line
        assert "Traceback" not in output


# The disk


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def full(folder: Path):
    """The disk is full from now on, for the history."""
    (folder / "history.jsonl").rename(folder / "kept.jsonl")
    (folder / "history.jsonl").symlink_to("/dev/full")


def limited(size: int):
    """No file may grow beyond ``size``, which writers meet as they meet a full disk: a write fails in the middle."""

    def limit(folder: Path):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    return limit


@pytest.fixture
def limits():
    """Those of this process for the size of a file; they hold again after the test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield before
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "output"),
    [
        (full, "No space left on device; "),
        (limited(1 << 15), "File too large"),  # in the weights
    ],
    ids=["history", "weights"],
)
def test_a_write_that_fails_is_one_line_and_the_run_goes_on_from_the_checkpoint_before(
    fault, output, train, limits, tmp_path
):
    folder, before = tmp_path / "run", []

    def reward(completions, trainer_state, **columns):
        if trainer_state.global_step == 2 and not before:
            before.append(hashes(folder / "checkpoint-2"))
            fault(folder)
        return letters(completions)

    code, lines = train("--save_steps=1", "--save_total_limit=2", reward=reward)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    line = only(lines, "error: ")
    assert line.startswith(f"error: a file in {folder} could not be written (")
    assert output in line
    assert line.endswith(" GB free); the same command continues from checkpoint-2")
    assert not any("Traceback" in line for line in lines)
    assert hashes(folder / "checkpoint-2") == before[0]
    if fault is full:
        (folder / "kept.jsonl").rename(folder / "history.jsonl")
        with open(folder / "history.jsonl", "a") as file:
            file.write('{"step": 3, "lo')
    assert [line[metrics.STEP] for line in History(folder).lines()][:2] == [1, 2]
    code, lines = train("--resume_from_checkpoint", folder / "checkpoint-2", reward=reward)
    assert code == 0, lines
    assert [line[metrics.STEP] for line in history(folder)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["file/run", "file"])
def test_a_folder_that_cannot_be_written_is_refused_before_weights_load(name, train, tmp_path):
    (tmp_path / "file").write_text("")
    code, (line,) = train("--model_name_or_path", "no/such/model", output_dir=tmp_path / name)
    assert code == 2
    assert line.startswith(f"error: output_dir='{tmp_path / name}' ")
    assert line.endswith(": name another folder")
