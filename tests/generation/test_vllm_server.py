"""The command that starts a vLLM server, and the client: against a stand-in (small_vllm.py), in seconds."""

import asyncio
import json
import os
import sys
from operator import methodcaller
from unittest.mock import AsyncMock, patch

import pytest
from small_http import AnsweringHTTP
from trl.generation import vllm_client
from waiting import until

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.completion import Completion
from grpo_math.generation.sync import KeyedClient
from grpo_math.generation.vllm_env import TRL_SUPPORTED
from grpo_math.generation.vllm_middleware.grpo_math_key import ApiKeyMiddleware
from grpo_math.generation.vllm_process import ServerProcess, executable
from grpo_math.generation.vllm_server import MIDDLEWARE_FOLDER, Server, environment, key, make_key
from grpo_math.system.http import ServerError


def test_a_key_of_a_file_loses_its_line_end_and_one_that_no_header_carries_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "abc\n")
    assert key() == "abc"
    monkeypatch.setenv("VLLM_API_KEY", "ab\nc")
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY='\*\*\*' contains characters other than printable ASCII"):
        Server("http://127.0.0.1:1")


def test_a_key_is_made_once_and_is_in_the_servers_environment_with_its_guard(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
    assert environment() == variables
    make_key()
    secret = key()
    make_key()
    monkeypatch.setenv("PYTHONPATH", "/more")
    variables |= {"VLLM_API_KEY": secret, "PYTHONPATH": f"{MIDDLEWARE_FOLDER}:/more"}
    assert environment() == variables
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the Hub does not answer this process
    assert environment() == {**variables, "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("path", "output", "kind", "answer"),
    [
        *(
            ("/v1/completions", output, "http", 401)
            for output in (None, "Bearer sec", "Bearer secret2", "Basic secret", "Bearer ")
        ),
        *((path, None, "http", 401) for path in ("/collective_rpc", "/sleep", "/", "/health/", "/v1/realtime")),
        ("/v1/realtime", "secret", "websocket", 1008),
        ("/v1/completions", "Bearer secret", "http", None),
        ("/v1/realtime", "Bearer secret", "websocket", None),
        ("/health", None, "http", None),
        ("/", None, "lifespan", None),
    ],
)
def test_no_path_is_open_without_the_key_but_health(path, output, kind, answer, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret\n")
    app = AsyncMock()
    send = AsyncMock()
    headers = [(b"authorization", output.encode())] if output is not None else []
    asyncio.run(ApiKeyMiddleware(app)({"type": kind, "path": path, "headers": headers}, None, send))
    assert app.await_count == (answer is None)
    sent = [call.args[0] for call in send.await_args_list]
    assert [message.get("status", message.get("code")) for message in sent][:1] == ([] if answer is None else [answer])


@pytest.mark.parametrize("secret", ["secret", ""])
def test_trls_own_client_sends_the_key_too_and_no_request_to_a_proxy(secret, server, monkeypatch):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda **versions: True)
    monkeypatch.setenv("VLLM_API_KEY", secret)
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert KeyedClient(base_url=server.url).model == "base"
    assert server.headers[-1].get("Authorization") == (f"Bearer {secret}" if secret else None)


def test_trls_own_client_gives_up_after_its_time_on_a_server_that_is_not_healthy(monkeypatch):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda **versions: True)
    server = AnsweringHTTP()
    server.answer = lambda path, body: (503, "")
    with pytest.raises(ServerError, match=r"no vLLM server answers at .* after 0 seconds"):
        KeyedClient(base_url=server.url, connection_timeout=0.1)
    server.stop()


@pytest.mark.parametrize(
    ("host", "before", "address"),
    [("0.0.0.0", {}, "127.0.0.1"), ("localhost", {"VLLM_HOST_IP": "10.0.0.1"}, "10.0.0.1"), ("::1", {}, None)],
)
def test_the_weights_of_a_server_on_this_machine_are_sent_on_a_port_of_the_loopback(host, before, address, monkeypatch):
    """vLLM opens the port at VLLM_HOST_IP."""
    opened = []
    monkeypatch.setattr(
        vllm_client.VLLMClient, "init_communicator", lambda self, device: opened.append(os.environ.get("VLLM_HOST_IP"))
    )
    client = KeyedClient.__new__(KeyedClient)
    client.host = host
    with patch.dict(os.environ, before):
        if not before:
            os.environ.pop("VLLM_HOST_IP", None)
        client.init_communicator("cuda:0")
    assert opened == [address]


def asked(**request):
    return methodcaller("generate", [7], model="base", **request)


def version(number):
    return 200, json.dumps({"version": number})


LOAD = methodcaller("load_adapter", "a", "/folder")
UNLOAD = methodcaller("unload_adapter", "a")
THREE = """{"choices": [
    {"index": 2, "token_ids": [5], "logprobs": {"token_logprobs": [-3.0]}},
    {"index": 0, "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0, NaN]}},
    {"index": 1, "token_ids": [3], "logprobs": null}
]}"""
COMPLETIONS = [Completion([1, 2], [-1.0, None]), Completion([3]), Completion([5], [-3.0])]


@pytest.mark.parametrize(
    ("answer", "call", "result"),
    [
        *((version(number), Server.check_version, number) for number in ("0.22.0", "0.31.4+cpu", "0.31.0rc1")),
        ((200, ""), Server.healthy, True),
        ((503, ""), Server.healthy, False),
        ((404, "unknown"), UNLOAD, None),
        ((200, '{"data": [{"id": "base"}, {"id": "a"}]}'), Server.models, ["base", "a"]),
        ((200, '{"vllm_config": {}}'), Server.replicas, [None]),
        ((200, '{"vllm_config": {"parallel_config": {"data_parallel_size": 2}}}'), Server.replicas, [0, 1]),
        ((200, THREE), asked(n=3), COMPLETIONS),
    ],
)
def test_an_answer_is_read(answer, call, result, server):
    server.queue = [answer]
    assert call(Server(server.url, retries=0)) == result


@pytest.mark.parametrize(
    ("answer", "call", "error"),
    [
        *((version(number), Server.check_version, "runs vLLM") for number in ("0.21.9", "0.33.0", "1.0.0", "dev")),
        (version("0.33.0"), Server.check_version, "vLLM 0.33.0, .*adapters: pip install 'vllm>=0.22,<0.33'"),
        (
            version("0.32.0"),
            lambda server: server.check_version(TRL_SUPPORTED),
            "vLLM 0.32.0, .*whole weights: pip install 'vllm>=0.22,<0.32'",
        ),
        *(((200, text), Server.check_version, "is not a vLLM server") for text in ("[]", '{"title": "another"}')),
        ((404, '{"detail": "Not Found"}'), LOAD, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ((404, '{"detail": "Not Found"}'), Server.settings, "VLLM_SERVER_DEV_MODE=1"),
        ((404, '{"error": "No adapter found for /folder"}'), LOAD, "for /folder.*: check that the server can read"),
        *(((400, "no"), call, "answers 400: no") for call in (LOAD, UNLOAD, Server.settings)),
        ((200, THREE), asked(n=2), "gave 3 completions of a prompt with n=2"),
    ],
)
def test_another_answer_is_one_line_with_the_remedy(answer, call, error, server):
    server.queue = [answer]
    with pytest.raises(ServerError, match=error):
        call(Server(server.url))


def test_waiting_ends_at_once_when_the_process_has_ended_and_in_time_when_it_hangs(server):
    Server(server.url).wait(0)
    server.stop()
    waited = []
    for alive, seconds, error in ((False, 600, "ended before it was up"), (True, 0.4, "answers at .* after 0 seconds")):
        with pytest.raises(ServerError, match=error):
            Server(server.url).wait(seconds, lambda alive=alive: alive, waited.append)
    assert 0 < len(waited) < 5
    assert max(waited) < 0.4


def test_a_server_process_is_watched_until_it_is_ready_and_can_start_again(server, tmp_path):
    sleeps = "import time; print('it loads', flush=True); time.sleep(60)"
    process = ServerProcess([sys.executable, "-c", sleeps], {}, server.url, tmp_path / "run/server.log")
    process.wait(5)
    assert server.asked == ["/health", "/version"]
    first = process.supervised.process.pid
    until(lambda: process.log.read_text() == "it loads\n")
    process.restart()
    assert process.supervised.process.pid != first
    until(lambda: process.log.read_text() == 2 * "it loads\n")
    server.version = "1.0"
    with pytest.raises(UserError, match=r"runs vLLM 1\.0"):
        process.wait(5)
    process.stop()
    assert not process.running
    with pytest.raises(UserError, match="the vLLM server ended with exit code"):  # another program has its port
        process.wait(5)


@pytest.mark.parametrize("logged", [True, False])
def test_a_server_that_ends_is_reported_with_the_end_of_its_log(logged, server, tmp_path, capfd):
    server.stop()
    log = tmp_path / "server.log" if logged else None
    code = "print(*range(20), sep='\\n\\n', flush=True); raise SystemExit('out of memory')"
    process = ServerProcess([sys.executable, "-c", code], {}, server.url, log)
    ends = f"'out of memory', its log, {log}, ends as above" if logged else "its output is above"
    with pytest.raises(UserError) as error:
        process.wait(60)
    assert str(error.value) == f"the vLLM server ended with exit code 1: {ends}; correct what it names and start again"
    shown = "".join(f"  | {line}\n" for line in [*range(6, 20), "out of memory"])
    assert capfd.readouterr().err.endswith(shown if logged else "out of memory\n")


def test_vllm_is_the_program_that_is_named_or_on_the_path_or_beside_this_python(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("GRPO_MATH_VLLM", raising=False)
    with pytest.raises(UserError, match=r"^vllm is not installed, .*: make an environment for it"):
        executable()
    for file in (tmp_path / "vllm", tmp_path / "bin/vllm", tmp_path / "named"):
        file.parent.mkdir(exist_ok=True)
        file.touch(0o755)
        if file.name == "named":
            monkeypatch.setenv("GRPO_MATH_VLLM", str(file))
        assert executable() == str(file)
    monkeypatch.setenv("GRPO_MATH_VLLM", "none")
    with pytest.raises(UserError, match=r"^GRPO_MATH_VLLM='none' is not a program, "):
        executable()


def test_the_version_of_vllm_is_checked_before_a_server_loads_a_model(tmp_path, monkeypatch):
    program, record = (
        tmp_path / "bin/vllm",
        tmp_path / "lib/python3.12/site-packages/vllm-0.32.0+cpu.dist-info/METADATA",
    )
    for file in (program, record):
        file.parent.mkdir(parents=True)
    program.touch(0o755)
    record.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    monkeypatch.setenv("GRPO_MATH_VLLM", str(program))
    assert executable() == str(program)
    with pytest.raises(UserError) as error:
        executable(TRL_SUPPORTED)
    line = "runs vLLM 0.32.0+cpu, which is not supported for whole weights: pip install 'vllm>=0.22,<0.32'"
    assert str(error.value) == f"{program} {line}"
