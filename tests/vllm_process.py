"""A real vLLM server for tests, whose `vllm` GRPO_MATH_VLLM names (launch/vllm_environment.sh makes one)."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
from waiting import descendants

from grpo_math.generation.server import BESIDE, Server, command, environment, make_key
from grpo_math.run.machine import free_port

VLLM = os.environ.get("GRPO_MATH_VLLM")
# 1 GB for the key-value cache, and no thread bound to a core that another test uses.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Process:
    """A vLLM server of SmolLM2 in a session of its own, which is killed whole. It has a key, in VLLM_API_KEY, as a
    run's server has."""

    extra: tuple[str, ...] = ("--enforce-eager", "--max-num-seqs", "16")

    def __init__(self, model: str, folder: Path, copies: int = 1) -> None:
        self.model, self.folder, self.copies, self.port = model, folder, copies, free_port()
        self.key_before = os.environ.get("VLLM_API_KEY")
        make_key()
        self.server = Server(f"http://127.0.0.1:{self.port}")
        self.start()
        self.server.wait(700, alive=self.alive)

    def start(self) -> None:
        options = {"dtype": "bfloat16", "max_model_length": 1024, "lora_rank": 16, "adapters": 2, "extra": self.extra}
        line = command(self.model, port=self.port, executable=str(VLLM), data_parallel=self.copies, **options)
        variables = {**os.environ, **environment(), **CPU, "PYTHONPATH": str(BESIDE)}
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                line, env=variables, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the server and the processes below it: vLLM's engine is a process of its own."""
        left = descendants(self.process.pid)  # a process below a server that has ended is not found any more
        for sent in (signal.SIGTERM, signal.SIGKILL):
            self.process.send_signal(sent)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            _, left = psutil.wait_procs(left, 20)
        assert not of_session(self.process.pid)
        if self.key_before is None:
            os.environ.pop("VLLM_API_KEY", None)


def of_session(session: int) -> list[int]:
    """The processes of a session that are not zombies."""
    results = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):  # it ended
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                results.append(process.pid)
    return results
