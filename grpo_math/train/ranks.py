"""`accelerate launch` with the failed process's exit code: `python -m grpo_math.train.ranks ARGUMENTS`.

If a process fails, accelerate and torch's agent print a page about themselves and exit with code 1. The process has
printed the reason, and its exit code has a meaning: 2 is bad input, 75 and 130 are signals (system/signals.py). A
process that was killed could print nothing, so one line names it.

Signals are passed on to the processes, which finish their step, however long it takes. torch's agent would kill them
after 30 seconds, and SIGUSR1 would end only the agent.

launcher.py chooses the number of processes.
"""

import logging
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

from grpo_math.system import machine, supervisor
from grpo_math.system.signals import EX_TEMPFAIL, EX_UNAVAILABLE, INTERRUPTED, STOPPING, leave_lost_terminal

# Seconds from SIGTERM to SIGKILL for the others when a process has failed. Over NCCL they wait for it in C++, where no
# signal handler of Python runs.
GRACE = 5


def main(argv: list[str]) -> int:
    module = argv[argv.index("-m") + 1] if "-m" in argv[:-1] else ""

    def pass_on(number: int, frame: object) -> None:
        leave_lost_terminal()
        if not supervisor.send(module, number):  # no process has started yet
            raise SystemExit(INTERRUPTED if number == signal.SIGINT else EX_TEMPFAIL)

    for number in (signal.SIGINT, *STOPPING):
        signal.signal(number, pass_on)
    # torchrun's variable for --signals-to-handle. torch's agent would replace the handlers above; SIGQUIT has none.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"

    # Import after the handlers are set: these imports take seconds, and a signal may come meanwhile.
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # After a failure torch calls close() without a timeout, so torchrun's --shutdown-timeout has no effect on it.
    PContext.close.__defaults__ = (None, GRACE)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(argv))
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        # A process that ends with EX_UNAVAILABLE has missed another one, and that one is the reason.
        rank, failure = next((item for item in failures if item[1].exitcode != EX_UNAVAILABLE), failures[0])
        code, name = failure.exitcode, f"rank {rank} (process {failure.pid})"
    # accelerate looks for DeepSpeed before it starts the processes, which would report it.
    except ImportError:
        if find_spec("deepspeed"):
            raise
        required = machine.supported().get("deepspeed")
        version = required.specifier if required else ""
        print(
            f'error: DeepSpeed needs deepspeed, which is not installed: pip install "deepspeed{version}"',
            file=sys.stderr,
        )
        return 2
    # accelerate starts a single process without torch's agent.
    except subprocess.CalledProcessError as error:
        code, name = error.returncode, "training"
    else:
        return 0
    if code < 0:
        ended = f"{name} was ended by {signal.Signals(-code).name} (dmesg tells if memory had run out)"
        print(f"error: {ended}: the same command continues from the last checkpoint", file=sys.stderr)
    return supervisor.exit_code(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
