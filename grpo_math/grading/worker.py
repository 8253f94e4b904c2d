"""The program of one worker process: reads (gold, answer) frames on stdin, writes verdicts on stdout.

``python -m grpo_math.grading.worker PARENT_PID MEMORY_BYTES``. It is a plain child process that speaks JSON, and no
multiprocessing child: nothing of the user's main module is imported again, and nothing is unpickled. The address space
is limited before Math-Verify is imported, and "ready" is said after it has parsed and verified once. The kernel ends
the process with its parent; where it cannot, each job has a kernel timer that ends even a hung worker soon after.

Does not keep time for the caller: the parent's clock (pool.py) decides a timeout.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from grpo_math.grading.frames import decode, encode

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
GRACE = 2.0  # seconds past the limit after which the kernel ends a worker that nobody killed


def main() -> None:
    parent, memory = int(sys.argv[1]), int(sys.argv[2])
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they go to the whole group, and the parent has a step to finish
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not break the frames
    _limit_memory(memory)
    sys.setrecursionlimit(3000)
    try:
        from grpo_math.grading import symbolic
    except ImportError as error:
        _send(out, {"error": str(error)})
        return
    symbolic.prepare()
    _send(out, {"ready": True})
    buffer = bytearray()
    while (job := _receive(buffer, parent)) is not None:
        signal.setitimer(signal.ITIMER_REAL, job["limit"] + GRACE)
        try:
            verdict, reason = symbolic.judge(job["gold"], job["answer"], symbolic.House(*job["house"]))
        except MemoryError:
            verdict, reason = "crash", "out of memory"
        except RecursionError:
            verdict, reason = "crash", "nested too deeply"
        except Exception as error:
            verdict, reason = "crash", f"{type(error).__name__} in the worker"
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(out, {"verdict": verdict, "reason": reason, "retire": _peak_bytes() > memory // 2})


def end_with(parent: int) -> None:
    """Let the kernel kill this process as soon as its parent is gone, whatever it is busy with. Linux knows how to."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(0)


def _limit_memory(memory: int) -> None:
    if memory:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _peak_bytes() -> int:
    """The most memory that this program has held. Not getrusage's: that figure outlives exec, and so begins at the
    parent's, which in training is gigabytes."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0  # no such figure on this system: the address-space limit alone bounds a worker


def _receive(buffer: bytearray, parent: int) -> dict[str, Any] | None:
    """The next job; None where the parent closed the pipe or is gone."""
    while (job := decode(buffer)) is None:
        readable, _, _ = select.select([0], [], [], 10.0)
        if readable:
            chunk = os.read(0, 65536)
            if not chunk:
                return None
            buffer += chunk
        elif os.getppid() != parent:
            return None
    return job


def _send(out: BinaryIO, message: dict[str, Any]) -> None:
    out.write(encode(message))
    out.flush()


if __name__ == "__main__":
    main()
