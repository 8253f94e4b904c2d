"""Output of a run under way, as transformers callbacks: config.yaml, history.jsonl, the way to stop, the stacks
of a run that hangs.

Each line of the history is flushed when it is written: a run that is killed loses no step that it reported.
"""

import faulthandler
import json
import os
from pathlib import Path
from threading import Timer
from typing import Any

from transformers import TrainerCallback

from grpo_math.redact import command_line, without_secrets
from grpo_math.run import files, metrics, speed_ups
from grpo_math.run.history import numbers, read_lines
from grpo_math.system.collectives import agree_on_largest
from grpo_math.system.machine import hardware, versions
from grpo_math.system.signals import Stop
from grpo_math.system.yaml_files import as_yaml

MAX_LOG_LINES = 1000  # lines of a trainer's log_history


def write_config(path: Path, settings: dict[str, Any], argv: list[str], distributed_type: str, processes: int) -> None:
    """Write the resolved settings of a run, its machine and its versions, without tokens and keys."""
    content = {
        **without_secrets(settings),
        "distributed_type": distributed_type,
        "num_processes": processes,
        "command": command_line(argv),
        "hardware": hardware(),
        "versions": versions(),
    }
    # YAML has no type for values such as accelerate's DistributedType.
    plain = json.loads(json.dumps(content, default=str))
    files.replace_text(path, as_yaml(plain))


class History(TrainerCallback):
    """``history.jsonl``: one line for each logged step, and ``training_history.json``, the same as one array.

    Also writes the speed-ups that are off (speed_ups.py).
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "history.jsonl"
        self.earlier_steps = 0  # of earlier calls of ``train()`` by this trainer, which each begin at step 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the lines after the checkpoint, because a resumed run writes them again."""
        if state.is_world_process_zero and self.path.exists():
            lines = map(numbers, read_lines(self.path))
            last = self.earlier_steps + state.global_step
            earlier = [line for line in lines if line and line[metrics.STEP] <= last]
            files.replace_text(self.path, "".join(json.dumps(line) + "\n" for line in earlier))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        evaluated = any(name.startswith(metrics.EVAL_PREFIX) for name in logs or ())
        # transformers also logs a summary at the end (train_runtime, train_loss), which is not a step.
        if state.is_world_process_zero and logs and (metrics.LOSS in logs or evaluated):
            self.append(state.global_step, logs)
            speed_ups.write(self.path.parent)

    def append(self, step: int, values: dict[str, Any]) -> None:
        with files.writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(numbers({metrics.STEP: self.earlier_steps + step, **values})) + "\n")

    def last_step(self) -> int:
        return max((line[metrics.STEP] for line in read_lines(self.path)), default=0) if self.path.exists() else 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.path.exists():
            files.write_json(self.path.with_name("training_history.json"), read_lines(self.path))


class Watchdog(TrainerCallback):
    """Print the stacks of all threads once, on each rank, if no step ends for some minutes. The run continues.

    Watches from the entry of this context on. Each step restarts the timer. ``minutes`` 0: off. Prints nothing while C
    code holds Python's lock; torch's collectives release it.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.timer = Timer(0, bool)  # a timer that is never started

    def restart(self, *_: Any, **kwargs: Any) -> None:
        self.timer.cancel()
        if self.minutes:
            # A thread of Python, which holds the lock while it reads the stacks. faulthandler's own timer does not: it
            # would crash a process that is only slow, for example in a long evaluation.
            self.timer = Timer(60 * self.minutes, self._print_stacks)
            self.timer.daemon = True
            self.timer.start()

    def _print_stacks(self) -> None:
        # Not sys.stderr: faulthandler needs a file descriptor, and sys.stderr may be replaced.
        os.write(2, f"warning: no step has ended for {self.minutes:g} minutes; where each thread is:\n".encode())
        faulthandler.dump_traceback(file=2)

    on_train_begin = on_step_end = restart

    def __enter__(self) -> "Watchdog":
        self.restart()
        return self

    def __exit__(self, *error: object) -> None:
        self.timer.cancel()


class TrimLogHistory(TrainerCallback):
    """Keep the last `MAX_LOG_LINES` lines of the trainer's log. transformers keeps all, in memory and checkpoints.

    >>> from transformers import TrainerState
    >>> state = TrainerState(log_history=list(range(MAX_LOG_LINES + 5)))
    >>> TrimLogHistory().on_step_end(None, state, None)
    >>> len(state.log_history), state.log_history[0]
    (1000, 5)
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del state.log_history[:-MAX_LOG_LINES]


class StopOnSignal(TrainerCallback):
    """End the run after the current step, with a checkpoint, if a signal has asked for that (system/signals.py).

    With several processes it is enough if one gets the signal. All end after the same step.
    """

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._agree_to_stop():
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run now if a signal came while the checkpoint was written, without a further step."""
        if self._agree_to_stop():
            control.should_training_stop = True

    def _agree_to_stop(self) -> bool:
        # A signal may reach one rank just before this line and another rank just after. A rank that stopped alone
        # would leave the others in a collective. The largest code is Ctrl-C's.
        code = agree_on_largest(self.stop.code)
        if code:
            self.stop.code = code
            self.stop.heeded = True
        return bool(code)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.end()
