"""A vLLM server: the command that starts it, and a client for training.

>>> ServerSettings(model="Qwen/Qwen2.5-1.5B", lora_rank=20).command()[:5]
['vllm', 'serve', 'Qwen/Qwen2.5-1.5B', '--host', '127.0.0.1']

The server is reachable from this machine only. To listen on other addresses, it needs a key. Server and client read the
key from the environment variable VLLM_API_KEY. It is never on a command line, which every user of a machine can read.
vLLM protects the paths under /v1 with the key. vllm_middleware/grpo_math_key.py protects the other paths, above all the
development paths (VLLM_SERVER_DEV_MODE), which the sync needs and which change weights.

vllm_process.py starts the process. Imports no vLLM, torch or TRL.
"""

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from grpo_math.errors import ConfigError
from grpo_math.generation.completion import Completion
from grpo_math.generation.vllm_env import SUPPORTED
from grpo_math.settings.vllm import ABOVE, RANKS
from grpo_math.system.addresses import NO_ADDRESS, is_address, is_loopback
from grpo_math.system.http import Client, ServerError

# In MIDDLEWARE_FOLDER, which is on the server's path.
MIDDLEWARE = "grpo_math_key.ApiKeyMiddleware"
MIDDLEWARE_FOLDER = Path(__file__).with_name("vllm_middleware")
ABORTS = 3  # of one request
HEALTH_SECONDS = 10.0  # for an answer from /health
ANSWER_SECONDS = 3600.0  # for any other answer, at least
SLOWEST = 500  # tokens per second of a batch; a server that is slower counts as lost
# Sent in every request: vLLM takes omitted settings from the model's generation_config.
SAMPLING = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server for training, and its command. `environment` returns its environment.

    With ``lora_rank`` the server accepts adapters of at most that rank, ``adapters`` of them in one batch. With 0 it
    accepts whole weights over NCCL, as TRL's own sync sends them, unless its weights are ``fixed``. By default, the
    context is what the GPU holds.
    """

    model: str
    port: int = 8000
    host: str = "127.0.0.1"
    dtype: str = "auto"
    max_model_length: int | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    lora_rank: int = 0
    adapters: int = 1
    fixed: bool = False
    in_4bit: bool = False
    on_gpu: bool = True
    seed: int = 0
    extra: Sequence[str] = ()  # further options of ``vllm serve``
    executable: str = "vllm"

    def command(self) -> list[str]:
        """Return the `vllm serve` command.

        >>> " ".join(ServerSettings(model="base", lora_rank=20, tensor_parallel=2, max_model_length=2048).command())
        ... # doctest: +NORMALIZE_WHITESPACE
        'vllm serve base --host 127.0.0.1 --port 8000 --dtype auto --seed 0 --logprobs-mode processed_logprobs
         --max-logprobs -1 --max-model-len 2048 --tensor-parallel-size 2 --data-parallel-size 1 --api-server-count 1
         --enable-lora --max-loras 1 --max-lora-rank 32'
        >>> ServerSettings(model="base").command()[-2:]
        ['--weight-transfer-config', '{"backend": "nccl"}']
        >>> ServerSettings(model="base", lora_rank=16, adapters=2).command()[-4:]
        ['--max-loras', '2', '--max-lora-rank', '16']

        Raises `ConfigError` for a host that needs a key, and for a rank that vLLM does not support.
        """
        refuse_without_key(self.host)
        options: dict[str, Any] = {
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--seed": self.seed,
            # After temperature and filters, as TRL's importance correction needs.
            "--logprobs-mode": "processed_logprobs",
            "--max-logprobs": -1,
            "--max-model-len": self.max_model_length or ("auto" if self.on_gpu else None),
            # One front end, because each has a separate list of adapters. vLLM's default is one for each replica.
            "--tensor-parallel-size": self.tensor_parallel,
            "--data-parallel-size": self.data_parallel,
            "--api-server-count": 1,
            "--quantization": "bitsandbytes" if self.in_4bit else None,
            "--enforce-eager": None if self.on_gpu else "",
        }
        if self.lora_rank:
            rank = served_rank(self.lora_rank)
            options |= {"--enable-lora": "", "--max-loras": self.adapters, "--max-lora-rank": rank}
        elif not self.fixed:
            options["--weight-transfer-config"] = '{"backend": "nccl"}'
        if key():
            options["--middleware"] = MIDDLEWARE
        words = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
        return [self.executable, "serve", self.model, *filter(None, words), *self.extra]


def refuse_without_key(host: str) -> None:
    """Raise `ConfigError` for a host that other machines can reach if VLLM_API_KEY is not set."""
    if not is_loopback(host) and not key():
        reason = "lets other machines use the server, which then needs a key"
        raise ConfigError("host", host, reason, "set VLLM_API_KEY in the environment, or serve on 127.0.0.1")


def served_rank(rank: int) -> int:
    """Return the smallest ``--max-lora-rank`` for an adapter of this rank.

    >>> served_rank(16), served_rank(17)
    (16, 32)
    >>> served_rank(513)
    Traceback (most recent call last):
    grpo_math.errors.ConfigError: lora_r=513 is above 512, vLLM's largest: train an adapter of lower rank
    """
    if rank > RANKS[-1]:
        raise ConfigError("lora_r", rank, *ABOVE)
    return min(served for served in RANKS if rank <= served)


def environment() -> dict[str, str]:
    """Return variables for the server's environment: runtime adapters, development paths, the key, the guard's folder.

    >>> environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    'True'
    """
    from huggingface_hub import constants

    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
    # Set in this process alone if the Hub does not answer. The server would wait for the Hub, too.
    if constants.HF_HUB_OFFLINE:
        variables["HF_HUB_OFFLINE"] = "1"
    if api_key := key():
        path = os.pathsep.join(filter(None, (str(MIDDLEWARE_FOLDER), os.environ.get("PYTHONPATH"))))
        variables |= {"VLLM_API_KEY": api_key, "PYTHONPATH": path}
    return variables


def make_key() -> None:
    """Set a new key for the server and the training that this process starts, unless a key is set."""
    os.environ["VLLM_API_KEY"] = key() or secrets.token_hex(16)


def key() -> str:
    """Return the key of VLLM_API_KEY without the line end that a key from a file may have, or an empty text.

    Raises `ConfigError` for a key that no header can carry, because h11's own error would show it.
    """
    value = os.environ.get("VLLM_API_KEY", "").strip()
    if not (value.isascii() and value.isprintable()):
        raise ConfigError("VLLM_API_KEY", value, "contains characters other than printable ASCII", "set it again")
    return value


def answer_seconds(tokens: int) -> float:
    """Return the time limit of each request of a batch, which samples at most this many tokens in all.

    >>> answer_seconds(64 * 1024), answer_seconds(1024 * 16384)
    (3600.0, 33554.432)
    """
    return max(ANSWER_SECONDS, tokens / SLOWEST)


def require_version(server: str, version: str, supported: str) -> None:
    """Raise `ServerError` unless the version of a server, or of its program, is ``supported``."""
    # A vLLM built from source has a development version, which a specifier otherwise rejects.
    if not SpecifierSet(supported).contains(version, prereleases=True):
        work = "adapters" if supported == SUPPORTED else "whole weights"
        message = f"{server} runs vLLM {version}, which is not supported for {work}: pip install 'vllm{supported}'"
        raise ServerError(message, 200)


class Server:
    """A client of one server. ``timeout`` and ``retries`` are `http.Client`'s. The key is VLLM_API_KEY.

    Every method raises `ServerError` in one line. Proxies of the environment are not used.

    >>> Server("http://ada:secret@host")
    Traceback (most recent call last):
    grpo_math.errors.ConfigError: vllm_server_base_url='http://***@host' is not an address: write it as \
http://127.0.0.1:8000, without a user or password: a key goes into VLLM_API_KEY
    """

    def __init__(self, url: str, timeout: float = 600.0, retries: int = 3) -> None:
        if not is_address(url):
            raise ConfigError("vllm_server_base_url", url, *NO_ADDRESS)
        self.http = Client(url, timeout=timeout, retries=retries, key=key(), proxies=False)
        self.url = self.http.url

    # State

    def check_version(self, supported: str = SUPPORTED) -> str:
        """Return the version. Raises `ServerError` for one that is not ``supported``."""
        answer = self.http.ask("/version")
        if not isinstance(answer, dict) or "version" not in answer:
            raise ServerError(f"what answers at {self.url} is not a vLLM server", 200)
        require_version(self.url, answer["version"], supported)
        return answer["version"]

    def healthy(self) -> bool:
        """Return True if the server answers within `HEALTH_SECONDS` and its engine is alive."""
        try:
            self.http.ask("/health", retries=0, timeout=HEALTH_SECONDS)
        except ServerError:
            return False
        return True

    def wait(
        self, seconds: float, alive: Callable[[], bool] | None = None, progress: Callable[[float], None] | None = None
    ) -> None:
        """Wait until the server is healthy.

        ``alive`` returns True while the server's process runs, if the caller started it. ``progress`` is called about
        once per second with the seconds waited. Raises `ServerError` after ``seconds``, or when the process has ended.
        """
        started = time.monotonic()
        while not self.healthy():
            waited = time.monotonic() - started
            if alive is not None and not alive():
                raise ServerError(f"the vLLM server at {self.url} ended before it was up: its log has the reason")
            if waited >= seconds:
                raise ServerError(
                    f"no vLLM server answers at {self.url} after {seconds:.0f} seconds: check that it runs and that "
                    "the address is right, or raise vllm_server_timeout"
                )
            if progress is not None:
                progress(waited)
            time.sleep(min(1.0, max(0.05, seconds - waited)))

    def models(self) -> list[str]:
        """Return the served names: the base model first, then the adapters."""
        return [model["id"] for model in self.http.ask("/v1/models")["data"]]

    def settings(self) -> dict[str, Any]:
        """Return the server's resolved configuration (vLLM's `VllmConfig` as JSON)."""
        try:
            return self.http.ask("/server_info?config_format=json")["vllm_config"]
        except ServerError as error:
            if error.status != 404:
                raise
            reason = "has no development paths, which the sync needs: start it with VLLM_SERVER_DEV_MODE=1"
            raise ServerError(f"{self.url} {reason}", 404) from None

    def replicas(self) -> list[int | None]:
        """Return the numbers of the model's replicas that a request can name; [None] for a single one."""
        copies = self.settings().get("parallel_config", {}).get("data_parallel_size", 1)
        return [None] if copies == 1 else list(range(copies))

    # Adapters

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in ``path``, a folder as the server sees it, under a new name."""
        try:
            self.http.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ServerError as error:
            if error.status != 404:
                raise
            reason = f"{error}: check that the server can read that folder under the same path"
            # FastAPI's answer for a path that does not exist. vLLM's own answers have "error".
            if '"detail"' in str(error):
                remedy = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                reason = f"{self.url} takes no adapters while it runs: {remedy}"
            raise ServerError(reason, 404) from None

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. An unknown adapter, after a restart for example, is not an error."""
        try:
            self.http.ask("/v1/unload_lora_adapter", {"lora_name": name})
        except ServerError as error:
            if error.status != 404:
                raise

    # Completions

    def generate(
        self,
        prompt: Sequence[int],
        *,
        model: str,
        logprobs: bool = True,
        replica: int | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **sampling: float | None,
    ) -> list[Completion]:
        """Return the ``n`` completions of a prompt of token ids, by the base model or an adapter of that name.

        ``sampling`` has vLLM's names, and overrides `SAMPLING`. ``extra`` is added to the request unchanged, and
        overrides everything else. ``replica``: the replica that samples; by default the server chooses. ``timeout``: in
        place of the client's.
        """
        body = {
            **SAMPLING,
            **sampling,
            "model": model,
            "prompt": [list(prompt)],
            "return_token_ids": True,
            **({"logprobs": 0, "return_tokens_as_token_ids": True} if logprobs else {}),
            **(extra or {}),
        }
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        if replica is not None:
            options["headers"] = {"X-data-parallel-rank": str(replica)}
        ask = partial(self.http.ask, "/v1/completions", body, **options)
        choices = without_aborts(self.url, ask)["choices"]
        if len(choices) != body["n"]:
            raise ServerError(f"{self.url} gave {len(choices)} completions of a prompt with n={body['n']}")
        return [_completion(choice) for choice in sorted(choices, key=lambda choice: choice["index"])]


def without_aborts(url: str, ask: Callable[[], Any]) -> Any:
    """Return the answer of vLLM to a request, which is sent again if vLLM aborted a completion, for example at a
    sleep. The tokens of an aborted completion are only its beginning."""
    for _ in range(ABORTS):
        answer = ask()
        choices = answer.get("choices") if isinstance(answer, dict) else None
        reasons = (
            [one.get("finish_reason") for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
        )
        if "abort" not in reasons:
            return answer
    raise ServerError(f"{url} aborted a completion {ABORTS} times: see the log of the server")


def _completion(choice: dict[str, Any]) -> Completion:
    logps = None
    if choice.get("logprobs"):
        logps = [None if x is None or math.isnan(x) else x for x in choice["logprobs"]["token_logprobs"]]
    return Completion(choice["token_ids"], logps)
