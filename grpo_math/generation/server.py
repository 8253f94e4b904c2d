"""A vLLM server: the command that starts it, and a client of what training needs of it.

>>> command("Qwen/Qwen2.5-1.5B", lora_rank=20)[:5]
['vllm', 'serve', 'Qwen/Qwen2.5-1.5B', '--host', '127.0.0.1']

The server keeps to this machine unless it is told otherwise, and then has to have a key. The key travels in the
environment variable VLLM_API_KEY, on either side, and never on a command line, which every user of a machine can read.
vLLM guards the paths under /v1 with it; beside_vllm/grpo_math_key.py guards the others, above all the development
paths (VLLM_SERVER_DEV_MODE), which the sync needs and which change weights.

Does not start or stop a process, and does not import vLLM, torch or TRL.
"""

import contextlib
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import AbstractHTTPHandler, HTTPHandler, HTTPSHandler, ProxyHandler, Request, build_opener
from weakref import WeakSet

from grpo_math.errors import ConfigError, UserError
from grpo_math.run.redact import NoRedirects, is_address

SUPPORTED = ((0, 22), (0, 31))  # the first and the last minor version that TRL 1.16 works with
SPAN = " to ".join("{}.{}".format(*minor) for minor in SUPPORTED)
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
LOCAL = ("127.0.0.1", "localhost", "::1")
GUARD = "grpo_math_key.Guard"  # in the folder BESIDE, which is on the server's path
BESIDE = Path(__file__).with_name("beside_vllm")
AT_ONCE = 10.0  # seconds for a server to say that it is healthy
BUSY = (502, 503, 504)  # the server is there, and asks for patience
# Said in every request: what is left out vLLM takes from the model's generation_config.
SAMPLING = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class ServerError(UserError):
    """What a server answered instead of a result; ``status`` is HTTP's, or None where no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class Sampled(NamedTuple):
    """Completions in the order of prompts, the n of a prompt together: token ids and, of each, its log-prob."""

    token_ids: list[list[int]]
    logprobs: list[list[float | None]] | None  # None for a token whose log-prob vLLM could not compute


def command(
    model: str,
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    dtype: str = "auto",
    max_model_length: int | None = None,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    gpu_memory_utilization: float | None = None,
    lora_rank: int = 0,
    adapters: int = 1,
    seed: int = 0,
    extra: Sequence[str] = (),
    executable: str = "vllm",
) -> list[str]:
    """The `vllm serve` line that training can work with; its environment is `environment`'s.

    With ``lora_rank`` the server takes adapters of that rank or less, so many ``adapters`` in one batch; with 0 it
    takes whole weights, over NCCL, as TRL's own sync sends them. Log-probs are those of the sampled distribution
    (temperature and all), which TRL's importance correction needs.

    >>> " ".join(command("base", lora_rank=20, tensor_parallel=2))
    ... # doctest: +NORMALIZE_WHITESPACE
    'vllm serve base --host 127.0.0.1 --port 8000 --dtype auto --seed 0 --logprobs-mode processed_logprobs
     --max-logprobs -1 --tensor-parallel-size 2 --enable-lora --max-loras 1 --max-lora-rank 32'

    Raises `ConfigError` for a host that others can reach while VLLM_API_KEY is not set, and for a rank that vLLM does
    not take.
    """
    if host not in LOCAL and not key():
        reason = "lets other machines use the server, which then needs a key"
        raise ConfigError("host", host, reason, "set VLLM_API_KEY in the environment, or serve on 127.0.0.1")
    line = [executable, "serve", model, "--host", host, "--port", str(port), "--dtype", dtype, "--seed", str(seed)]
    line += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    if max_model_length is not None:
        line += ["--max-model-len", str(max_model_length)]
    if tensor_parallel > 1:
        line += ["--tensor-parallel-size", str(tensor_parallel)]
    if data_parallel > 1:  # one front end, since each keeps a list of adapters of its own
        line += ["--data-parallel-size", str(data_parallel), "--api-server-count", "1"]
    if gpu_memory_utilization is not None:
        line += ["--gpu-memory-utilization", f"{gpu_memory_utilization:g}"]
    if lora_rank:
        line += ["--enable-lora", "--max-loras", str(adapters), "--max-lora-rank", str(served_rank(lora_rank))]
    else:
        line += ["--weight-transfer-config", '{"backend": "nccl"}']
    if key():
        line += ["--middleware", GUARD]
    return [*line, *extra]


def served_rank(rank: int) -> int:
    """The smallest ``--max-lora-rank`` that an adapter of this rank fits.

    >>> served_rank(16), served_rank(17)
    (16, 32)
    """
    for served in RANKS:
        if rank <= served:
            return served
    raise ConfigError("lora_r", rank, f"is above {RANKS[-1]}, vLLM's largest", "train an adapter of lower rank")


def minor_of(version: str) -> tuple[int, int] | None:
    """The minor version, to be held against `SUPPORTED`; None for what names none.

    >>> minor_of("0.31.0+cpu"), minor_of("dev")
    ((0, 31), None)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def environment() -> dict[str, str]:
    """What the server's environment holds beside the caller's own: runtime adapters, the development paths, the key and
    the folder of its guard.

    >>> environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    'True'
    """
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
    if said := key():
        path = os.pathsep.join(filter(None, (str(BESIDE), os.environ.get("PYTHONPATH"))))
        variables |= {"VLLM_API_KEY": said, "PYTHONPATH": path}
    return variables


def make_key() -> None:
    """A key of this run's own, for the server and the training that this process starts, unless one is set."""
    os.environ["VLLM_API_KEY"] = key() or secrets.token_hex(16)


def key() -> str | None:
    """Without the line end that a key read from a file may have. `ConfigError` for one that no header can carry, which
    Python's own error would show."""
    said = os.environ.get("VLLM_API_KEY", "").strip()
    if not (said.isascii() and said.isprintable()):
        raise ConfigError("VLLM_API_KEY", "***", "holds more than printable ASCII", "set it again")
    return said or None


class _Remembering(AbstractHTTPHandler):
    """Puts each connection that it opens into ``connections``."""

    connections: WeakSet[HTTPConnection]

    def do_open(self, http_class: Any, req: Any, **http_conn_args: Any) -> Any:
        def made(host: str, **settings: Any) -> HTTPConnection:
            connection = http_class(host, **settings)
            self.connections.add(connection)
            return connection

        return super().do_open(made, req, **http_conn_args)


class _Http(_Remembering, HTTPHandler):
    pass


class _Https(_Remembering, HTTPSHandler):
    pass


class Server:
    """A client of one server. ``timeout``: seconds for one answer; ``patience``: seconds over which a request that
    finds nobody, or a server that is busy, is tried again, after 0.5 seconds, then 1, 2, 4 and so on.

    ``api_key``: default VLLM_API_KEY. Proxies of the environment are left aside.

    Every method raises `ServerError` in one line.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0, *, patience: float = 4.0) -> None:
        if not is_address(url):
            shown, reason = "***" if "@" in url else url, "is not an address, or holds a user or password"
            raise ConfigError("vllm_server_base_url", shown, reason, "give one such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.timeout, self.patience = timeout, patience
        self._api_key = api_key or key()
        self._connections: WeakSet[HTTPConnection] = WeakSet()
        handlers = [_Http(), _Https()]
        for handler in handlers:
            handler.connections = self._connections
        self._open = build_opener(ProxyHandler({}), NoRedirects, *handlers).open

    # What it is

    def version(self) -> str:
        return self._ask("/version")["version"]

    def check_version(self) -> str:
        """The version; raises `ServerError` for one that TRL does not support."""
        version = self.version()
        minor = minor_of(version)
        if minor and SUPPORTED[0] <= minor <= SUPPORTED[1]:
            return version
        (_, first), (_, last) = SUPPORTED
        remedy = f"pip install 'vllm>=0.{first},<0.{last + 1}'"
        raise ServerError(f"{self.url} runs vLLM {version}, and TRL 1.16 works with {SPAN}: {remedy}")

    def healthy(self) -> bool:
        """Whether it answers and its engine lives; within `AT_ONCE`, never raises."""
        try:
            self._send("/health", timeout=min(self.timeout, AT_ONCE))
        except ServerError:
            return False
        return True

    def wait(
        self, seconds: float, alive: Callable[[], bool] | None = None, progress: Callable[[float], None] | None = None
    ) -> None:
        """Return once it is healthy.

        ``alive`` says whether the server's process is still there, where the caller has it; ``progress`` is called
        about once a second with the seconds waited. Raises `ServerError` after ``seconds``, or as soon as the process
        is gone.
        """
        started = time.monotonic()
        while not self.healthy():
            waited = time.monotonic() - started
            if alive is not None and not alive():
                raise ServerError(f"the vLLM server at {self.url} ended before it was up: its own log says why")
            if waited >= seconds:
                raise ServerError(
                    f"no vLLM server answers at {self.url} after {seconds:.0f} seconds: see that it runs and that the "
                    "address is right, or raise vllm_server_timeout"
                )
            if progress is not None:
                progress(waited)
            time.sleep(min(1.0, max(0.05, seconds - waited)))

    @contextlib.contextmanager
    def heard(self, seconds: float, pause: float = 10.0) -> Iterator[None]:
        """In here requests that wait for an answer are ended with a `ServerError` once it has not been healthy for
        ``seconds``: it may have accepted them and never answer, or its machine may be gone."""
        done = threading.Event()

        def listen() -> None:
            last = time.monotonic()
            while not done.wait(min(pause, seconds)):
                if self.healthy():
                    last = time.monotonic()
                elif time.monotonic() - last > seconds and not done.is_set():
                    for connection in list(self._connections):
                        with contextlib.suppress(OSError, AttributeError):  # it has ended meanwhile
                            connection.sock.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=listen, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def models(self) -> list[str]:
        """The names that it serves: the base model first, then the adapters."""
        return [model["id"] for model in self._ask("/v1/models")["data"]]

    def settings(self) -> dict[str, Any]:
        """Its resolved configuration (vLLM's `VllmConfig` as JSON)."""
        try:
            return self._ask("/server_info?config_format=json")["vllm_config"]
        except ServerError as error:
            if error.status != 404:
                raise
            reason = "has no development paths, which the sync needs: start it with VLLM_SERVER_DEV_MODE=1"
            raise ServerError(f"{self.url} {reason}", 404) from None

    def replicas(self) -> list[int | None]:
        """The copies of the model behind this address that a request can name; None alone where it has one."""
        parallel = self.settings().get("parallel_config", {})
        elsewhere = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
        copies = 1 if elsewhere else parallel.get("data_parallel_size", 1)
        return [None] if copies == 1 else list(range(copies))

    # Adapters

    def load_adapter(self, name: str, path: str) -> None:
        """Make the adapter in the folder ``path``, as the server sees it, known under a new name."""
        try:
            self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ServerError as error:
            if error.status != 404:
                raise
            reason = f"{error}: see that the server can read that folder (GRPO_MATH_ADAPTER_DIR names another place)"
            if str(error).endswith("404: Not Found"):  # which is what a path that is not there answers
                remedy = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                reason = f"{self.url} takes no adapters while it runs: {remedy}"
            raise ServerError(reason, 404) from None

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; one that it does not know, after a restart for example, is no error."""
        try:
            self._ask("/v1/unload_lora_adapter", {"lora_name": name})
        except ServerError as error:
            if error.status != 404:
                raise

    # Completions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        model: str,
        logprobs: bool = True,
        replica: int | None = None,
        extra: Mapping[str, Any] | None = None,
        **sampling: float | None,
    ) -> Sampled:
        """Completions of each prompt of token ids, by the base model or an adapter of that name.

        ``sampling`` are vLLM's own names, over `SAMPLING`; ``extra`` goes into the request as it is, over the rest;
        ``replica``: which of the `replicas` samples, else the server chooses. An empty list of prompts asks nothing.
        """
        if not prompts:
            return Sampled([], [] if logprobs else None)
        body = {
            **SAMPLING,
            **sampling,
            "model": model,
            "prompt": [list(prompt) for prompt in prompts],
            "return_token_ids": True,
            **({"logprobs": 0, "return_tokens_as_token_ids": True} if logprobs else {}),
            **(extra or {}),
        }
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        choices = sorted(self._ask("/v1/completions", body, headers)["choices"], key=lambda choice: choice["index"])
        if len(choices) != body["n"] * len(prompts):
            wanted = f"{len(prompts)} prompts with n={body['n']}"
            raise ServerError(f"{self.url} gave {len(choices)} completions of {wanted}")
        token_ids = [choice["token_ids"] for choice in choices]
        if not logprobs:
            return Sampled(token_ids, None)
        return Sampled(token_ids, [[_finite(x) for x in choice["logprobs"]["token_logprobs"]] for choice in choices])

    # HTTP

    def _ask(self, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """`_send`, again where nobody is there or the server is busy."""
        started, pause = time.monotonic(), 0.5
        while True:
            try:
                return self._send(path, body, headers=headers)
            except ServerError as error:
                left = self.patience - (time.monotonic() - started)
                if error.status not in (None, *BUSY) or left <= 0:
                    raise
            time.sleep(min(pause, left))
            pause *= 2

    def _send(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request, a POST where it has a body -> the JSON of the answer, or its text; None where it is empty."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self._api_key:
            sent["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data=data, headers=sent)
        try:
            with self._open(request, timeout=timeout or self.timeout) as response:
                text = response.read().decode()
        except HTTPError as error:
            raise ServerError(self._refusal(path, error), error.code) from None
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerError(f"{self.url}{path} does not answer ({reason}): see that the vLLM server runs") from None
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError:
            return text

    def _refusal(self, path: str, error: HTTPError) -> str:
        if error.code == 401:
            return f"{self.url} wants a key: set VLLM_API_KEY to the one that it was started with"
        text = error.read().decode(errors="replace")
        try:
            answer = json.loads(text)
            text = answer["error"]["message"] if "error" in answer else answer["detail"]
        except (ValueError, KeyError, TypeError):
            pass
        return f"{self.url}{path} answers {error.code}: {' '.join(str(text).split())[:500] or error.reason}"


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
