"""`accelerate launch` with the failed process's exit code: `python -m grpo_math.train.ranks ARGUMENTS`.

If a process fails, accelerate and torch's agent print a page about themselves and exit with code 1. The process has
printed the reason, and its exit code has a meaning: 2 is bad input, 75 and 130 are signals (run/signals.py).

Signals are passed on to the processes, which finish their step, however long it takes. torch's agent would kill them
after 30 seconds, and SIGUSR1 would end only the agent.

Does not choose anything: launcher.py does.
"""

import logging
import os
import signal
import subprocess
import sys

from grpo_math.run import keeper
from grpo_math.run.signals import AGAIN, GONE, INTERRUPTED, STOPPING, leave_lost_terminal

LEFT_TO_THE_AGENT = "SIGQUIT"


def main(argv: list[str]) -> int:
    module = argv[argv.index("-m") + 1] if "-m" in argv[:-1] else ""

    def pass_on(number: int, frame: object) -> None:
        leave_lost_terminal()
        if not keeper.send(module, number):  # no process has started yet
            raise SystemExit(INTERRUPTED if number == signal.SIGINT else AGAIN)

    for number in (signal.SIGINT, *STOPPING):
        signal.signal(number, pass_on)
    os.environ["PET_SIGNALS_TO_HANDLE"] = LEFT_TO_THE_AGENT  # torchrun's variable for --signals-to-handle

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(argv))
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        codes = [failure.exitcode for failure in failures]
    except subprocess.CalledProcessError as error:  # for a single process
        codes = [error.returncode]
    except SignalException as error:
        return 128 + error.sigval
    else:
        return 0
    code = next((code for code in codes if code != GONE), GONE)
    if code >= 0:
        return code
    if GONE not in codes:  # no process is left that could report it
        name = signal.Signals(-code).name
        print(f"error: training was ended by {name}: the same command starts it again", file=sys.stderr)
    return 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
