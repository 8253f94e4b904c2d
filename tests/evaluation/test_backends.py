"""What is asked of a vLLM server and of vLLM's LLM, and what is refused before weights load."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest

from grpo_math.errors import ConfigError
from grpo_math.evaluation import backends
from grpo_math.evaluation.results import evaluate
from grpo_math.generation.server import ServerError
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


def test_a_server_is_asked_for_the_samples_of_one_prompt_at_a_time(server, smollm, rows, tokenizer):
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
    assert sorted(body["n"] for body in requests) == [2, 2, 4, 4], "the second problem is in both batches"
    assert len({body["seed"] for body in requests}) == 4, "vLLM would give all prompts of a seed the same draws"
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


def test_a_server_of_another_model_and_one_that_is_not_there_are_one_line(server, tiny, smollm, rows, monkeypatch):
    url, _ = server
    with pytest.raises(ConfigError, match="is not what the server has"):
        evaluate(tiny(), rows, backend="vllm-server", server=url, progress=False)
    monkeypatch.setattr(backends, "Server", lambda url: backends_server(url))
    with pytest.raises(ServerError, match="does not answer"):
        evaluate(smollm, rows, backend="vllm-server", server="http://127.0.0.1:9", progress=False)


def backends_server(url: str):
    from grpo_math.generation.server import Server

    return Server(url, patience=0.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "vlm"}, "did you mean 'vllm'"),
        ({"backend": "vllm-server"}, "server=None is needed by backend=vllm-server"),
        ({"server": "http://127.0.0.1:1"}, "would be ignored by backend=hf"),
        ({"backend": "vllm"}, "needs the package vllm"),
        ({"adapter": "nowhere"}, "adapter='nowhere' holds no adapter_config.json"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(arguments, words, rows, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=words) as refused:
        evaluate("no/model", rows, progress=False, **arguments)
    assert "\n" not in str(refused.value)


def test_a_model_or_an_adapter_that_cannot_be_loaded_is_one_line(smollm, rows, adapter, tmp_path):
    for model in (str(tmp_path), "./nowhere"):
        with pytest.raises(ConfigError, match=r"model=.* can be loaded") as refused:
            evaluate(model, rows, progress=False)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"adapter=.* does not fit .*: KeyError: 'peft_type'") as refused:
        evaluate(smollm, rows, adapter=adapter, progress=False)
    assert "\n" not in str(refused.value)


def test_vllm_here_gets_one_seed_a_prompt_and_the_adapter_beside_the_weights(
    monkeypatch, smollm, rows, adapter, tokenizer
):
    """The call as it goes to vLLM's LLM; the package itself is not needed."""
    made: list[dict] = []

    class LLM:
        def __init__(self, **settings):
            made.append(settings)

        def generate(self, prompts, sampling, use_tqdm, lora_request):
            made.append({"seeds": [one.seed for one in sampling], "lora": lora_request})
            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(
                            token_ids=tuple(reply(tokenizer, prompt["prompt_token_ids"], one.seed, i, one.max_tokens))
                        )
                        for i in range(one.n)
                    ]
                )
                for prompt, one in zip(prompts, sampling, strict=True)
            ]

    vllm, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    vllm.LLM, vllm.SamplingParams = LLM, lambda **settings: SimpleNamespace(**settings)
    request.LoRARequest = lambda *arguments: arguments
    for module in (vllm, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "find_spec", lambda name: vllm)
    results = evaluate(
        smollm, rows, adapter=adapter, samples=2, temperature=1.0, max_new_tokens=12, backend="vllm", progress=False
    )
    assert made[0] == {"model": smollm, "enable_lora": True, "max_lora_rank": 16}
    assert len(set(made[1]["seeds"])) == 3
    assert made[1]["lora"] == ("adapter", 1, adapter)
    assert {row["category"] for row in results["rows"]} <= {"correct", "truncated"}
    assert results["accuracy"] > 0
