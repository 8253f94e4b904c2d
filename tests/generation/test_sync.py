"""The adapter alone goes to a real vLLM server on the CPU, whose `vllm` GRPO_MATH_VLLM names (vllm_environment.sh).

Two processes of DeepSpeed ZeRO-2 train a tiny model with LoRA against it, the server is killed in the middle, and the
canary is shown syncs that are broken on purpose. All tests share one server of two data-parallel copies.
tests/train/test_launcher.py has SmolLM2-135M.
"""

import json
import os
import signal
import subprocess

import pytest
import torch
from launching import ROOT, accelerate, variables
from peft import LoraConfig, get_peft_model
from small_vllm import generation_of, move
from transformers import AutoModelForCausalLM
from trl.generation import vllm_client
from vllm_process import VLLM, serving
from waiting import descendants, until

from grpo_math import evaluate
from grpo_math.errors import UserError
from grpo_math.generation.server_sampler import ServerSampler
from grpo_math.generation.sync import KeyedClient
from grpo_math.generation.vllm_server import Server
from grpo_math.problems.datasets import load_problems
from grpo_math.system.http import ServerError

pytestmark = [
    pytest.mark.skipif(not VLLM, reason="GRPO_MATH_VLLM names no vllm to serve with"),
    pytest.mark.timeout(1500),  # a start of the server may take minutes
    pytest.mark.full,
]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("served")


@pytest.fixture(scope="module")  # its key stands in this process's environment
def process(model, tmp_path_factory):
    # In bfloat16 a CPU without AVX-512 takes several times as long.
    on_cpu = {"dtype": "float32", "lora_rank": 8, "on_gpu": False, "extra": ("--max-num-seqs", "16")}
    with serving(model, tmp_path_factory.mktemp("vllm"), VLLM, copies=2, **on_cpu) as process:
        yield process


def test_two_deepspeed_processes_train_through_a_server_that_is_killed(process, model, tmp_path):
    """One rollout ahead, so that two adapters are in use."""
    start = accelerate("zero2_offload", tmp_path, "--num_processes", "2")
    killed, log = descendants(process.supervised.process.pid)[0].pid, tmp_path / "run.log"
    with log.open("wb") as file:
        program = str(ROOT / "tests/processes/train_with_vllm.py")
        command = [*start, program, model, str(tmp_path), process.url, str(killed)]
        run = subprocess.Popen(command, env=variables(), cwd=ROOT, start_new_session=True, stdout=file, stderr=file)
    try:
        until(lambda: not process.running or run.poll() is not None, seconds=700, pause=0.2)
        assert run.poll() is None, log.read_text()[-4000:]
        process.restart()
        until(lambda: run.poll() is not None, seconds=700, pause=0.2)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    server_log = process.log.read_text()
    assert run.returncode == 0, f"{server_log[-4000:]}\n{log.read_text()[-4000:]}"

    record = json.loads((tmp_path / "record.json").read_text())
    answers, lines = record.pop("answers"), record.pop("history")
    assert record == {
        "distributed_type": "DistributedType.DEEPSPEED",
        "processes": 2,
        "base_is_as_it_was": True,
        "canaries": 2,
        "folders": 1,  # no older adapter is left
    }
    assert not [*tmp_path.glob("run/vllm_adapters*")]
    assert len(answers) == 4
    for answer in answers:
        assert (torch.tensor(answer["vllm"]) - torch.tensor(answer["trainer"])).abs().mean() < 0.2
    assert answers[0]["vllm"] != answers[-1]["vllm"], "training changes the greedy answer"
    assert [(line["step"], line["staleness"]) for line in lines] == [(1, 0), (2, 1), (3, 1), (4, 1)]
    for line in lines:
        assert 0 < line["seconds/sync"] < line["step_time"]
        assert line["sampling/sampling_logp_difference/mean"] < 0.3  # an older adapter's
        assert 0 < line["sampling/effective_share"] <= 1.0001


def test_an_evaluation_by_a_real_server_is_that_of_transformers(process, model, tokenizer):
    rows = load_problems("generated:sums", "heldout", limit=6)
    served = evaluate(model, rows, backend="vllm-server", server=process.url, max_new_tokens=12)
    here = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = evaluate(here, rows, tokenizer=tokenizer, max_new_tokens=12)
    same = [one["completion"] == other["completion"] for one, other in zip(plain["rows"], served["rows"], strict=True)]
    assert sum(same) >= 4  # near ties may differ


def test_the_server_does_nothing_without_its_key_and_does_not_tell_it(process, model, monkeypatch):
    url, secret = process.url, os.environ["VLLM_API_KEY"]
    body = {"lora_name": "x", "lora_path": "/tmp", "method": "list_loras", "prompt": "a", "model": model}
    posts = [
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions", "/collective_rpc", "/pause"),
        *("/sleep?level=2", "/reset_prefix_cache", "/invocations", "/tokenize"),  # open in vLLM itself
    ]
    with monkeypatch.context() as environment:
        environment.setenv("VLLM_API_KEY", f"{secret}x")
        wrong = Server(url)
    for path, sent in [*((path, body) for path in posts), ("/server_info", None), ("/v1/models", None)]:
        with pytest.raises(ServerError) as error:
            wrong.http.ask(path, sent)
        assert error.value.status == 401, path
    assert wrong.healthy()
    shown = [
        json.dumps(Server(url).settings()),
        process.log.read_text(),
        *(str(started.cmdline()) for started in descendants(process.supervised.process.pid)),
    ]
    assert secret not in "".join(shown)
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda **versions: True)
    assert KeyedClient(base_url=url).get_server_info()["lora_config"]["max_lora_rank"] == 8
    with pytest.raises(Exception, match="401"):
        vllm_client.VLLMClient(base_url=url)


def publish_in_same_folder(sampler, tensors, scale):
    """The trap: one name, one folder, loaded in place, and vLLM's prefix cache not reset."""
    store = sampler.store
    store.current = store.root / f"{store.run}-same"
    store.remove(store.current)
    store.write(tensors, scale)
    body = {"lora_name": store.current.name, "lora_path": str(store.current), "load_inplace": True}
    sampler.server.http.ask("/v1/load_lora_adapter", body)


@pytest.fixture
def policy(model):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))


def syncs(model, tokenizer, url, tmp_path):
    """Two syncs with a small update between them, and a rollout after each."""
    generation = generation_of(model, url, tmp_path)
    prompts = tokenizer(["The capital of France is", "Water boils at a temperature of"])["input_ids"]
    for _ in range(2):
        generation.sync_weights()
        generation.generate(prompts, None, 1)
        move(model, 1e-5)  # as far as Adam goes in a step at a learning rate of 1e-5
    return generation


def test_the_canary_agrees_on_every_copy_of_the_model(process, model, policy, tokenizer, tmp_path):
    server = Server(process.url)
    assert server.replicas() == [0, 1]
    generation = syncs(policy, tokenizer, server.url, tmp_path)
    store = generation.sampler.store
    assert generation.canary.agreed == 2
    assert [name for name in server.models() if name.startswith(store.run)] == [store.current.name]
    move(policy, 0.3)
    generation.sync_weights()
    names = ((model, 0), (store.current.name, 0), (store.current.name, 1))
    greedy = {"prompt": tokenizer("The capital of France is")["input_ids"], "max_tokens": 8, "temperature": 0.0}
    (base,), (one,), (other,) = (server.generate(model=model, replica=replica, **greedy) for model, replica in names)
    assert one.tokens == other.tokens != base.tokens


def test_the_canary_stops_a_run_whose_sync_is_broken(process, policy, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerSampler, "_publish", publish_in_same_folder)
    with pytest.raises(UserError, match="vLLM samples the wrong model: after sync 2") as error:
        syncs(policy, tokenizer, process.url, tmp_path)
    assert "\n" not in str(error.value)
