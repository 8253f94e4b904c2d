"""The command that starts a vLLM server, and the client: against a stand-in (small_vllm.py), in seconds."""

import asyncio
import json

import pytest
from small_vllm import SmallVLLM
from trl.generation import vllm_client

from grpo_math.errors import ConfigError
from grpo_math.generation.beside_vllm.grpo_math_key import Guard
from grpo_math.generation.server import BESIDE, GUARD, Server, command, environment, served_rank
from grpo_math.generation.sync import KeyedClient
from grpo_math.run.http import ServerError


@pytest.fixture
def small():
    small = SmallVLLM()
    yield small
    small.stop()


def after(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_the_command_serves_this_machine_alone_with_the_log_probs_that_were_sampled_from():
    line = command("org/model", port=8123, dtype="bfloat16", max_model_length=2048, seed=3, extra=["--enforce-eager"])
    expected = "vllm serve org/model --host 127.0.0.1 --port 8123 --dtype bfloat16 --seed 3"
    expected += " --logprobs-mode processed_logprobs --max-logprobs -1 --max-model-len 2048 --weight-transfer-config"
    assert line == [*expected.split(), '{"backend": "nccl"}', "--enforce-eager"]


def test_an_adapters_rank_is_rounded_up_to_one_that_vllm_takes():
    line = command("m", lora_rank=20, tensor_parallel=2, data_parallel=4)
    parallel = ["--tensor-parallel-size", "2", "--data-parallel-size", "4", "--api-server-count", "1"]
    assert line[-11:] == [*parallel, "--enable-lora", "--max-loras", "1", "--max-lora-rank", "32"]
    assert [served_rank(rank) for rank in (1, 8, 9, 512)] == [8, 8, 16, 512]
    with pytest.raises(ConfigError, match="lora_r=513 is above 512"):
        served_rank(513)


def test_a_host_that_others_reach_needs_a_key_which_is_never_on_the_command_line(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"host='0.0.0.0' .*VLLM_API_KEY"):
        command("m", host="0.0.0.0")
    assert not {"VLLM_API_KEY", "PYTHONPATH"} & set(environment())
    assert "--middleware" not in command("m")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "secret" not in " ".join(command("m", host="0.0.0.0"))
    assert environment()["VLLM_API_KEY"] == "secret"
    assert environment()["VLLM_SERVER_DEV_MODE"] == "1"
    assert after(command("m"), "--middleware") == GUARD
    assert environment()["PYTHONPATH"].split(":")[0] == str(BESIDE)
    assert {path.name for path in BESIDE.glob("*.py")} == {"__init__.py", f"{GUARD.split('.')[0]}.py"}


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
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope["path"])

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", output.encode())] if output is not None else []
    asyncio.run(Guard(app)({"type": kind, "path": path, "headers": headers}, None, send))
    assert reached == ([path] if answer is None else [])
    assert [message.get("status", message.get("code")) for message in sent][:1] == ([] if answer is None else [answer])


@pytest.mark.parametrize("key", ["secret", ""])
def test_trls_own_client_sends_the_key_too(key, small, monkeypatch):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda **versions: True)
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert KeyedClient(base_url=small.url).model == "base"
    assert small.headers[-1].get("Authorization") == (f"Bearer {key}" if key else None)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "", "http://[::1", "http://a:secret@h"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="is not an address") as error:
        Server(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("version", ["0.22.0", "0.31.4+cpu", "0.31.0rc1"])
def test_supported_versions_pass(version, small):
    small.version = version
    assert Server(small.url).check_version() == version


@pytest.mark.parametrize("version", ["0.21.9", "0.32.0", "1.0.0", "dev"])
def test_another_version_is_one_line_with_the_remedy(version, small):
    small.version = version
    with pytest.raises(ServerError, match=r"runs vLLM .*: pip install 'vllm>=0.22,<0.32'"):
        Server(small.url).check_version()


@pytest.mark.parametrize(("parallel", "replicas"), [({}, [None]), ({"data_parallel_size": 2}, [0, 1])])
def test_a_request_can_name_each_copy_behind_an_address(parallel, replicas, small):
    small.settings["parallel_config"] = parallel
    assert Server(small.url).replicas() == replicas
    for replica in replicas:
        small.trouble = [(200, '{"choices": [{"index": 0, "token_ids": [1]}]}')]
        Server(small.url).generate([7], model="base", replica=replica)
        names = {name.lower(): value for name, value in small.headers[-1].items()}
        assert names.get("x-data-parallel-rank") == (None if replica is None else str(replica))


def test_waiting_ends_at_once_when_the_process_has_ended_and_in_time_when_it_hangs(small):
    small.stop()
    with pytest.raises(ServerError, match="ended before it was up"):
        Server(small.url).wait(600, alive=lambda: False)
    with pytest.raises(ServerError, match="after 0 seconds"):
        Server(small.url).wait(0)


def test_a_server_without_runtime_adapters_or_development_paths_says_what_to_start_it_with(small):
    server = Server(small.url)
    small.trouble = [(404, '{"detail": "Not Found"}')] * 2
    with pytest.raises(ServerError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        server.load_adapter("a", "/folder")
    with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        server.settings()
    small.trouble = [(404, '{"error": {"message": "Loading lora a failed: No adapter found for /folder"}}')]
    with pytest.raises(ServerError, match=r"No adapter found for /folder.*.*: see that the server can read"):
        server.load_adapter("a", "/folder")
    server.unload_adapter("never there")


def test_completions_come_in_order_with_their_log_probs(small):
    def choice(index, ids, logprobs):
        return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}

    answer = [choice(2, [5], [-3.0]), choice(0, [1, 2], [-1.0, float("nan")])]
    small.trouble = [(200, json.dumps({"choices": [*answer, choice(1, [3], [-2.0])]}))]
    completions = Server(small.url).generate([7], model="base", n=3)
    assert [completion.tokens for completion in completions] == [[1, 2], [3], [5]]
    assert [completion.logps for completion in completions] == [[-1.0, None], [-2.0], [-3.0]]
    small.trouble = [(200, json.dumps({"choices": answer}))]
    with pytest.raises(ServerError, match="2 completions of a prompt with n=3"):
        Server(small.url).generate([7], model="base", n=3)
