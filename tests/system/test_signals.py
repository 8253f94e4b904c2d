"""A run that is asked to stop, on real processes: it saves after its step, says how it goes on, and with which code."""

import contextlib
import os
import signal
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from small_model import small
from small_runs import STEPS, ends, history, rank, settings, start, steps_done, two, until
from small_trainers import letters, train
from transformers import TrainerControl
from waiting import alive, in_a_fork

from grpo_math.run.checkpoints import checkpoint_step
from grpo_math.run.log import StopOnSignal
from grpo_math.system.signals import (
    EX_TEMPFAIL,
    INTERRUPTED,
    STOPPING,
    Stop,
    Stopped,
    ended_by_signals,
    leave_lost_terminal,
    no_silent_exit,
    stopping,
)

__all__ = ["small", "train"]  # fixtures; a conftest.py would make the other files of this package wait for torch


def saved_after(run_dir, output, of=f"Stopped after step {{}} of {STEPS}"):
    """Hold a run that has stopped to its checkpoint, its history and its line."""
    step = history(run_dir)[-1]["step"]
    assert checkpoint_step(run_dir / f"checkpoint-{step}") == step
    assert output.count(f"{of.format(step)}; the same command continues from checkpoint-{step}.") == 1
    assert [line["step"] for line in history(run_dir)] == list(range(1, step + 1))
    assert not (run_dir / "finished.json").exists()


# The signals alone


@pytest.mark.parametrize("number", [*STOPPING, signal.SIGINT])
def test_a_signal_ends_the_run_unless_a_step_is_under_way_and_a_second_ctrl_c_ends_that(number, capfd):
    code, ending = (INTERRUPTED, KeyboardInterrupt) if number == signal.SIGINT else (EX_TEMPFAIL, Stopped)
    with pytest.raises(ending), stopping() as stop:
        signal.raise_signal(number)
    for ranks, lines in (({"RANK": "1"}, 0), ({"RANK": "0"}, 1), ({}, 1)):
        with patch.dict(os.environ, ranks), stopping() as stop:
            stop.begin()
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            assert stop.code == code
            if number == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(number)
            with pytest.raises(ending):
                stop.end()
        assert capfd.readouterr().err.count("topping after this step, with a checkpoint") == lines


def test_a_forked_helper_dies_of_the_signal():
    with stopping() as stop:
        stop.begin()
        assert in_a_fork(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
        assert not stop.code


def test_what_was_started_is_stopped_undisturbed_when_a_signal_ends_the_block():
    before, stopped = [signal.getsignal(number) for number in STOPPING], []

    def stop():
        signal.raise_signal(signal.SIGUSR1)
        stopped.append("all")

    stack = contextlib.ExitStack()
    stack.callback(stop)
    with pytest.raises(SystemExit) as ended, ended_by_signals(3), stack:
        signal.raise_signal(signal.SIGTERM)
    assert (ended.value.code, stopped) == (3, ["all"])
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_output_to_a_terminal_that_hung_up_goes_nowhere_and_any_other_stays(tmp_path):
    def outputs():
        terminal, theirs = os.openpty()
        os.dup2(theirs, 1)
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 2)
        leave_lost_terminal()
        assert os.isatty(1)
        os.close(terminal)
        leave_lost_terminal()
        assert [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)] == [os.devnull, str(tmp_path / "log")]

    assert in_a_fork(outputs) == 0


def test_os_exit_0_of_this_process_is_an_error_and_of_a_fork_or_with_another_code_is_not(capfd):
    def leave(code):
        with no_silent_exit():
            os._exit(code + in_a_fork(lambda: 0))

    assert [in_a_fork(lambda code=code: leave(code)) for code in (0, 5)] == [1, 5]
    assert capfd.readouterr().err == (
        "error: training ended with exit code 0 before it was finished: look for os._exit in what it calls\n"
    )


def test_a_signal_while_a_checkpoint_is_written_needs_no_further_step():
    args, control, stop = SimpleNamespace(world_size=1), TrainerControl(), Stop()
    callback = StopOnSignal(stop)
    callback.on_step_end(args, None, control)
    assert not control.should_training_stop
    stop.code = EX_TEMPFAIL
    callback.on_save(args, None, control)
    assert (control.should_training_stop, control.should_save, stop.heeded) == (True, False, True)


# One process


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGTERM, EX_TEMPFAIL, "Stopped"),
        pytest.param(signal.SIGINT, INTERRUPTED, "Interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_step_saves_after_it_and_the_same_command_goes_on(number, code, word, train, tmp_path):
    def signalled(completions, trainer_state, **columns):
        if trainer_state.global_step == 1 and left:
            signal.raise_signal(left.pop())
        return letters(completions)

    run_dir, left = tmp_path / "run", [number]
    ended, lines = train(reward=signalled)
    assert ended == code
    saved_after(run_dir, "\n".join(lines), f"{word} after step {{}} of 4")
    _, lines = train(reward=signalled)
    assert f"Resuming from {run_dir}/checkpoint-2." in lines
    assert [line["step"] for line in history(run_dir)] == [1, 2, 3, 4]


# Two processes


@pytest.mark.full
def test_the_command_that_started_the_ranks_passes_a_signal_on_and_ends_with_its_code(tiny, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--accelerate_config", "multi_gpu"]
    # As nohup starts a run: a hangup is ignored.
    process = start(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command, *settings(tiny, run_dir)], log)
    until(lambda: steps_done(run_dir, 1), process, log)
    process.send_signal(signal.SIGHUP)
    until(lambda: steps_done(run_dir, 3), process, log)
    process.send_signal(signal.SIGUSR1)
    output = ends(process, log, EX_TEMPFAIL)
    assert "SIGHUP: stopping" not in output
    saved_after(run_dir, output)
    assert not alive(str(run_dir))


@pytest.mark.full
def test_a_signal_to_one_rank_stops_all_after_the_same_step_under_plain_accelerate_too(tiny, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    process = start([*two(tmp_path, "accelerate.commands.launch"), *settings(tiny, run_dir)], log)
    until(lambda: steps_done(run_dir, 1), process, log)
    rank(process, 1).send_signal(signal.SIGTERM)
    assert process.wait(120) == 1
    saved_after(run_dir, log.read_text())
    assert not alive(str(run_dir))
