"""The requests to vLLM, and the completion that each answer belongs to, with a server that records its requests."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace

from grpo_math.generation import sync
from grpo_math.generation.completion import Completion
from grpo_math.generation.sync import AdapterGeneration
from grpo_math.run.http import ServerError

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


class Told:
    """A server that answers a prompt with its tokens, the number of the completion, and notes each request."""

    url = "http://told"

    def __init__(self):
        self.requests, self.fails, self.waits = [], [], 0

    def healthy(self):
        return True

    def wait(self, seconds):
        self.waits += 1

    def check_version(self):
        pass

    def models(self):
        return [""]

    def generate(self, prompt, **request):
        self.requests.append({"prompt": prompt, **request})
        if prompt in self.fails:
            self.fails.remove(prompt)
            raise ServerError("the engine has restarted", 500)
        rows = [[*prompt, number] for number in range(request["n"])]
        return [Completion(row, [-0.5] * len(row)) for row in rows]


def generation():
    made = object.__new__(AdapterGeneration)
    vars(made).update(SAMPLING, mode="server", max_completion_length=8, structured_outputs_regex=None)
    made.generation_kwargs = {"stop": ["</answer>"]}
    made.server, made.server_timeout = Told(), 1.0
    made.seed, made.rollouts, made.folder = 3, 0, Path()
    made.canary = SimpleNamespace(due=False, agreed=2)
    made.accelerator = SimpleNamespace(process_index=0, is_main_process=True)
    return made


def test_every_setting_is_sent_and_answers_come_in_the_order_of_prompts():
    made = generation()
    _, token_ids, logprobs, ids = made.generate([[prompt] for prompt in range(1, 6) for _ in range(2)], None, 2)
    assert token_ids == [[prompt, number] for prompt in range(1, 6) for number in range(2)]
    assert ids == [[[token] for token in row] for row in token_ids]
    assert logprobs == [[[-0.5], [-0.5]]] * 10
    assert len(made.server.requests) == 5
    request = made.server.requests[0]
    assert {name: request[name] for name in SAMPLING} == SAMPLING
    assert (request["n"], request["max_tokens"], request["extra"]) == (2, 8, {"stop": ["</answer>"]})


def test_each_prompt_of_each_rollout_has_a_seed_of_its_own_that_follows_from_the_runs():
    def seeds(rollouts):
        made = generation()
        for _ in range(rollouts):
            made.generate([[1], [1], [2], [2], [3], [3]], None, 2)
        return [request["seed"] for request in made.server.requests]

    assert len(set(seeds(3))) == 9
    assert seeds(3) == seeds(3)


def test_requests_that_fail_are_asked_again_and_no_others(monkeypatch):
    monkeypatch.setattr(sync, "AT_ONCE", 2)  # some have not been sent when the first one fails
    made = generation()
    server = made.server
    server.fails = [[3], [3], [1], [9]]
    _, token_ids, *_ = made.generate([[prompt] for prompt in range(1, 11) for _ in range(2)], None, 2)
    assert token_ids == [[prompt, number] for prompt in range(1, 11) for number in range(2)]
    asked = Counter(request["prompt"][0] for request in server.requests)
    assert asked == Counter({**dict.fromkeys(range(1, 11), 1), 3: 3, 1: 2, 9: 2})
    assert server.waits == 2


def test_two_threads_that_find_a_restarted_server_load_the_adapter_once():
    class Restarted(Told):
        loaded, both = (), Barrier(2)

        def models(self):
            names = self.loaded
            with suppress(BrokenBarrierError):
                self.both.wait(0.5)  # for the other thread
            return names

        def load_adapter(self, name, path):
            assert name not in self.loaded
            self.loaded += (name,)

    made = generation()
    made.server = server = Restarted()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: made._load(Path("run-1")), range(2)))
    assert server.loaded == ("run-1",)
