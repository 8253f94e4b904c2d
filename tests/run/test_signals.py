"""A run that is asked to stop, on real processes: it saves after its step, says how it goes on, and with which code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from launching import ROOT, variables
from small_runs import RUN, STEPS, ends, history, rank, settings, start, steps_done, two, until
from transformers import TrainerControl
from waiting import alive

from grpo_math.run import signals
from grpo_math.run.checkpoints import step_of
from grpo_math.run.log import StopOnSignal
from grpo_math.run.signals import AGAIN, INTERRUPTED, STOPPING, Stopped, stopping
from grpo_math.train.program import main


def saved_after(run_dir: Path, output: str, of: str = f"Stopped after step {{}} of {STEPS}") -> int:
    """Return the step after which a run has stopped; it is held to its checkpoint, its history and its line."""
    step = history(run_dir)[-1]["step"]
    assert step_of(run_dir / f"checkpoint-{step}") == step
    assert output.count(f"{of.format(step)}; the same command continues from checkpoint-{step}.") == 1
    assert [line["step"] for line in history(run_dir)] == list(range(1, step + 1))
    assert not (run_dir / "finished.json").exists()
    return step


# The signals alone


def in_a_fork(code: Callable[[], object]) -> int:
    """Run the code in a forked process, and return its exit code."""
    if not (child := os.fork()):
        status = 99
        with contextlib.suppress(BaseException):
            status = int(code() or 0)
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [*STOPPING, signal.SIGINT])
def test_with_nothing_to_finish_a_signal_ends_the_run_and_with_a_step_under_way_it_does_not(number, capfd, monkeypatch):
    before = signal.getsignal(number)
    code, ending = (INTERRUPTED, KeyboardInterrupt) if number == signal.SIGINT else (AGAIN, Stopped)
    with pytest.raises(ending), stopping() as stop:
        signal.raise_signal(number)
    for number_of_rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", number_of_rank)
        with stopping() as stop:
            stop.begin()
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            assert stop.code == code
            with pytest.raises(ending):
                stop.end()
        assert capfd.readouterr().err.count("topping after this step, with a checkpoint") == lines
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_interrupts():
    with stopping() as stop:
        stop.begin()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


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

    with pytest.raises(SystemExit) as ended, signals.ended_by_signals(3), contextlib.ExitStack() as stack:
        signal.raise_signal(stack.callback(stop) and signal.SIGTERM)
    assert (ended.value.code, stopped) == (3, ["all"])
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_output_to_a_terminal_that_hung_up_goes_nowhere_and_any_other_stays(tmp_path):
    def outputs():
        terminal, theirs = os.openpty()
        os.dup2(theirs, 1)
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 2)
        signals.leave_lost_terminal()
        stays = os.isatty(1)
        os.close(terminal)
        signals.leave_lost_terminal()
        names = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
        return 7 if stays and names == [os.devnull, str(tmp_path / "log")] else 1

    assert in_a_fork(outputs) == 7


def test_os_exit_0_of_this_process_is_an_error_and_of_a_fork_or_with_another_code_is_not(capfd):
    def leave(code: int) -> None:
        with signals.no_silent_exit():
            os._exit(code + in_a_fork(lambda: 0))

    before = os._exit
    assert [in_a_fork(lambda code=code: leave(code)) for code in (0, 5)] == [1, 5]
    with signals.no_silent_exit():
        assert os._exit is not before
    assert os._exit is before
    line = "error: training ended with exit code 0 before it was finished: look for os._exit in what it calls\n"
    assert capfd.readouterr().err == line


def test_a_signal_while_a_checkpoint_is_written_needs_no_further_step():
    args, control = SimpleNamespace(world_size=1), TrainerControl()
    with stopping() as stop:
        callback = StopOnSignal(stop)
        callback.on_train_begin(args, None, control)
        callback.on_step_end(args, None, control)
        signal.raise_signal(signal.SIGTERM)
        assert not control.should_training_stop
        callback.on_save(args, None, control)
        callback.on_train_end(args, None, control)
    assert (control.should_training_stop, control.should_save) == (True, False)
    assert (stop.code, stop.heeded) == (AGAIN, True)


# One process


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, AGAIN, "Stopped"), (signal.SIGINT, INTERRUPTED, "Interrupted")]
)
def test_a_signal_in_a_step_saves_after_it_and_the_same_command_goes_on(
    number, code, word, small, tmp_path, monkeypatch, capfd
):
    run_dir, left = tmp_path / "run", [number]

    def signalled(completions, trainer_state, **columns):
        if trainer_state.global_step == 1 and left:
            signal.raise_signal(left.pop())
        return [float(len(str(completion)) + n % 3) for n, completion in enumerate(completions)]

    module = ModuleType("mine")
    module.signalled = signalled
    monkeypatch.setitem(sys.modules, "mine", module)
    command = ["--model_name_or_path", small, "--output_dir", str(run_dir), *RUN, "--rewards=mine:signalled"]
    assert main(command) == code
    assert saved_after(run_dir, capfd.readouterr().err, f"{word} after step {{}} of 4") == 2
    assert main(command) == 0
    assert f"Going on from {run_dir}/checkpoint-2." in capfd.readouterr().err
    assert [line["step"] for line in history(run_dir)] == [1, 2, 3, 4]


@pytest.mark.full
@pytest.mark.parametrize("command", [["grpo_math.train"], ["grpo_math.cli", "train"]])
def test_a_signal_while_torch_is_imported_has_its_code_too(command, tiny, tmp_path):
    log = tmp_path / "log"
    process = start([sys.executable, "-m", *command, *settings(tiny, tmp_path / "run")], log)
    until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), process, log)
    process.send_signal(signal.SIGUSR1)
    assert "Stopped after" not in ends(process, log, AGAIN)


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
    # As nohup starts a run: a hangup is ignored.
    process = start(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command, *settings(tiny, run_dir)], log)
    until(lambda: steps_done(run_dir, 1), process, log)
    process.send_signal(signal.SIGHUP)
    until(lambda: steps_done(run_dir, 3), process, log)
    process.send_signal(signal.SIGUSR1)
    output = ends(process, log, AGAIN)
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
