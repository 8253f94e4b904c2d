"""What a vLLM server is asked, how one is started, and what is refused before weights load."""

from __future__ import annotations

import json

import pytest
from small_http import SmallHTTP, body_of, send

from grpo_math import evaluate
from grpo_math.errors import ConfigError
from grpo_math.evaluation import backends
from grpo_math.problems.datasets import load_problems


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


class VLLM(SmallHTTP):
    """A server with vLLM's paths."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.asked: list[tuple[str, dict]] = []
        super().__init__()

    def handle(self, request):
        if request.command == "GET":
            return send(request, 200, json.dumps({"data": [{"id": self.model}]}).encode())
        body = json.loads(body_of(request))
        self.asked.append((request.path, body))
        if request.path == "/v1/unload_lora_adapter":
            return send(request, 404, b'{"error": {"message": "no such adapter"}}')
        if request.path != "/v1/completions":
            return send(request, 200, b"{}")
        ids = [reply(self.tokenizer, body["prompt"][0], body["seed"], i, body["max_tokens"]) for i in range(body["n"])]
        choices = [{"index": i, "token_ids": tokens} for i, tokens in enumerate(ids)]
        return send(request, 200, json.dumps({"choices": choices}).encode())


@pytest.fixture
def server(tokenizer, smollm):
    """The URL of a server, and the requests that it got."""
    vllm = VLLM(smollm, tokenizer)
    yield vllm.url, vllm.asked
    vllm.stop()


def test_a_running_server_is_asked_for_one_completion_at_a_time(server, smollm, rows, tokenizer):
    url, asked = server
    sampled = {"samples": 4, "temperature": 0.8, "max_new_tokens": 12, "batch_size": 6}
    results = evaluate(smollm, rows, backend="vllm-server", server=url, progress=False, **sampled)
    requests = [body for path, body in asked if path == "/v1/completions"]
    assert [body["n"] for body in requests] == [1] * 12
    assert len({body["seed"] for body in requests}) == 12, "vLLM would give all prompts of a seed the same draws"
    for body in requests:
        assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.8, 1.0, 0, 12)
        assert tokenizer.eos_token_id in body["stop_token_ids"]
    for row in results["rows"]:
        assert row["category"] == ("truncated" if row["truncated"] else "correct")
    assert 0 < results["accuracy"] < 1


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
    matches = evaluate(smollm, rows, adapter=adapter, max_new_tokens=12, backend="vllm", progress=False)
    (start,) = started
    assert start.command[:3] == ["vllm", "serve", smollm]
    assert start.command[start.command.index("--max-lora-rank") + 1] == "16", "the adapter's rank is 12"
    assert "--weight-transfer-config" not in start.command
    assert start.environment["VLLM_API_KEY"]
    assert stopped == [len(asked)], "after the last request"
    (loaded,) = [body for path, body in asked if path == "/v1/load_lora_adapter"]
    assert loaded["lora_path"] == adapter
    assert loaded["lora_name"].startswith("evaluated-")
    assert {body["model"] for path, body in asked if path == "/v1/completions"} == {loaded["lora_name"]}
    assert matches["backend"] == "vllm"
