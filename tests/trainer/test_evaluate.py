"""The engine that samples in training also evaluates, and training goes on as if there had been no evaluation."""

import json

import pytest
import torch
from datasets import Dataset
from small_trainers import Evaluated, relative, weights
from small_vllm import trainer_of
from transformers.trainer_utils import IntervalStrategy

from grpo_math import evaluate
from grpo_math.trainer.trainer_parts import Program

ROWS = [{"prompt": f"What is {a} + 4?", "answer": str(a + 4)} for a in range(5)]


@pytest.mark.slow
def test_evaluations_are_sampled_by_the_server_and_change_no_training(server, small, chars, tmp_path):
    """Ours before training, and TRL's own in between."""
    ended, asked = {}, chars(ROWS[0]["prompt"])["input_ids"]
    for evaluated in (False, True):
        torch.manual_seed(0)  # of the adapter
        settings = {"max_steps": 2, "per_device_eval_batch_size": 2, "num_generations_eval": 2}
        trainer = trainer_of(server.url, small, chars, tmp_path / str(evaluated), **settings)
        trainer.add_callback(events := Evaluated())
        requests = []
        # The canary's have no seed.
        server.sampling = lambda body, requests=requests: requests.append(body) if "seed" in body else None
        if evaluated:
            results = evaluate(trainer, ROWS, samples=2, temperature=0.7, max_new_tokens=4, progress=False)
            assert (results["backend"], len(requests)) == ("vllm", 10)
            del requests[:]
            trainer.eval_dataset, trainer.args.eval_steps = Dataset.from_list(ROWS[:1]), 1
            trainer.args.eval_strategy = IntervalStrategy.STEPS
        trainer.train()
        seeds = sorted(request["seed"] for request in requests if request["prompt"] != [asked])
        assert (len(events.metrics), len(seeds) < len(requests)) == ((2, True) if evaluated else (0, False))
        ended[evaluated] = seeds, weights(trainer.model)
    assert ended[True][0] == ended[False][0]
    assert relative(ended[True][1], ended[False][1]) < 1e-6
    lines = [json.loads(line) for line in (tmp_path / "True/history.jsonl").read_text().splitlines()]
    assert min(line.get("seconds/update", 1) for line in lines) > 0  # the evaluation's own sync is no part of a step


def test_held_out_sets_are_evaluated_in_one_event_and_leave_the_metrics_of_a_step(ours, tmp_path):
    data = Dataset.from_list(ROWS)
    trainer = ours(
        rows=data, eval_steps=1, max_steps=2, logging_steps=2, per_device_eval_batch_size=4, num_generations_eval=2
    )
    values = iter((0.25, 0.5))
    trainer.args.eval_strategy = IntervalStrategy.STEPS
    trainer.grpo_math.program = Program(evaluate_heldout=lambda: {"eval_sums_accuracy": next(values)})
    trainer.add_callback(events := Evaluated())
    trainer.train()
    assert [metrics["eval_sums_accuracy"] for metrics in events.metrics] == [0.25, 0.5]
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if "loss" in line]  # of both steps, in one line
    assert {"reward", "accuracy", "seconds/generate"} <= set(trained)
    assert set(trainer.evaluate(data)) >= {"eval_reward"}
    assert len(events.metrics) == 3


SAMPLER = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "generation_kwargs": {"stop": ["</answer>"], "stop_token_ids": [7], "presence_penalty": 0.5},
    "vllm_structured_outputs_regex": "[0-9]+",
}
# An evaluation has its own temperature, length and seeds, and no log-probs. It names the end tokens of the model, too.
OWN = {"temperature", "max_tokens", "n", "seed", "prompt", "logprobs", "return_tokens_as_token_ids", "stop_token_ids"}


@pytest.mark.slow
def test_an_evaluation_asks_the_server_as_training_does(server, small, chars, tmp_path):
    trainer = trainer_of(server.url, small, chars, tmp_path, max_steps=1, **SAMPLER)
    requests = []
    server.sampling = lambda body: requests.append(body) if "seed" in body else None
    results = evaluate(trainer, ROWS[:1], progress=False, max_new_tokens=4)
    evaluated = requests.pop()
    trainer.train()
    shared = [{name: value for name, value in body.items() if name not in OWN} for body in (evaluated, requests[0])]
    assert shared[0] | {"model": ""} == shared[1] | {"model": ""}
    assert set(requests[0]["stop_token_ids"]) <= set(evaluated["stop_token_ids"])
    assert (results["request"]["regex"], results["request"]["stop"]) == ("[0-9]+", ["</answer>"])
