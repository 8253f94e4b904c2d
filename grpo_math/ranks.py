"""`accelerate launch` that ends as the process that failed did: `python -m grpo_math.ranks ACCELERATE'S ARGUMENTS`.

accelerate and torch's agent answer a failed process with a page about themselves and exit code 1. The process has said
what there is to say, and its exit code means something: 2 is bad input, 130 an interrupt.

Does not choose anything: launcher.py does.
"""

from __future__ import annotations

import logging
import subprocess
import sys


def main(argv: list[str]) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(argv))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    except subprocess.CalledProcessError as error:
        code = error.returncode
    else:
        return 0
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
