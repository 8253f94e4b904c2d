"""A real vLLM server for tests, whose `vllm` GRPO_MATH_VLLM names (tests/vllm_environment.sh makes one)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from grpo_math.generation.vllm_process import ServerProcess
from grpo_math.generation.vllm_server import MIDDLEWARE_FOLDER, ServerSettings, environment, make_key
from grpo_math.system.machine import free_port

VLLM = os.environ.get("GRPO_MATH_VLLM")
# 1 GB for the key-value cache, and no thread bound to a core that another test uses.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@contextmanager
def serving(
    model: str, folder: Path, executable: str | None, copies: int = 1, **settings: Any
) -> Iterator[ServerProcess]:
    """Serve a model in this block. There is a key in VLLM_API_KEY, as a run's server has one."""
    options = {"dtype": "bfloat16", "max_model_length": 1024, "lora_rank": 16, "adapters": 2, **settings}
    with patch.dict(os.environ):
        make_key()
        port = free_port()
        server = ServerSettings(model=model, port=port, executable=str(executable), data_parallel=copies, **options)
        variables = {**os.environ, **environment(), **CPU, "PYTHONPATH": str(MIDDLEWARE_FOLDER)}
        process = ServerProcess(server.command(), variables, f"http://127.0.0.1:{port}", folder / "server.log")
        try:
            process.wait(700)
            yield process
        finally:
            process.stop()
