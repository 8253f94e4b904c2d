"""A teacher on a stand-in for a vLLM server (small_vllm.py). tests/trainer/test_served_teacher.py has a real one."""

import json
import math
import threading

import pytest
import torch
from tokenizers import normalizers

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation import served_teacher
from grpo_math.generation.lost_server import ServerUnavailable
from grpo_math.generation.served_teacher import ServedTeacher


@pytest.fixture
def teacher(server):
    return ServedTeacher(server.url, seconds=0.1)


def test_each_token_that_is_not_masked_has_the_log_prob_that_the_model_gives_it(server, teacher, byte_ids):
    teacher.connect(byte_ids, max_completion_length=8)
    requests = []

    def lose_the_first(body):
        requests.append(body)
        return (500, "lost") if len(requests) == 1 else None

    server.sampling = lose_the_first
    ids = torch.tensor([[9, 5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10]])
    # Padding on both ends, a whole row, and a completion without a token.
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    scores = teacher.gather_logps(ids, mask, 3)
    with torch.no_grad():
        logps = server.base(ids[:2, 1:]).logits.log_softmax(-1), server.base(ids[:2]).logits.log_softmax(-1)
    first = [logps[0][0, 1, 7].item(), logps[0][0, 2, 8].item(), 0.0]
    second = [logps[1][1, place, token].item() for place, token in ((2, 8), (3, 9), (4, 10))]
    torch.testing.assert_close(scores, torch.tensor([first, second, [0.0] * 3]))
    assert len(requests) == 3
    # A group's prompt is in vLLM's prefix cache, which none of the requests may use.
    assert len({body["cache_salt"] for body in requests}) == 3
    assert {(body["temperature"], body["max_tokens"], body["prompt_logprobs"]) for body in requests} == {(1.0, 1, 0)}


@pytest.mark.parametrize("room", [9, 10])
def test_a_prompt_and_a_sampled_token_fit_next_to_the_completion(room, server, teacher, byte_ids):
    server.settings["model_config"]["max_model_len"] = room
    if room == 10:
        return teacher.connect(byte_ids, max_completion_length=8)
    with pytest.raises(ConfigError, match="max_completion_length=8 leaves no room for a prompt in the 9 tokens of"):
        teacher.connect(byte_ids, max_completion_length=8)
    return None


@pytest.mark.parametrize("change", ["token", "added", "weights", "address"])
def test_a_server_that_cannot_teach_is_one_line(change, server, teacher, byte_ids):
    line = "has another tokenizer than the model: serve a model of the same family"
    if change == "token":
        # The same tokens, but the first one of the vocabulary.
        server.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("!", '"')
    elif change == "added":
        server.tokenizer.add_tokens(["<think>"])
    elif change == "weights":
        server.sampling = lambda body: (400, "Token id 257 is out of vocabulary")
        line = "is not a teacher .*257 is out of vocabulary.*: grpo-math serve --teacher"
    else:
        server.stop()
        line = "no vLLM server answers at .* after 0 seconds.* Start the teacher: grpo-math serve --teacher"
    with pytest.raises(UserError, match=line):
        teacher.connect(byte_ids, max_completion_length=8)


def choices(entries, number=1):
    return {"choices": [{"prompt_logprobs": entries}] * number}


def of_tokens(logp):
    return {str(token): {"logprob": logp} for token in range(9)}


BAD_ANSWERS = {
    "missing": choices([None] * 4),
    "short": choices([of_tokens(-1.0)]),
    "nan": choices([None, *[of_tokens(math.nan)] * 3]),
    "infinite": choices([None, *[of_tokens(-math.inf)] * 3]),
    "text": choices([None, *[of_tokens("low")] * 3]),
    "a number": choices(3),
    "of no choice": choices([], number=0),
    "of two choices": choices([None, *[of_tokens(-1.0)] * 3], number=2),
    "of numbers": {"choices": 7},
    "empty": {},
    "a list": [],
}


@pytest.mark.parametrize("end", BAD_ANSWERS)
def test_a_missing_log_prob_ends_the_run(end, server, teacher):
    server.sampling = lambda body: (200, json.dumps(BAD_ANSWERS[end]))
    with pytest.raises(ServerUnavailable, match="gave no log-prob of a token: see the log of the server"):
        teacher.gather_logps(torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4), 2)


def test_a_server_that_hangs_is_not_asked_again(server, monkeypatch):
    monkeypatch.setattr(served_teacher, "MAX_REQUESTS", 2)
    asked, free = [], threading.Event()
    server.sampling = lambda body: asked.append(body) or (free.wait(30) and None)
    teacher = ServedTeacher(server.url, seconds=0.1, timeout=0.3)
    with pytest.raises(ServerUnavailable, match=r"has not answered for 0\.3 s: see its log"):
        teacher.gather_logps(torch.tensor([[5, 6, 7, 8]] * 9), torch.ones(9, 4), 2)
    free.set()
    assert len(asked) < 9


def test_a_program_that_is_no_vllm_is_not_a_teacher(server, teacher, byte_ids, monkeypatch):
    monkeypatch.setattr(type(teacher), "_ask", lambda *_, **__: {"status": "ok"})
    with pytest.raises(ConfigError, match=r"is not a teacher .its answers are not those of vLLM.: grpo-math serve"):
        teacher.connect(byte_ids, max_completion_length=8)
