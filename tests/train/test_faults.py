"""What goes wrong in a run of the real training program: it goes on as if nothing had been, or ends with one line."""

import os
import signal
import subprocess
from unittest.mock import Mock

import pytest
import torch
from launching import ROOT, variables
from small_runs import PATH, RUN, history, two
from small_trainers import letters

from grpo_math.generation.lost_server import ServerUnavailable
from grpo_math.run import metrics
from grpo_math.run.checkpoints import checkpoint_step
from grpo_math.system.signals import EX_UNAVAILABLE
from grpo_math.trainer.updates import Updates

# Reward functions


def test_a_reward_that_fails_ends_the_run_with_one_line_and_what_is_done_in_a_checkpoint(train, tmp_path):
    def judge(completions, trainer_state, **columns):
        return [{}["grade"] if trainer_state.global_step == 2 else reward for reward in letters(completions)]

    code, lines = train("--save_strategy=no", reward=judge)
    assert code == 2
    (line,) = (line for line in lines if "error: " in line)
    assert line.startswith(f"error: reward function judge raised KeyError: 'grade' at {__file__}:")
    assert "(checkpoint-2 is saved: " in line
    assert not any("Traceback" in line for line in lines)
    assert [step[metrics.STEP] for step in history(tmp_path / "run")] == [1, 2]
    assert checkpoint_step(tmp_path / "run/checkpoint-2") == 2


@pytest.mark.full
def test_a_reward_that_fails_on_one_rank_ends_both_with_its_line_and_a_checkpoint(tiny, tmp_path):
    done = subprocess.run(
        [
            *(*two(tmp_path, "grpo_math.train.ranks"), *RUN, "--save_steps=1", "--model_name_or_path", tiny()),
            *("--output_dir", str(tmp_path / "run"), "--rewards", "faulty:raises_on_one_rank"),
        ],
        env=variables(PYTHONPATH=PATH),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines[0].startswith("error: reward function raises_on_one_rank raised OSError: the judge is away at ")
    assert all(line.startswith("error: another rank does not answer (") for line in lines[1:])
    assert len(list((tmp_path / "run/checkpoint-1").glob("rng_state_*"))) == 2
    assert not (tmp_path / "run/finished.json").exists()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SystemExit(0), 2, "something that training calls has ended it by sys.exit(0): raise"),
        (
            RuntimeError("gloo: closed"),
            EX_UNAVAILABLE,
            "another rank does not answer (gloo: closed): see its machine; the same",
        ),
        (ServerUnavailable("no vLLM server answers"), EX_UNAVAILABLE, "no vLLM server answers"),
        (
            torch.OutOfMemoryError("CUDA"),
            2,
            "out of memory in an update of one completion, 147 tokens with its prompt: ",
        ),
    ],
)
def test_what_ends_a_step_ends_the_run_with_a_code_and_a_line(error, code, line, train, tmp_path, monkeypatch):
    monkeypatch.setattr(Updates, "loss_of", Mock(side_effect=error))
    ended, lines = train()
    assert ended == code
    (printed,) = (printed for printed in lines if "error: " in printed)
    assert printed.startswith(f"error: {line}")
    assert not (tmp_path / "run/finished.json").exists()


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 75, "stopped: the same command starts again, and continues from its last checkpoint"),
    ],
)
def test_a_run_that_is_ended_before_its_first_step_has_a_code_and_a_line(number, code, line, train):
    assert train(reward=lambda **_: signal.raise_signal(number)) == (code, [line])


def test_os_exit_0_in_training_is_no_success(train, monkeypatch):
    monkeypatch.setattr(os, "_exit", Mock(side_effect=KeyboardInterrupt))
    train(reward=lambda **_: os._exit(0))
    os._exit.assert_called_once_with(1)


# The disk
