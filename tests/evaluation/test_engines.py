"""What generates: transformers, a vLLM server, or the engine of a training; and what is refused before weights load."""

import json
import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import ANY, Mock, call

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_families import tiny_model
from small_model import byte_tokenizer
from small_runs import write_adapter_run
from small_trainers import make

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.errors import ConfigError
from grpo_math.evaluation import engines, trainer_engines
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import batch_seed
from grpo_math.generation.lost_server import ServerUnavailable
from grpo_math.generation.request import Request, request_from
from grpo_math.problems.datasets import load_problems
from grpo_math.system.http import ServerError

TOKENIZER = byte_tokenizer()
STOPS = [TOKENIZER.eos_token_id]
SUMS = load_problems("generated:sums", "heldout", limit=3)
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
ROWS = [{"prompt": f"What is {a} + 4?", "answer": str(a + 4)} for a in range(5)]


@pytest.fixture
def adapter(small, tmp_path):
    return write_adapter_run(tmp_path / "run", small) / "adapter"


def reply(prompt: list[int], seed: int, length: int) -> list[int]:
    """A made-up model: it adds rightly, but one seed in three goes on until the limit."""
    problem = TOKENIZER.decode(prompt).split("What is ")[-1].split("?")[0]
    return TOKENIZER.encode(f"#### {eval(problem)}<|im_end|>" if seed % 3 else "and so on" * length)[:length]


@pytest.fixture
def server(server, small):
    """A server of the made-up model, with the ``bodies`` of the requests for its completions."""
    server.name, server.bodies = small, []

    def completion(body):
        server.bodies.append(body)
        ids = reply(body["prompt"][0], body["seed"], body["max_tokens"])
        return 200, json.dumps({"choices": [{"index": 0, "token_ids": ids}]})

    server.sampling = completion
    return server


def test_a_running_server_is_asked_for_one_completion_at_a_time(server, small):
    sampled = {"samples": 4, "temperature": 0.8, "max_new_tokens": 12, "batch_size": 6}
    results = evaluate(small, SUMS, backend="vllm-server", server=server.url, progress=False, **sampled)
    seeds = {batch_seed(batch_seed(0, number), i) for number in (0, 1) for i in range(6)}
    assert sorted(body["seed"] for body in server.bodies) == sorted(seeds), "vLLM repeats its draws for a seed"
    assert results["backend"] == "vllm", "as of a server that the evaluation starts"
    sent = {"model": small, "n": 1, "temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_tokens": 12}
    for body in server.bodies:
        assert len(body["prompt"]) == 1
        assert (sent | {"stop_token_ids": STOPS}).items() <= body.items()
        assert "logprobs" not in body
    assert {(row["category"], row["truncated"]) for row in results["rows"]} == {("truncated", True), ("correct", False)}


def test_a_server_is_started_for_the_evaluation_and_stopped_after_it(server, small, adapter, monkeypatch):
    """The process is a stand-in; tests/generation/test_sync.py starts a real vLLM server."""
    process = Mock(url=server.url, stop=lambda: stopped.append(len(server.bodies)))
    monkeypatch.setattr(engines, "ServerProcess", starting := Mock(return_value=process))
    monkeypatch.setenv("GRPO_MATH_VLLM", "sh")  # any program
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(adapter))
    stopped = []
    evaluate(small, SUMS, max_new_tokens=1, backend="vllm", progress=False)
    assert "--weight-transfer-config" not in starting.call_args.args[0]
    for calls in (process.mock_calls, server.asked, server.bodies, stopped):
        calls.clear()
    evaluate(small, SUMS, adapter=str(adapter), max_new_tokens=12, backend="vllm", progress=False)
    (command, environment, *_), _ = starting.call_args
    assert process.mock_calls == [call.wait(engines.STARTUP)]
    assert stopped == [len(server.bodies)], "after the last request"
    assert command[:3] == [shutil.which("sh"), "serve", small]
    assert command[command.index("--max-lora-rank") + 1] == "8"
    assert environment["VLLM_API_KEY"]
    assert list(adapter.glob("grpo_math-*")) == [], "the log of a server that started is deleted"
    assert server.asked[:3] == ["/v1/models", "/v1/unload_lora_adapter", "/v1/load_lora_adapter"]
    assert {body["model"] for body in server.bodies} == server.adapters.keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "vlm"}, "did you mean 'vllm'"),
        ({"backend": "vllm-server"}, "server=None does not go with backend=vllm-server: give --backend vllm-server"),
        ({"server": "http://127.0.0.1:1"}, "server='http://127.0.0.1:1' does not go with backend=hf"),
        ({"adapter": "nowhere"}, "adapter='nowhere' has no adapter_config.json"),
        ({}, "model='no/model' has no "),
        ({"problems": [*ROWS, {"prompt": "?"}]}, "problems='row 5' has no gold answer; its columns: prompt: give each"),
        ({"problems": [{"answer": "7", "n": 1}]}, "problems='row 0' has no prompt; its columns: answer, n: give each"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(arguments, words):
    with pytest.raises(ConfigError, match=words):
        evaluate("no/model", **{"problems": SUMS, "progress": False, **arguments})


def test_a_model_that_does_not_fit_is_named(server, small, adapter):
    with pytest.raises(ConfigError, match=r"model='other' is not what the server has, '.*small': give --model "):
        engines.Model("other", backend=engines.Backend("vllm-server", server.url)).served  # noqa: B018
    (adapter / "adapter_model.safetensors").write_bytes(b"1")
    with pytest.raises(ConfigError, match=r"adapter='.*/adapter' has no weights for .*small that can be loaded"):
        evaluate(small, SUMS, adapter=str(adapter), progress=False)
    model = engines.Model(small)
    model.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"model='.*small' has no chat template that takes this prompt"):
        model.check(SUMS[0]["prompt"])


def test_an_adapter_of_a_model_that_sees_is_on_its_layers_or_refused(small, tmp_path):
    """AutoModelForCausalLM loads the text model of Qwen3.5, whose layers have other names."""
    model, base, adapter = tiny_model("qwen3_5"), str(tmp_path / "base"), str(tmp_path / "adapter")
    model.save_pretrained(base)
    trained = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    trained.save_pretrained(adapter)
    prompts, request = torch.arange(3, 20)[None], Request(model_init_kwargs={"dtype": "float32"})
    with torch.no_grad():
        both = [one(input_ids=prompts).logits for one in (trained, engines.load_weights(base, adapter, request))]
    assert torch.allclose(*both, atol=1e-5)
    with pytest.raises(ConfigError, match=r"has no weights for .*small that can be loaded .*missing adapter keys"):
        engines.load_weights(small, adapter)


def test_a_model_is_changed_as_in_training_and_a_server_is_refused(server, small):
    request = Request(model_init_kwargs={"rms_norm_eps": 0.5})
    assert engines.Model(small, request=request).weights.config.rms_norm_eps == 0.5
    served = engines.Model(small, backend=engines.Backend("vllm-server", server.url))
    with pytest.raises(ConfigError, match=r"model_init_kwargs=.rms_norm_eps. changes the model, .* use --backend hf"):
        served.generator(request)
    with pytest.raises(ConfigError, match="generation_kwargs='num_beams' is a setting of transformers, not of vLLM"):
        served.generator(Request(options={"presence_penalty": 0.5, "num_beams": 2}))


@pytest.mark.parametrize(
    ("settings", "serves", "refused"),
    [
        ({"load_in_4bit": True}, [None], True),
        ({"load_in_4bit": True}, ["bitsandbytes"], False),
        ({"load_in_8bit": True}, ["bitsandbytes"], True),
        ({"load_in_8bit": True}, [], True),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, [], True),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, [], False),
    ],
)
def test_a_base_is_quantised_as_in_the_run_or_refused(settings, serves, refused, small):
    """``serves``: what a server says, if there is one."""
    backend = engines.Backend("vllm-server", "http://127.0.0.1:1") if serves else engines.Backend("vllm")
    model = engines.Model(small, backend=backend)
    model.served = (SimpleNamespace(settings=lambda: {"model_config": {"quantization": serves[0]}}), "base")
    message = "^backend='vllm.*' does not quantise the base as the run did: use --backend hf$"
    with pytest.raises(ConfigError, match=message) if refused else nullcontext():
        model.generator(request_from(settings))


@pytest.mark.parametrize(("rank", "ranks", "together", "local"), [(1, 3, 1, [1, 4]), (2, 3, 1, [2]), (2, 4, 2, [1, 3])])
def test_each_rank_has_a_share_of_the_rows(rank, ranks, together, local):
    shared = rank // together
    accelerator = Mock(process_index=rank, num_processes=ranks)
    trainer = SimpleNamespace(accelerator=accelerator, model=SimpleNamespace(config=None), processing_class=None)
    model = trainer_engines.TrainerModel(trainer)
    model.tensor_parallel = together
    assert model.gather_from_ranks(range(5), lambda rows, share: (list(rows), share)) == [(local, shared)]
    assert model.gather_from_ranks([7], lambda rows, _: list(rows)) == [[7]], "a rank without rows would not take part"


@pytest.mark.parametrize(("path", "name"), [("org/model", "org/model"), ("", "in memory")])
def test_a_loaded_model_has_the_name_that_it_was_loaded_by(path, name):
    assert engines.Model(SimpleNamespace(config=SimpleNamespace(_name_or_path=path))).name == name


# The engine of a training


@pytest.fixture
def trainer(small, tmp_path):
    return make(MathGRPOTrainer, MathGRPOConfig, small, byte_tokenizer(), tmp_path, "accuracy", ROWS)


def test_a_trainer_writes_before_and_after_of_all_ranks(trainer, script, monkeypatch, tmp_path):
    script({row["prompt"]: [f"#### {row['answer'] if i < 3 else 0}"] for i, row in enumerate(ROWS)})
    monkeypatch.setattr(
        engines.Model,
        "gather_from_ranks",
        lambda model, rows, call: [call(rows[i::6] or rows[:1], i) for i in range(6)],
    )
    before = evaluate(trainer, ROWS, extra={"split": "mine"}, progress=False)
    assert [row["id"] for row in before["rows"]] == [f"row/{i}" for i in range(5)]
    assert (before["n"], before["accuracy"], before["max_new_tokens"], before["split"]) == (5, 0.6, 12, "mine")
    alone = evaluate(trainer.model, ROWS, tokenizer=byte_tokenizer(), max_new_tokens=12, progress=False)
    assert alone["problems_hash"] == before["problems_hash"]
    trainer.state.global_step = 1
    after = evaluate(trainer, ROWS, max_new_tokens=9, progress=False)
    for name, results in (("before.json", before), ("after.json", after)):
        assert json.loads((tmp_path / name).read_text())["max_new_tokens"] == results["max_new_tokens"]


def vllm_of(trainer, mode: str) -> Mock:
    """A stand-in for TRL's VLLMGeneration, in this process or on a server, as the trainer's engine."""
    vllm = Mock(mode=mode, tensor_parallel_size=1, enable_sleep_mode=True, _llm_weights_sleeping=True, context=100)
    vllm.llm.llm_engine.model_config.max_model_len = 90
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, vllm, 0
    return vllm


def test_a_colocated_engine_wakes_with_the_newest_weights_and_sleeps_again(trainer, monkeypatch):
    def generate(asked, sampling_params, use_tqdm):
        torch.rand(1)  # vLLM in this process draws from torch's generator
        ids = [reply(one["prompt_token_ids"], 1, 12) for one in asked]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens))]) for tokens in ids]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(StructuredOutputsParams=SimpleNamespace))
    trainer.args.vllm_structured_outputs_regex = "[0-9]+"
    vllm, of_training = vllm_of(trainer, "colocate"), trainer._metrics
    vllm.llm.generate.side_effect = generate
    before = torch.get_rng_state()
    results = evaluate(trainer, ROWS, temperature=0.5, max_new_tokens=12, seed=3, progress=False)
    assert (results["accuracy"], results["backend"]) == (1.0, "vllm")
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer._metrics is of_training
    assert vllm._llm_weights_sleeping
    one = {**PLAIN, "temperature": 0.5, "max_tokens": 12, "stop_token_ids": STOPS}
    one["structured_outputs"] = SimpleNamespace(regex="[0-9]+")
    params = [{"seed": batch_seed(batch_seed(3, 0), i), **one} for i in range(5)]
    assert vllm.mock_calls == [
        call.sync_weights(),  # a sleep discards the weights
        call.llm.wake_up(tags=["kv_cache"]),
        call.llm.generate(ANY, sampling_params=params, use_tqdm=False),
        call.llm.sleep(level=2),
    ]


def test_the_server_of_a_training_gets_new_weights_once_a_step(trainer):
    vllm = vllm_of(trainer, "server")
    vllm.sampler.request.side_effect = lambda prompts, seed, longest, **settings: (
        lambda: [Completion(reply(prompt, 1, longest)) for prompt in prompts]
    )
    for step in (0, 4, 4):
        trainer.state.global_step = step
        assert evaluate(trainer, ROWS, temperature=0.5, max_new_tokens=12, seed=3, progress=False)["accuracy"] == 1
    settings = {"logprobs": False, "extra": {**PLAIN, "temperature": 0.5, "stop_token_ids": STOPS}}
    for asked in vllm.sampler.request.call_args_list:
        assert (asked.args[1:], asked.kwargs) == ((batch_seed(3, 0), 12), settings), "one batch"
    assert vllm.sync_weights.call_count == 1
    vllm.sampler.request.side_effect = ServerError("lost", 500)
    with pytest.raises(ServerUnavailable, match=r"^lost$"):  # for which the trainer saves a checkpoint
        evaluate(trainer, ROWS, progress=False)


def test_an_engine_has_its_own_context_and_two_problems_share_no_id(trainer):
    for mode, context in (("colocate", 90), ("server", 100)):
        vllm_of(trainer, mode)
        assert trainer_engines.TrainerVLLM(trainer).context == context
    with pytest.raises(ConfigError, match="rows=2 share an id"):
        evaluate(trainer, [{**row, "id": "same"} for row in ROWS[:2]])


def test_trls_own_server_is_asked_by_the_name_of_its_model(trainer, server, small):
    vllm = trainer.vllm_generation = Mock(spec=["mode", "vllm_client"], mode="server")
    vllm.vllm_client.base_url = server.url
    generate = trainer_engines.TrainerVLLM(trainer).generator(Request(max_new_tokens=12))
    (done,) = generate([TOKENIZER.encode("What is 2 + 3?")], 0)
    assert done.tokens == reply(TOKENIZER.encode("What is 2 + 3?"), batch_seed(0, 0), 12)
    assert server.bodies[0]["model"] == small


def test_the_requests_of_a_large_batch_have_more_time():
    client = Mock()
    client.generate.side_effect = lambda *args, **kwargs: [Completion([5])]
    engines.with_server(client, "base", TOKENIZER, STOPS, Request(max_new_tokens=1_000_000))([[5]] * 3, 0)
    assert [call.kwargs["timeout"] for call in client.generate.mock_calls] == [6000] * 3


def test_weights_that_are_split_over_processes_need_an_engine(trainer):
    trainer.accelerator = Mock(state=Mock(spec=["deepspeed_plugin"], deepspeed_plugin=Mock(zero_stage=3)))
    with pytest.raises(ConfigError, match=r"trainer='MathGRPOTrainer' has its weights split .*\(ZeRO-3\)"):
        evaluate(trainer, ROWS)
