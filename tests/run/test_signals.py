"""A run that is asked to stop, on real processes: it saves after its step, says how it goes on, and with which code."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import ROOT, variables
from small_runs import STEPS, ends, history, rank, settings, start, steps_done, two, until
from transformers import TrainerControl
from waiting import alive

from grpo_math.run.log import StopOnSignal
from grpo_math.run.signals import AGAIN, INTERRUPTED, STOPPING, Stop, Stopped


def saved_after(run_dir: Path, output: str) -> int:
    """The step after which a run has stopped; held to its checkpoint, its history and its line."""
    step = history(run_dir)[-1]["step"]
    state = json.loads((run_dir / f"checkpoint-{step}" / "trainer_state.json").read_text())
    assert state["global_step"] == step
    line = f"Stopped after step {step} of {STEPS}; the same command continues from checkpoint-{step}."
    assert output.count(line) == 1
    assert [line["step"] for line in history(run_dir)] == list(range(1, step + 1))
    assert not (run_dir / "adapter").exists()
    return step


# The signals alone


@pytest.mark.parametrize("number", STOPPING)
def test_with_nothing_to_finish_a_signal_ends_the_run_and_with_a_step_under_way_it_does_not(number, capfd):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as error, Stop():
        signal.raise_signal(number)
    assert error.value.code == AGAIN
    with Stop() as stop:
        stop.begin()
        for _ in range(3):
            signal.raise_signal(number)
        assert stop.code == AGAIN
        stop.heeded = True
        stop.end()
    assert signal.getsignal(number) == before
    output = capfd.readouterr().err.split("\n")
    assert output == ["", f"{number.name}: stopping after this step, with a checkpoint.", ""]


def test_a_second_ctrl_c_interrupts_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        stop.begin()
        signal.raise_signal(signal.SIGINT)
        assert stop.code == INTERRUPTED
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_after_the_last_step_was_agreed_on_ends_the_run_after_it(number, ends_with):
    with Stop() as stop:
        stop.begin()
        signal.raise_signal(number)
        with pytest.raises(ends_with):
            stop.end()


def test_a_forked_helper_dies_of_the_signal():
    with Stop() as stop:
        stop.begin()
        if not (child := os.fork()):
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop.code


def test_a_signal_while_a_checkpoint_is_written_needs_no_further_step():
    args, control = SimpleNamespace(world_size=1), TrainerControl()
    with Stop() as stop:
        callback = StopOnSignal(stop)
        callback.on_train_begin(args, None, control)
        callback.on_step_end(args, None, control)
        assert not control.should_training_stop
        signal.raise_signal(signal.SIGTERM)
        callback.on_save(args, None, control)
        assert control.should_training_stop
        assert not control.should_save
        callback.on_train_end(args, None, control)
        assert (stop.code, stop.heeded) == (AGAIN, True)


# One process


@pytest.mark.full
@pytest.mark.parametrize("command", [["grpo_math.train"], ["grpo_math.cli", "train"]])
def test_a_signal_while_torch_is_imported_has_its_code_too(command, tiny, tmp_path):
    log = tmp_path / "log"
    process = start([sys.executable, "-m", *command, *settings(tiny, tmp_path / "run")], log)
    until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), process, log)
    process.send_signal(signal.SIGUSR1)
    assert "Stopped after" not in ends(process, log, AGAIN)


@pytest.mark.full
def test_sigterm_finishes_the_step_and_the_run_goes_on(tiny, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "grpo_math.cli", "train", *settings(tiny, run_dir)]
    # As nohup starts a run: a hangup is ignored.
    process = start(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command], log)
    until(lambda: steps_done(run_dir, 1), process, log)
    process.send_signal(signal.SIGHUP)
    until(lambda: steps_done(run_dir, 3), process, log)
    process.send_signal(signal.SIGTERM)
    output = ends(process, log, AGAIN)
    assert "SIGHUP: stopping" not in output
    assert "SIGTERM: stopping after this step, with a checkpoint." in output
    assert saved_after(run_dir, output) < STEPS
    ends(start(command, log), log, 0)
    assert [line["step"] for line in history(run_dir)] == list(range(1, STEPS + 1))
    assert (run_dir / "adapter").exists()


@pytest.mark.full
def test_a_terminal_that_hangs_up_loses_no_step(tiny, tmp_path):
    """Each line to such a terminal fails, and all that the run writes goes there."""
    run_dir, (terminal, theirs) = tmp_path / "run", os.openpty()
    command = [sys.executable, "-m", "grpo_math.cli", "train", *settings(tiny, run_dir)]
    log_in = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", log_in, *command], stdin=theirs, cwd=ROOT, env=variables())
    os.close(theirs)
    output = b""
    while not steps_done(run_dir, 2):
        output += os.read(terminal, 4096) if select.select([terminal], [], [], 0.1)[0] else b""
        assert process.poll() is None, output[-4000:].decode()
    os.close(terminal)
    assert process.wait(120) == AGAIN
    step = history(run_dir)[-1]["step"]
    assert step < STEPS
    assert (run_dir / f"checkpoint-{step}").is_dir()


# Two processes


@pytest.mark.full
def test_the_command_that_started_the_ranks_passes_a_signal_on_and_ends_with_its_code(tiny, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--accelerate_config", "multi_gpu"]
    process = start([*command, *settings(tiny, run_dir)], log)
    until(lambda: steps_done(run_dir, 1), process, log)
    process.send_signal(signal.SIGUSR1)
    saved_after(run_dir, ends(process, log, AGAIN))
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
