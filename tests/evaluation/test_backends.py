"""What a vLLM server is asked, how one is started, and what is refused before weights load."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_math import evaluate
from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation import backends
from grpo_math.problems.datasets import load_problems
from grpo_math.run.http import ServerError


@pytest.fixture(scope="module")
def rows():
    return load_problems("generated:sums", "heldout", limit=3)


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 12}))
    (folder / "adapter_model.safetensors").write_bytes(b"1")
    return str(folder)


def reply(tokenizer, prompt: list[int], seed: int, sample: int, length: int) -> list[int]:
    """A made-up model: it adds rightly, but one sample in three goes on until the limit."""
    problem = tokenizer.decode(prompt).split("What is ")[-1].split("?")[0]
    text = f"#### {eval(problem)}" if (seed + sample) % 3 else "and so on" * length
    ids = tokenizer(text)["input_ids"][:length]
    return ids if len(ids) == length else [*ids, tokenizer.eos_token_id]


@pytest.fixture
def server(tokenizer, smollm):
    """A server with vLLM's paths on a port of its own: (its URL, the requests that it got)."""
    asked: list[tuple[str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, content, status=200):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self._answer({"data": [{"id": smollm}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            if self.path == "/v1/unload_lora_adapter":
                return self._answer({"error": {"message": "no such adapter"}}, 404)
            if self.path != "/v1/completions":
                return self._answer({})
            choices = [
                {"index": i, "token_ids": reply(tokenizer, body["prompt"][0], body["seed"], i, body["max_tokens"])}
                for i in range(body["n"])
            ]
            return self._answer({"choices": choices})

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", asked
    http.shutdown()


def test_a_server_is_asked_for_one_completion_at_a_time(server, smollm, rows, tokenizer):
    url, asked = server
    results = evaluate(
        smollm,
        rows,
        samples=4,
        temperature=0.8,
        max_new_tokens=12,
        batch_size=6,
        backend="vllm-server",
        server=url,
        progress=False,
    )
    requests = [body for path, body in asked if path == "/v1/completions"]
    assert [body["n"] for body in requests] == [1] * 12
    assert len({body["seed"] for body in requests}) == 12, "vLLM would give all prompts of a seed the same draws"
    for body in requests:
        assert len(body["prompt"]) == 1
        assert all(isinstance(token, int) for token in body["prompt"][0])
        assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.8, 1.0, 0, 12)
        assert tokenizer.eos_token_id in body["stop_token_ids"]
    assert results["backend"] == "vllm-server"
    for row in results["rows"]:
        assert row["category"] == ("truncated" if row["truncated"] else "correct")
        assert row["tokens"] == 12 or not row["truncated"]
    assert 0 < results["accuracy"] < 1


@pytest.mark.slow
def test_an_adapter_is_loaded_under_a_name_of_its_weights_and_a_known_one_goes_by_its_name(
    server, smollm, rows, adapter
):
    url, asked = server
    how = {"backend": "vllm-server", "server": url, "max_new_tokens": 8, "progress": False}
    evaluate(smollm, rows, adapter=adapter, **how)
    (loaded,) = [body for path, body in asked if path == "/v1/load_lora_adapter"]
    assert loaded["lora_path"] == adapter
    assert loaded["lora_name"].startswith("evaluated-")
    assert {body["model"] for path, body in asked if path == "/v1/completions"} == {loaded["lora_name"]}
    asked.clear()
    evaluate(smollm, rows, adapter="mine", **how)
    assert {path for path, _ in asked} == {"/v1/completions"}
    assert {body["model"] for _, body in asked} == {"mine"}


@pytest.mark.slow
def test_a_server_of_another_model_and_one_that_is_not_there_are_one_line(server, tiny, smollm, rows, monkeypatch):
    url, _ = server
    with pytest.raises(ConfigError, match="is not what the server has"):
        evaluate(tiny(), rows, backend="vllm-server", server=url, progress=False)
    monkeypatch.setattr(backends, "Server", lambda url: backends_server(url))
    with pytest.raises(ServerError, match="does not answer"):
        evaluate(smollm, rows, backend="vllm-server", server="http://127.0.0.1:9", progress=False)


def backends_server(url: str):
    from grpo_math.generation.server import Server

    return Server(url, retries=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "vlm"}, "did you mean 'vllm'"),
        ({"backend": "vllm-server"}, "server=None is needed by backend=vllm-server"),
        ({"server": "http://127.0.0.1:1"}, "would be ignored by backend=hf"),
        ({"adapter": "nowhere"}, "adapter='nowhere' holds no adapter_config.json"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(arguments, words, rows):
    with pytest.raises(ConfigError, match=words) as refused:
        evaluate("no/model", rows, progress=False, **arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_model_or_an_adapter_that_cannot_be_loaded_is_one_line(smollm, rows, adapter, tmp_path):
    for model in (str(tmp_path), "./nowhere"):
        with pytest.raises(ConfigError, match=r"model=.* can be loaded") as refused:
            evaluate(model, rows, progress=False)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"adapter=.* does not fit .*: KeyError: 'peft_type'") as refused:
        evaluate(smollm, rows, adapter=adapter, progress=False)
    assert "\n" not in str(refused.value)


def test_a_server_is_started_for_the_evaluation_and_stopped_after_it(server, smollm, rows, adapter, monkeypatch):
    """The process is a stand-in; tests/generation/test_sync.py starts a real vLLM server."""
    url, asked = server
    started, stopped = [], []

    class Process:
        def __init__(self, start, log):
            started.append(start)
            self.url = url

        def wait(self, seconds):
            assert not stopped

        def stop(self):
            stopped.append(len(asked))

    monkeypatch.setattr(backends, "ServerProcess", Process)
    monkeypatch.setattr(backends, "executable", lambda: "vllm")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    found = evaluate(smollm, rows, adapter=adapter, max_new_tokens=12, backend="vllm", progress=False)
    (start,) = started
    assert start.command[:3] == ["vllm", "serve", smollm]
    assert start.command[start.command.index("--max-lora-rank") + 1] == "16", "the adapter's rank is 12"
    assert "--weight-transfer-config" not in start.command
    assert start.environment["VLLM_API_KEY"]
    assert stopped == [len(asked)], "after the last request"
    assert [path for path, _ in asked].count("/v1/load_lora_adapter") == 1
    assert found["backend"] == "vllm"


def test_a_vllm_that_is_not_installed_is_one_line(rows, monkeypatch):
    monkeypatch.setenv("GRPO_MATH_VLLM", "/nowhere/vllm")
    with pytest.raises(UserError, match="GRPO_MATH_VLLM='/nowhere/vllm' is not a program"):
        evaluate("no/model", rows, backend="vllm")
