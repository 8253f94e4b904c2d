"""The sync against stand-ins for vLLM (small_vllm.py) that restart, stay away, or share work."""

import gc
import json
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from accelerate import PartialState
from peft import PeftModel
from small_generation import small_model
from small_vllm import adapted, generation_of, move
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.colocated_sampler import release_cache
from grpo_math.generation.completions import batch_seed
from grpo_math.generation.lost_server import ServerUnavailable, one_line_for_lost_servers
from grpo_math.generation.sync import AdapterGeneration, KeyedClient, adapter_sync
from grpo_math.generation.vllm_server import without_aborts
from grpo_math.run import speed_ups
from grpo_math.system.http import ServerError
from grpo_math.system.machine import free_port
from grpo_math.system.signals import stopping

PROMPTS = [[5, 6, 7], [8, 9], [10]]
PAIRS = [prompt for prompt in PROMPTS for _ in range(2)]
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
CONNECT = ["/health", "/health", "/version", "/server_info?config_format=json"]
LOAD, UNLOAD, ASK = ["/v1/models", "/v1/load_lora_adapter"], ["/v1/unload_lora_adapter"], ["/v1/completions"]
CANARY = [CONNECT[-1], *2 * ASK]  # of a server with two replicas


@pytest.fixture
def policy():
    return adapted(small_model())


@pytest.fixture
def synced(server, policy, tmp_path):
    """A generation that has sent its adapter, without the canary."""

    def make(**settings):
        generation = generation_of(policy, server.url, tmp_path, **{"server_timeout": 0.2, **settings})
        generation.canary.agreed = 2
        generation.sync_weights()
        return generation

    return make


def test_each_sync_has_a_folder_of_its_own_until_the_run_ends(server, policy, tmp_path):
    (tmp_path / "vllm_adapters_0_killed").mkdir()
    (tmp_path / "vllm_adapters_01_other").mkdir()
    server.settings["parallel_config"] = {"data_parallel_size": 2}
    generation = generation_of(policy, server.url, tmp_path)
    store, asked = generation.sampler.store, [*CONNECT]
    for number in (1, 2, 3):
        generation.sync_weights()
        assert generation.canary.due == (number < 3)
        generation.generate(PAIRS, None, 2)
        assert {*tmp_path.iterdir()} == {store.root, tmp_path / "vllm_adapters_01_other"}
        assert [*store.root.iterdir()] == [store.current]
        assert [*server.adapters] == [store.current.name]
        # The second canary also sends the adapter with a multiple of its effect, and then as it is.
        twice = 2 * [*LOAD, *UNLOAD, *CANARY] if number == 2 else []
        asked += [*LOAD, *(UNLOAD if number > 1 else []), *(CANARY if number == 1 else []), *twice, *3 * ASK]
        assert server.asked == asked
        sent = PeftModel.from_pretrained(small_model(), store.current).state_dict()
        assert all(torch.equal(sent[name], tensor) for name, tensor in policy.state_dict().items())
        move(policy, 0.3)
    assert (generation.canary.agreed, store.current.name) == (2, f"{store.run}-5")
    assert {headers.get("X-data-parallel-rank") for headers in server.headers} == {None, "0", "1"}
    del generation, store
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["vllm_adapters_01_other"]


def test_every_setting_is_sent_and_answers_come_in_the_order_of_prompts(server, synced):
    extra = {"generation_kwargs": {"stop": ["</answer>"]}, "structured_outputs_regex": "[0-9]+"}
    generation, bodies = synced(**SAMPLING, **extra), []
    server.sampling = bodies.append
    for rollout, (generation.min_p, min_p) in enumerate([(0.05, 0.05), (None, 0.0)]):
        prompts, token_ids, logprobs, ids = generation.generate(PAIRS, None, 2)
        body = {
            **SAMPLING,
            "min_p": min_p,
            "n": 2,
            "max_tokens": 8,
            "model": generation.sampler.store.current.name,
            "return_token_ids": True,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            "stop": ["</answer>"],
            "structured_outputs": {"regex": "[0-9]+"},
        }
        seeds = [batch_seed(batch_seed(3, rollout), number) for number in range(3)]
        expected = [{**body, "prompt": [ids], "seed": seed} for ids, seed in zip(PROMPTS, seeds, strict=True)]
        assert sorted(bodies[-3:], key=lambda body: seeds.index(body["seed"])) == expected
        choices = [choice for body in expected for choice in server.complete(body)]
        assert prompts == PAIRS
        assert token_ids == [choice["token_ids"] for choice in choices]
        assert logprobs == [[[x] for x in choice["logprobs"]["token_logprobs"]] for choice in choices]
        assert ids == [[[token] for token in row] for row in token_ids]


def test_a_prompt_of_a_later_turn_gets_the_tokens_that_are_left(server, synced):
    generation, bodies = synced(), []
    server.sampling = bodies.append
    generation.sampler.request([[5] * 505, [5] * 600], 0, 20, logprobs=False)()
    assert sorted((len(body["prompt"][0]), body["max_tokens"]) for body in bodies) == [(505, 7), (600, 1)]
    assert not any("logprobs" in body for body in bodies)


def test_the_requests_of_a_large_batch_have_more_time(server, synced):
    sampler = synced().sampler
    server.sampling = lambda body: time.sleep(0.5)
    with pytest.raises(ServerError, match="does not answer"):
        sampler.server.generate([5], model=sampler.store.current.name, max_tokens=1, timeout=0.1)
    sampler.server.generate = Mock(return_value=[])
    for prompts in (1, 2):
        sampler.request([[5]] * prompts, 0, 1_000_000, n=3)()
    assert [call.kwargs["timeout"] for call in sampler.server.generate.mock_calls] == [6000, 12_000, 12_000]


def test_requests_that_fail_are_asked_again_and_no_others(server, synced, monkeypatch):
    # Some have not been sent when the first one fails.
    monkeypatch.setattr("grpo_math.generation.completions.MAX_REQUESTS", 2)
    sampler, prompts = synced().sampler, [[5, number] for number in range(1, 11)]
    before = sampler.state_dict()
    expected = sampler.sample(prompts, 1)
    asked, fails = Counter(), {1: 1, 3: 2, 9: 1}

    def lose(body):
        number = body["prompt"][0][1]
        asked[number] += 1
        return (500, "the engine has restarted") if asked[number] <= fails.get(number, 0) else None

    server.sampling = lose
    sampler.load_state_dict(before)
    assert sampler.sample(prompts, 1) == expected
    assert asked == Counter({**dict.fromkeys(range(1, 11), 1), 3: 3, 1: 2, 9: 2})


def test_a_completion_that_the_server_aborts_is_sampled_again(server, synced, monkeypatch):
    generation, aborts = synced(), [True]
    expected = generation.generate(PROMPTS, None, 1)
    aborted = {"choices": [{"index": 0, "token_ids": [5], "finish_reason": "abort"}]}
    server.sampling, generation.sampler.sampled = (
        lambda body: (200, json.dumps(aborted)) if aborts and aborts.pop() else None,
        0,
    )
    assert generation.generate(PROMPTS, None, 1) == expected
    answers = [aborted, {"choices": []}]
    monkeypatch.setattr(vllm_generation.VLLMClient, "_post", lambda self, url, **kwargs: answers.pop(0))
    assert KeyedClient._post(KeyedClient.__new__(KeyedClient), "url") == {"choices": []}
    with pytest.raises(ServerError, match="url aborted a completion 3 times"):
        without_aborts("url", lambda: aborted)


def test_a_server_that_restarts_gets_the_adapter_again(server, synced):
    generation = synced()
    expected = generation.generate(PROMPTS, None, 1)

    def restart(body):
        server.sampling = lambda body: None  # once
        server.stop()
        server.adapters.clear()
        server.start()
        return 500, "lost"

    server.sampling, generation.sampler.sampled = restart, 0
    assert generation.generate(PROMPTS, None, 1) == expected
    assert [*server.adapters] == [generation.sampler.store.current.name]
    server.adapters.clear()  # a restart between two rollouts
    assert len(generation.generate(PROMPTS, None, 1)[1]) == 3
    # After each restart the canary has sent the adapter enlarged, and as it is.
    assert generation.sampler.store.sent == 5


def test_a_prompt_with_an_image_is_refused(synced):
    generation = synced()
    assert len(generation.generate(PROMPTS, [None] * 3, 1)[1]) == 3
    with pytest.raises(UserError, match="vllm_sync=adapter supports text only: set vllm_sync to merged"):
        generation.generate(PROMPTS, [None, ["an image"], None], 1)


def test_threads_that_meet_a_restarted_server_load_the_adapter_once(server, synced):
    sampler = synced().sampler
    server.adapters.clear()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(sampler._load, [sampler.store.current] * 8))
    assert server.asked[-9:] == [*LOAD, *7 * LOAD[:1]]


def test_a_server_that_is_lost_for_good_or_refuses_a_request_ends_the_run(server, synced):
    generation = synced()
    server.sampling = lambda body: (400, "no such setting")
    with pytest.raises(ServerError, match="answers 400: no such setting"):
        generation.generate(PROMPTS, None, 1)
    requests = []
    server.sampling = lambda body: requests.append(body) or (500, "lost")
    with pytest.raises(ServerUnavailable, match="was lost 3 times over one request"):
        generation.generate(PROMPTS[:1], None, 1)
    assert len(requests) == 3
    server.version = "1.0"
    with pytest.raises(ServerUnavailable, match=r"runs vLLM 1\.0"):
        generation.generate(PROMPTS[:1], None, 1)
    server.stop()
    line = r"no vLLM server answers at .* after 0 seconds.* Start it: grpo-math serve .*--lora_r 4 --port \d+ .*"
    with pytest.raises(ServerUnavailable, match=line + "--enable-lora --max-lora-rank 8"):
        generation.generate(PROMPTS, None, 1)
    generation.sampler.seconds = 60.0
    with stopping() as stop:
        stop.begin()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(ServerUnavailable, match="stopped after 0 s without an answer from http://"):
            generation.generate(PROMPTS, None, 1)


def test_a_script_whose_server_never_answers_ends_with_the_line_that_starts_one(policy, monkeypatch, capsys):
    """With whole weights, which TRL's client sends: it would raise its own error after its own wait."""
    PartialState()  # as TRL's trainer has made it
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Mock(side_effect=AssertionError("is not called")))
    args = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": f"http://{address}"}
    with adapter_sync("merged", SimpleNamespace(**args, vllm_server_timeout=0.1)):  # noqa: SIM117
        with pytest.raises(ServerUnavailable, match=f"answers at http://{address} after 0 seconds.*serve") as lost:
            grpo_trainer.VLLMGeneration(model=policy)
    monkeypatch.setattr(sys, "excepthook", before := Mock())
    one_line_for_lost_servers.__wrapped__()
    sys.excepthook(lost.type, lost.value, lost.tb)
    assert capsys.readouterr().err == f"error: {lost.value}\n"
    sys.excepthook(ValueError, other := ValueError(), None)
    assert before.mock_calls == [call(ValueError, other, None)]


def output_of(choice):
    """A choice of the server as vLLM's `LLM` gives it."""
    pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    logprobs = [{token: SimpleNamespace(logprob=logprob, rank=1)} for token, logprob in pairs]
    completion = SimpleNamespace(token_ids=choice["token_ids"], logprobs=logprobs)
    return SimpleNamespace(prompt_token_ids=None, outputs=[completion])


@pytest.fixture
def colocated(server, monkeypatch):
    """A stand-in for vLLM in this process, and the settings that it gets. test_colocated.py has vLLM itself."""

    def generate(prompts, sampling_params, lora_request, use_tqdm):
        name, _, path = lora_request
        server.served("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        body = {"n": 1, **vars(sampling_params), "model": name, "prompt": [one["prompt_token_ids"] for one in prompts]}
        return [*map(output_of, server.complete(body))]

    engine, settings = Mock(generate=Mock(side_effect=generate)), {}
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **given: settings.update(given) or engine, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=lambda *given: given))
    return engine, settings


def test_a_colocated_engine_is_awake_and_has_the_new_adapter_when_it_samples(colocated, policy, tmp_path):
    engine, settings = colocated
    generation = generation_of(policy, None, tmp_path, mode="colocate", enable_sleep_mode=True, max_model_length=64)
    assert settings.items() >= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}.items()
    assert (generation.canary.tolerance, generation.sampler.context) == (0.2, 64)
    generation.canary.tolerance = 0.02
    for size in (0.3, 0.0):
        generation.sync_weights()
        generation.generate(PROMPTS, None, 1)
        move(policy, size)
    for _ in range(2):  # rollouts that differ
        generation.canary.watch(1.0)
    store = generation.sampler.store
    adapters = [(f"{store.run}-{n}", n, str(store.root / f"{store.run}-{n}")) for n in range(5)]
    # At each sync the canary asks first. At the second one, it also sends the adapter enlarged (3), and as it is (4).
    first = [["weights"], *2 * [["kv_cache"], adapters[1]]]
    second = [["weights"], ["kv_cache"], adapters[3], *2 * [["kv_cache"], adapters[4]]]
    asked = [next(iter(call.kwargs.values())) for call in engine.mock_calls]
    # 1: the level of sleep.
    assert asked == [1, *first, 1, *second, 1, ["weights"], ["kv_cache"], adapters[4], 1]


def sharing(base):
    """`AdapterGeneration` on a shared base, as a ``kind`` of `generation_of`."""
    return lambda args, _, **kwargs: AdapterGeneration(args, base, **kwargs)


def test_a_shared_engine_has_the_policys_dtype_and_its_weights_do_not_sleep(colocated, policy, tmp_path):
    engine, settings = colocated
    base = Mock(modules={"model.experts": None}, locate=nullcontext)
    colocated_settings = {"mode": "colocate", "enable_sleep_mode": True, "max_model_length": 64}
    generation = generation_of(policy, None, tmp_path, sharing(base), **colocated_settings)
    assert settings["dtype"] == "float32"
    assert "moe_backend" not in settings
    for _ in range(2):
        generation.sync_weights()
        # Checked once, when the model is prepared.
        assert base.mock_calls == [call.attach(policy, torch.device("cpu")), call.check(policy)]
        generation.generate(PROMPTS, None, 1)
    assert call.wake_up(tags=["weights"]) not in engine.mock_calls
    assert call.release_kv_cache_memory() in engine.mock_calls


def test_weights_that_are_split_over_gpus_are_not_shared_and_fsdp_1_is_refused(policy, tmp_path, monkeypatch):
    zero3 = Mock(state=Mock(spec=["deepspeed_plugin"], deepspeed_plugin=Mock(zero_stage=3)))
    with pytest.raises(ConfigError, match=r"vllm_share_weights=True .* ZeRO-3 splits each weight over the GPUs"):
        generation_of(policy, None, tmp_path, sharing(Mock()), mode="colocate", accelerator=zero3)
    monkeypatch.setattr(vllm_generation, "DistributedBackend", Mock(return_value=Mock(fsdp_version=1)))
    with pytest.raises(ConfigError, match="fsdp_version=1 cannot be synced as an adapter: use FSDP 2, or DeepSpeed"):
        generation_of(policy, None, tmp_path, mode="colocate")


def test_a_cache_gives_back_its_memory_while_the_weights_stay_in_place():
    llm, old = Mock(), Mock(spec=["sleep", "wake_up"])
    for engine in (llm, old):
        release_cache(engine, engine.sleep, level=2)
    assert llm.mock_calls == [call.llm_engine.step(), call.sleep(level=0), call.release_kv_cache_memory()]
    assert old.mock_calls == [call.sleep(level=1), call.wake_up(tags=["weights"])]


def test_the_next_batch_is_sampled_with_the_adapter_before_the_update(server, synced, policy, caplog):
    speed_ups.forget()  # a reason is logged once in a process
    generation = synced(args={"staleness": 1})
    store, prefetch = generation.sampler.store, generation.prefetch

    def batch(step, prompts=PROMPTS):
        with prefetch.training_batch(step, PROMPTS):
            completions = generation.generate(prompts, None, 1)[1]
        return completions, step - prefetch.taken.step

    older, (first, on_policy) = store.current, batch(0)
    prefetch.requested.wait()
    move(policy, 0.3)
    generation.sync_weights()
    assert [*store.root.iterdir()] == [store.current] != [older]
    generation.sampler.sampled = 1
    now = generation.generate(PROMPTS, None, 1)[1]  # an evaluation, which uses the adapter as it is now
    prefetched, lag = batch(1)
    assert prefetched != now
    assert prefetched != first
    assert [*store.root.iterdir()] == [store.current]
    assert "differs" not in caplog.text
    assert (on_policy, lag, batch(2, PROMPTS[:2])[1]) == (0, 1, 0)
    assert "a batch differed from the prefetched prompts" in caplog.text


def test_a_folder_stays_while_a_request_needs_it(server, synced, policy):
    generation = synced()
    store, held = generation.sampler.store, generation.sampler.training_request(PROMPTS, 1)
    older = store.current
    generation.sync_weights()
    assert {*store.root.iterdir()} == {older, store.current}
    held()
    generation.sampler.remove_unused()
    assert ([*store.root.iterdir()], [*server.adapters]) == ([store.current], [store.current.name])


@pytest.mark.parametrize(
    ("settings", "lora", "args", "message"),
    [
        ({"lora_config": None}, {}, {}, "lora_r=4 cannot be served: .* takes no adapters: .*--enable-lora"),
        ({"lora_config": {"max_lora_rank": 3}}, {}, {}, "takes adapters up to rank 3: .*--max-lora-rank 8, or"),
        ({"lora_config": {"max_lora_rank": 4}}, {}, {"staleness": 1}, "staleness=1 has two adapters .*--max-loras 2"),
        ({"model_config": {"dtype": "float32", "max_model_len": 8}}, {}, {}, "max_completion_length=8 leaves no room"),
        ({"version": "0.20.1"}, {}, {}, "runs vLLM 0.20.1"),
        ({}, {"use_dora": True}, {}, "use_dora=True cannot be synced"),
    ],
)
def test_what_the_server_cannot_do_is_an_error_before_the_first_step(settings, lora, args, message, server, tmp_path):
    server.version = settings.get("version", server.version)
    server.settings |= settings
    with pytest.raises((ConfigError, ServerError), match=message):
        generation_of(adapted(small_model(), **lora), server.url, tmp_path, args=args)


@pytest.mark.parametrize(("dtype", "tolerance"), [("torch.float32", 0.02), ("torch.bfloat16", 0.2)])
def test_the_canary_is_strict_only_in_float32(dtype, tolerance, server, policy, tmp_path):
    server.settings["model_config"] = {"dtype": dtype, "max_model_len": 512}
    assert generation_of(policy, server.url, tmp_path).canary.tolerance == tolerance


@pytest.mark.parametrize(
    ("vllm_sync", "staleness", "adapter", "kind"),
    [("adapter", 1, True, "ours"), ("merged", 0, True, "TRL's"), ("adapter", 0, False, "TRL's"), (None, 0, True, "no")],
)
def test_full_fine_tuning_and_merged_keep_trls_own_path(vllm_sync, staleness, adapter, kind, policy, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", lambda model: "TRL's")
    monkeypatch.setattr("grpo_math.generation.sync.AdapterGeneration", lambda args, shared, model: "ours")
    trls = grpo_trainer.VLLMGeneration, vllm_generation.VLLMClient
    args = SimpleNamespace(use_vllm=vllm_sync is not None, vllm_mode="colocate", staleness=staleness)
    model = policy if adapter else policy.get_base_model()
    with adapter_sync(vllm_sync, args):
        assert (vllm_generation.VLLMClient is KeyedClient) == args.use_vllm
        assert not args.use_vllm or grpo_trainer.VLLMGeneration(model=model) == kind
        args.staleness = 1
        with pytest.raises(ConfigError, match="staleness=1 needs an adapter") if kind == "TRL's" else nullcontext():
            grpo_trainer.VLLMGeneration(model=model)
    args.vllm_share_weights = True
    with (
        adapter_sync(vllm_sync, args),
        pytest.raises(ConfigError, match="no adapter is trained") if kind == "TRL's" else nullcontext(),
    ):
        grpo_trainer.VLLMGeneration(model=model)
    assert (grpo_trainer.VLLMGeneration, vllm_generation.VLLMClient) == trls
