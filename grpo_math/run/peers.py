"""Each rank watches the other ranks of its machine, and ends if one of them was killed.

Over gloo a collective raises if a rank is missing. Over NCCL it may wait until ``ddp_timeout``, in C++, where no signal
handler of Python runs. So a thread of each rank watches the processes of the others (pidfd_open(2)). If one was killed,
the lowest rank that is left names it in one line, and all end with exit code 69. A rank that ends by itself has printed
the reason and left its exit code in a note (memfd_create(2)); the others end with the same code.

torch's elastic agent notices a killed rank too, but not every run has an agent. Under plain `accelerate launch` the
agent waits 30 seconds before it ends the ranks that wait in C++.

Does not watch ranks on other machines, and works on Linux only. There a lost rank shows as the error of a collective
(`unanswered`), after ``ddp_timeout`` if the machine or the network is gone.
"""

import contextlib
import os
import secrets
import select
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed import DistError, distributed_c10d

from grpo_math.run.redact import one_line
from grpo_math.run.signals import GONE

TOKEN = 16  # bytes of a note that identify its rank; the exit code follows
PAUSE = 1.0  # seconds until torch's agent has seen that it was the other rank that was killed
PATIENCE = 3.0  # seconds for a rank to end by itself after another has


class Peer(NamedTuple):
    rank: int
    pid: int
    process: int  # its pidfd: readable once the process has ended
    note: int

    def gone(self, seconds: float = 0.0) -> bool:
        return bool(select.select([self.process], [], [], seconds)[0])

    def code(self) -> int | None:
        """Return the exit code, or None if the rank was killed."""
        code = os.pread(self.note, 1, TOKEN)
        return code[0] if code else None


class Peers:
    """The other ranks of this machine: none before `watch`, or if the run has one process."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self._left = threading.Event()

    def watch(self, advice: Callable[[], str], ddp_timeout: float = 1800.0) -> None:
        """Watch the others. All ranks have to call this together.

        ``advice`` returns how to resume the run, for the end of the line about a rank that was killed.
        """
        state = PartialState()
        if state.num_processes > 1 and state.backend == "gloo":  # transformers passes it on for GPUs alone
            distributed_c10d._set_pg_timeout(timedelta(seconds=ddp_timeout))
        if state.num_processes == 1 or sys.platform != "linux":
            return
        self.rank, self.advice = state.process_index, advice
        token = secrets.token_bytes(TOKEN)
        self._note = os.memfd_create("grpo_math")
        os.write(self._note, token)
        all_ranks: Any = gather_object([(self.rank, os.getpid(), self._note, token)])
        self.peers = [peer for rank in all_ranks if rank[3] != token and (peer := _local_peer(*rank))]
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def leave(self, code: int) -> None:
        """Report that this rank ends with ``code``. If another rank was killed, end the process here."""
        if self.peers and not self._left.is_set():
            if code and any(peer.gone() and peer.code() is None for peer in self.peers):
                self._thread.join()
            os.write(self._note, bytes([code]))
            self._left.set()

    def broken(self, seconds: float = 0.0) -> bool:
        """Return True if a rank has ended before it was done. Wait up to ``seconds`` for that."""
        until = time.monotonic() + seconds
        while not (lost := any(peer.gone() and peer.code() != 0 for peer in self.peers)) and time.monotonic() < until:
            time.sleep(0.02)
        return lost

    def _watch(self) -> None:
        while not self._left.wait(0.2):
            for peer in [peer for peer in self.peers if peer.gone() and peer.code() != 0]:
                code = peer.code()
                if code is None:
                    time.sleep(PAUSE)
                    if self.rank < min((other.rank for other in self.peers if not other.gone()), default=sys.maxsize):
                        lost = f"rank {peer.rank} (process {peer.pid}) was killed or has crashed"
                        advice = f"{self.advice()} (the kernel's log, dmesg, tells whether memory had run out)"
                        os.write(2, f"\nerror: {lost}, and the others cannot go on without it: {advice}\n".encode())
                    os._exit(GONE)
                if not self._left.wait(PATIENCE):
                    os._exit(code)


def unanswered(error: BaseException | None) -> str | None:
    """Return the message of a collective that another rank did not answer, in one line; None for any other error."""
    while error is not None:
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return one_line(error)
        error = error.__cause__ or error.__context__
    return None


def _local_peer(rank: int, pid: int, note: int, token: bytes) -> Peer | None:
    """Return the rank as a process of this machine; None if it runs elsewhere or in another PID namespace."""
    with contextlib.suppress(OSError):
        copy = os.open(f"/proc/{pid}/fd/{note}", os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            if os.pread(copy, TOKEN, 0) == token:
                return Peer(rank, pid, os.pidfd_open(pid), copy)
        os.close(copy)
    return None
