"""What vLLM is asked for, and whose answer goes where: servers and engines that only write down what they are told."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

from grpo_math.generation import sync
from grpo_math.generation.server import Sampled
from grpo_math.generation.sync import AdapterGeneration, _WithAdapter

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


class Told:
    """A server that answers a prompt with its tokens, the number of the completion, and notes each request."""

    def __init__(self):
        self.requests = []

    def heard(self, seconds):
        return nullcontext()

    def generate(self, prompts, **request):
        self.requests.append({"prompts": prompts, **request})
        rows = [[*prompt, number] for prompt in prompts for number in range(request["n"])]
        return Sampled(rows, [[-0.5] * len(row) for row in rows])


def generation(servers=1, rank=0):
    made = object.__new__(AdapterGeneration)
    vars(made).update(SAMPLING, mode="server", max_completion_length=8, structured_outputs_regex=None)
    made.generation_kwargs = {"stop": ["</answer>"]}
    made.servers, made.server_timeout = [Told() for _ in range(servers)], 1.0
    made.seed, made.rollouts, made.folder = 3, 0, None
    made.canary = SimpleNamespace(due=False, agreed=2)
    made.accelerator = SimpleNamespace(process_index=rank, is_main_process=True)
    return made


def repeated(*prompts):
    """Two completions of each, as TRL hands prompts over."""
    return [[prompt] for prompt in prompts for _ in range(2)]


def test_every_sampling_setting_is_sent():
    made = generation()
    made.generate(repeated(1), None, 2)
    (request,) = made.servers[0].requests
    assert {name: request[name] for name in SAMPLING} == SAMPLING
    assert (request["n"], request["max_tokens"], request["extra"]) == (2, 8, {"stop": ["</answer>"]})


def test_answers_of_several_servers_come_in_the_order_of_prompts():
    made = generation(servers=2)
    _, token_ids, logprobs, ids = made.generate(repeated(1, 2, 3, 4, 5), None, 2)
    assert token_ids == [[prompt, number] for prompt in range(1, 6) for number in range(2)]
    assert ids == [[[token] for token in row] for row in token_ids]
    assert logprobs == [[[-0.5], [-0.5]]] * 10
    assert [len(server.requests) for server in made.servers] == [3, 2]


def test_each_prompt_of_each_rollout_has_a_seed_of_its_own_that_follows_from_the_runs():
    def seeds(rollouts):
        made = generation(servers=2)
        for _ in range(rollouts):
            made.generate(repeated(1, 2, 3), None, 2)
        return [request["seed"] for server in made.servers for request in server.requests]

    assert len(set(seeds(3))) == 9
    assert seeds(3) == seeds(3)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_takes_the_completions_of_its_own_prompts(rank, monkeypatch):
    of_ranks = [repeated(1, 2), repeated(3, 4)]
    monkeypatch.setattr(sync, "gather_object", lambda prompts: [*of_ranks[0], *of_ranks[1]])
    prompts, token_ids, *_ = generation(rank=rank).generate(of_ranks[rank], None, 2)
    assert [row[:1] for row in token_ids] == prompts == of_ranks[rank]


def test_the_canary_is_due_after_each_sync_until_it_has_agreed_with_an_adapter_that_moved():
    made = generation()
    made._send, made.syncs = lambda: None, 0
    for agreed, due in ((0, True), (1, True), (2, False)):
        made.canary.agreed = agreed
        made.sync_weights()
        assert made.canary.due == due


def test_a_colocated_engine_samples_with_the_adapter_and_never_throws_the_base_away(tmp_path, monkeypatch):
    told = []
    engine = SimpleNamespace(
        generate=lambda prompts, **request: told.append(request["lora_request"]),
        sleep=lambda level: told.append(level),
        model="base",
    )
    module = ModuleType("vllm.lora.request")
    module.LoRARequest = lambda name, number, path: (name, number, path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sync, "save_adapter", lambda *saved: None)
    made = generation(servers=0)
    vars(made).update(mode="colocate", llm=_WithAdapter(engine), model=None, root=tmp_path, run="run", sent=4)
    made._publish({}, 1.0)
    made.llm.generate(["x"])
    made.llm.sleep(level=2)
    assert told == [("run-4", 4, str(tmp_path / "run-4")), 1]
    assert made.llm.model == "base"
