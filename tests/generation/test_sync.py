"""The adapter alone goes to a real vLLM server on the CPU, whose `vllm` GRPO_MATH_VLLM names (vllm_environment.sh).

Two processes of DeepSpeed ZeRO-2 train SmolLM2-135M with LoRA against it, the server is killed in the middle, and the
canary is shown syncs that are broken on purpose.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
import torch
from accelerate import Accelerator
from launching import ROOT, accelerate, variables
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from vllm_process import VLLM, Process, of_session

from grpo_math import evaluate
from grpo_math.errors import UserError
from grpo_math.evaluation.toolbox import toolbox
from grpo_math.generation.adapters import logps, save_adapter, scaled
from grpo_math.generation.server import Server
from grpo_math.generation.sync import AdapterGeneration, KeyedClient
from grpo_math.problems.datasets import load_problems
from grpo_math.run.http import ServerError

PROGRAM = Path(__file__).parents[1] / "processes" / "train_with_vllm.py"
pytestmark = pytest.mark.skipif(not VLLM, reason="GRPO_MATH_VLLM names no vllm to serve with")


@pytest.fixture(scope="module")  # its key stands in this process's environment
def process(smollm, tmp_path_factory):
    process = Process(smollm, tmp_path_factory.mktemp("vllm"))
    yield process
    process.stop()


def test_two_deepspeed_processes_train_through_a_server_that_is_killed(process, smollm, tmp_path):
    start = accelerate("zero2_offload", tmp_path, "--num_processes", "2")
    kill_at = 3
    program = [str(PROGRAM), smollm, str(tmp_path), process.server.url, "5", str(kill_at), str(process.process.pid)]
    with open(tmp_path / "run.log", "wb") as log:
        streams = {"stdout": log, "stderr": log}
        run = subprocess.Popen([*start, *program], env=variables(), cwd=ROOT, start_new_session=True, **streams)
    killed = None
    try:
        while run.poll() is None:
            if killed is None and not process.alive():
                killed = process.process.pid
                while of_session(killed):
                    time.sleep(0.1)
                process.start()
            time.sleep(0.2)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, (tmp_path / "run.log").read_text()[-4000:]
    assert killed is not None

    record = json.loads((tmp_path / "record.json").read_text())
    assert "DEEPSPEED" in record["distributed_type"]
    assert record["processes"] == 2
    assert record["base"][0] == record["base"][1]
    assert record["canaries"] == 2
    assert len(record["folders"]) == 1, "old adapters stay behind"
    assert not Path(record["root"]).exists()
    answers = record["answers"]
    assert len(answers) == 5
    for answer in answers:
        apart = torch.tensor(answer["vllm"]) - torch.tensor(answer["trainer"])
        assert apart.abs().mean() < 0.2
    assert answers[0]["tokens"] != answers[-1]["tokens"], "training changes the greedy answer"
    history = record["history"]
    assert [line["step"] for line in history] == [1, 2, 3, 4, 5]
    for line in history:
        assert 0 < line["seconds/sync"] < line["step_time"]
        assert line["sync_share"] == pytest.approx(line["seconds/sync"] / line["step_time"])
        assert line["sampling/sampling_logp_difference/mean"] < 0.2
    print([(round(line["seconds/sync"], 3), round(line["step_time"], 2)) for line in history])


def test_five_steps_are_sampled_while_the_one_before_is_trained_on(process, smollm, tmp_path):
    kill_at, staleness = "-1", "1"
    program = [str(PROGRAM), smollm, str(tmp_path), process.server.url, "5", kill_at, "0", staleness]
    launching.run([sys.executable, *program])
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["canaries"], len(record["folders"])) == (2, 1)
    assert record["base"][0] == record["base"][1]
    history = record["history"]
    assert [line["staleness"] for line in history] == [0, 1, 1, 1, 1]
    for line in history:
        assert line["sampling/sampling_logp_difference/mean"] < 0.3  # an older adapter's
        assert line["sampling/logp_sum_spread"] > 0
        assert 0 < line["sampling/effective_share"] <= 1.0001
        assert 0 <= line["seconds/overlap"] <= line["seconds/sampling"]
    print([(round(line["seconds/sampling"], 2), round(line["seconds/overlap"], 2)) for line in history])


def test_ranks_that_call_a_tool_get_their_own_turns_from_a_real_server(process, smollm, tmp_path):
    """Another rank's turn would be as likely under this one's conversation as noise: log-probs several apart."""
    program = str(PROGRAM.parent / "turns.py")
    arguments = [smollm, str(tmp_path), process.server.url, "generated:long_products"]
    launching.run([*launching.TORCHRUN, program, *arguments], timeout=600)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert len(ranks[0]["turns"]) == len(ranks[1]["turns"]) > 2  # of 2 steps
    for line in ranks[0]["told"]:
        assert line["sampling/sampling_logp_difference/mean"] < 0.1
    assert sum(line["tools/call_frequency"] for line in ranks[0]["told"]) > 0
    print([(rank["turns"], rank["heard"]) for rank in ranks])


def test_an_evaluation_plays_its_turns_by_a_real_server(process, smollm):
    rows = list(load_problems("generated:long_products", "heldout", template="python", limit=8))
    asked = {"tools": toolbox(["python"], {"wall_seconds": 30}), "max_new_tokens": 100}
    found = evaluate(smollm, rows, backend="vllm-server", server=process.server.url, **asked)
    called = [row for row in found["rows"] if row["calls"]]
    assert called
    for row in called:
        assert [turn["role"] for turn in row["turns"]][:2] == ["assistant", "tool"]
    assert found["tools"]["names"] == ["python"]


OPEN_IN_VLLM = ["/collective_rpc", "/sleep?level=2", "/reset_prefix_cache", "/pause", "/invocations", "/tokenize"]


def test_the_server_does_nothing_without_its_key_and_does_not_tell_it(process, monkeypatch):
    from trl.generation import vllm_client

    url, secret = process.server.url, os.environ["VLLM_API_KEY"]
    body = {"lora_name": "x", "lora_path": "/tmp", "method": "list_loras", "prompt": "a", "model": process.model}
    posts = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions", *OPEN_IN_VLLM]
    for path, sent in [*((path, body) for path in posts), *((path, None) for path in ("/server_info", "/v1/models"))]:
        for key in ("wrong", f"{secret}x"):
            with pytest.raises(ServerError) as error:
                Server(url, api_key=key).http.ask(path, sent)
            assert error.value.status == 401, path
    assert Server(url, api_key="wrong").healthy()
    assert secret not in json.dumps(process.server.http.ask("/server_info?config_format=json"))
    assert secret not in (process.folder / "server.log").read_text()
    for pid in of_session(process.process.pid):
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
    process.server.http.ask("/reset_prefix_cache", {})
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda **versions: True)
    assert KeyedClient(base_url=url).get_server_info()["lora_config"]["max_lora_rank"] == 16
    with pytest.raises(Exception, match="401"):
        vllm_client.VLLMClient(base_url=url)


class SameFolder(AdapterGeneration):
    """The trap: one name, one folder, loaded in place, and vLLM's prefix cache not reset."""

    def _publish(self, tensors, scale):
        self.folder = self.root / f"{self.run}-same"
        shutil.rmtree(self.folder, ignore_errors=True)
        save_adapter(self.model, tensors, self.folder, scale)
        body = {"lora_name": self.folder.name, "lora_path": str(self.folder), "load_inplace": True}
        for server in self.servers:
            server.http.ask("/v1/load_lora_adapter", body)


class OldAdapter(AdapterGeneration):
    """What is sent is what was sent first."""

    def _publish(self, tensors, scale):
        self.first = getattr(self, "first", tensors)
        super()._publish(self.first, scale)


class OldName(AdapterGeneration):
    """Every adapter is loaded, and the first one is asked for."""

    def _ask_servers(self, prompt):
        last, self.folder = self.folder, self.root / f"{self.run}-1"
        answers = super()._ask_servers(prompt)
        self.folder = last
        return answers

    def _let_go(self):  # the first one is not removed
        pass


@pytest.fixture
def policy(smollm):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))


def syncs(kind, model, tokenizer, url, tmp_path):
    """Two syncs with a small update between them, and a rollout after each."""
    generation = kind(
        SimpleNamespace(output_dir=tmp_path, seed=0),
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=None,
        mode="server",
        server_base_url=url,
        max_completion_length=8,
    )
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "Water boils at a temperature of")]
    generation.sync_weights()
    first = generation.generate([prompts[0]] * 2 + [prompts[1]] * 2, None, 2)
    assert generation.canary.agreed == 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as far as Adam goes in a step at a learning rate of 1e-5
                parameter.add_(torch.randn_like(parameter).sign() * 1e-5)
    generation.sync_weights()
    generation.generate([prompts[0]], None, 1)
    return generation, first


def test_the_canary_agrees_when_the_adapter_moves_and_several_servers_share_the_prompts(
    process, policy, tokenizer, tmp_path
):
    urls = f"{process.server.url},{process.server.url.replace('127.0.0.1', 'localhost')}"
    generation, (prompt_ids, token_ids, logprobs, ids) = syncs(AdapterGeneration, policy, tokenizer, urls, tmp_path)
    assert generation.canary.agreed == 2
    assert [name for name in process.server.models() if name.startswith(generation.run)] == [generation.folder.name]
    assert [[[token] for token in row] for row in token_ids] == ids
    for prompt, tokens, of_vllm in zip(prompt_ids, token_ids, logprobs, strict=True):
        with scaled(policy, 0.0):  # B was 0 then
            ours = logps(policy, prompt, tokens)
        assert (ours - torch.tensor(of_vllm)[:, 0]).abs().mean() < 0.2


def test_an_adapter_reaches_every_data_parallel_copy_of_a_server(smollm, policy, tokenizer, tmp_path):
    process = Process(smollm, tmp_path, copies=2)
    try:
        server = process.server
        assert server.replicas() == [0, 1]
        generation, _ = syncs(AdapterGeneration, policy, tokenizer, server.url, tmp_path)
        assert generation.canary.agreed == 2
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        generation.sync_weights()
        prompt = tokenizer("The capital of France is")["input_ids"]
        asked = {"max_tokens": 8, "temperature": 0.0}
        adapter = generation.folder.name
        (base,), *copies = (
            server.generate(prompt, model=model, replica=replica, **asked)
            for model, replica in ((process.model, 0), (adapter, 0), (adapter, 1))
        )
        assert copies[0][0].tokens == copies[1][0].tokens != base.tokens
    finally:
        process.stop()


@pytest.mark.parametrize("broken", [SameFolder, OldAdapter, OldName])
def test_the_canary_stops_a_run_whose_sync_is_broken(broken, process, policy, tokenizer, tmp_path):
    with pytest.raises(UserError, match="vLLM samples the wrong model: after sync 2") as error:
        syncs(broken, policy, tokenizer, process.server.url, tmp_path)
    assert "\n" not in str(error.value)


def test_the_canary_stops_a_run_whose_server_has_another_base(process, policy, tokenizer, tmp_path):
    with torch.no_grad():
        for layer in policy.get_base_model().model.layers[3:6]:
            layer.mlp.down_proj.base_layer.weight.mul_(-1.0)
    with pytest.raises(UserError, match="vLLM samples the wrong model: after sync 1"):
        syncs(AdapterGeneration, policy, tokenizer, process.server.url, tmp_path)


def test_an_adapter_above_the_servers_rank_is_refused(process, smollm, tokenizer, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=32, target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"lora_r=32 cannot be served.*up to rank 16.*--max-lora-rank 32"):
        syncs(AdapterGeneration, model, tokenizer, process.server.url, tmp_path)
