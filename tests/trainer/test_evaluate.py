"""The engine that samples in training also evaluates, and training goes on as if there had been no evaluation."""

import json

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from small_trainers import config, letters, relative, weights
from small_vllm import SmallVLLM, trainer_of
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import IntervalStrategy
from trl.generation import vllm_client, vllm_generation

from grpo_math import evaluate
from grpo_math.evaluation.engine import engine_of
from grpo_math.generation.sync import KeyedClient
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

ROWS = [{"prompt": f"What is {a} + 4?", "answer": str(a + 4)} for a in range(5)]


@pytest.fixture
def server(small):
    server = SmallVLLM(small)
    yield server
    server.stop()


def requests_of(server):
    """The requests for completions from now on, without the canary's, which have no seed."""
    requests = []
    server.sampling = lambda body: requests.append(body) if "seed" in body else None
    return requests


@pytest.mark.slow
def test_before_and_after_are_sampled_by_the_server_and_change_no_training(server, small, chars, tmp_path):
    ended = {}
    for evaluated in (False, True):
        torch.manual_seed(0)  # of the adapter
        trainer = trainer_of(server.url, lambda: small, chars, tmp_path / str(evaluated), max_steps=2)
        requests = requests_of(server)
        if evaluated:
            results = evaluate(trainer, ROWS, samples=2, temperature=0.7, max_new_tokens=4, progress=False)
            assert results["backend"] == "vllm"
            assert {(r["temperature"], r["max_tokens"], r["top_p"]) for r in requests} == {(0.7, 4, 1.0)}
            assert len({r["seed"] for r in requests}) == len(requests) == 10
            del requests[:]
        trainer.train()
        ended[evaluated] = sorted(request["seed"] for request in requests), weights(trainer.model)
        if evaluated:
            after = evaluate(trainer, ROWS, samples=2, temperature=0.7, max_new_tokens=4, progress=False)
            assert json.loads((tmp_path / "True/after.json").read_text())["rows"] == after["rows"]
    assert ended[True][0] == ended[False][0]
    assert relative(ended[True][1], ended[False][1]) == 0
    lines = [json.loads(line) for line in (tmp_path / "True/history.jsonl").read_text().splitlines()]
    assert min(line["seconds/update"] for line in lines) > 0  # the evaluation's own sync is no part of a step


@pytest.mark.slow
def test_a_server_with_whole_weights_evaluates_them_as_they_are_now(server, small, chars, tmp_path, monkeypatch):
    def receive(client, metadata, named_weights):  # TRL sends them over NCCL, which needs GPUs
        model = AutoModelForCausalLM.from_pretrained(small)
        model.load_state_dict(dict(named_weights))
        server.adapters["base"] = model.eval()

    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    for name in ("init_communicator", "reset_prefix_cache"):
        monkeypatch.setattr(KeyedClient, name, lambda client, **kwargs: None)
    monkeypatch.setattr(KeyedClient, "update_named_params", receive)
    trainer, greedy = trainer_of(server.url, lambda: small, chars, tmp_path, lora=False), []
    for step in (0, 1):
        trainer.state.global_step, requests = step, requests_of(server)
        limits = {"max_new_tokens": 4, "progress": False}
        by_server = evaluate(trainer, ROWS, **limits)
        alone = evaluate(trainer.model, ROWS, tokenizer=chars, **limits)
        assert (by_server["backend"], len(requests)) == ("vllm", 5)
        greedy.append([row["completion"] for row in by_server["rows"]])
        assert greedy[-1] == [row["completion"] for row in alone["rows"]]
        with torch.no_grad():
            trainer.model.lm_head.weight.neg_()
    assert greedy[0] != greedy[1]


@pytest.mark.slow
def test_trls_evaluation_by_the_server_leaves_the_seeds_of_training(server, small, chars, tmp_path):
    seeds, asked = {}, chars(ROWS[0]["prompt"])["input_ids"]
    for evaluated in (False, True):
        settings = {"max_steps": 2, "per_device_eval_batch_size": 2, "num_generations_eval": 2}
        trainer = trainer_of(server.url, lambda: small, chars, tmp_path / str(evaluated), **settings)
        trainer.add_callback(events := Events())
        if evaluated:
            trainer.eval_dataset, trainer.args.eval_steps = Dataset.from_list(ROWS[:1]), 1
            trainer.args.eval_strategy = IntervalStrategy.STEPS
        requests = requests_of(server)
        trainer.train()
        of_training = [request for request in requests if request["prompt"] != [asked]]
        seeds[evaluated] = sorted(request["seed"] for request in of_training)
        assert (len(events.metrics), len(of_training) < len(requests)) == ((2, True) if evaluated else (0, False))
    assert seeds[True] == seeds[False]


class Events(TrainerCallback):
    """The metrics of each evaluation, as callbacks such as early stopping get them."""

    def __init__(self):
        self.metrics = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.metrics.append(metrics)


@pytest.mark.full(keep=["[True]"])
@pytest.mark.parametrize("passed", [True, False])
def test_held_out_sets_are_added_to_trls_metrics_in_one_event(passed, small, chars, tmp_path):
    data = Dataset.from_list(ROWS)
    settings = {"max_steps": 2, "logging_steps": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    args = config(MathGRPOConfig, tmp_path, eval_steps=1, max_completion_length=6, **settings)
    trainer = MathGRPOTrainer(small, letters, args, data, data.select(range(2)) if passed else None, chars)
    args.eval_strategy, values = IntervalStrategy.STEPS, iter((0.25, 0.5))
    trainer.evaluate_held_out = lambda: {"eval_sums_accuracy": next(values)}
    trainer.add_callback(events := Events())
    trainer.train()
    assert [metrics["eval_sums_accuracy"] for metrics in events.metrics] == [0.25, 0.5]
    assert all(("eval_reward" in metrics, "eval_loss" in metrics) == (passed, passed) for metrics in events.metrics)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if "loss" in line]
    assert trained["step"] == 2
    assert {"reward", "accuracy", "seconds/generate"} <= set(trained)  # of both steps, in one line
    assert [line["eval_sums_accuracy"] for line in lines if "eval_sums_accuracy" in line] == [0.25, 0.5]
    assert set(trainer.evaluate(data.select(range(2)))) >= {"eval_reward"}
    assert len(events.metrics) == 3


@pytest.mark.slow
def test_the_server_samples_from_the_best_weights_when_these_are_loaded_at_the_end(server, small, chars, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    trainer = trainer_of(server.url, lambda: small, chars, tmp_path, **settings)
    args, values = trainer.args, iter((0.5, 0.25))
    args.eval_strategy, args.load_best_model_at_end = IntervalStrategy.STEPS, True
    args.metric_for_best_model, args.greater_is_better = "sums_accuracy", True
    trainer.evaluate_held_out = lambda: {"eval_sums_accuracy": next(values)}
    trainer.train()
    best = load_file(tmp_path / "checkpoint-1/adapter_model.safetensors")
    with engine_of(trainer):
        (served,) = server.adapters.values()
    served_tensors = get_peft_model_state_dict(served)
    assert served_tensors.keys() == best.keys()
    assert all(torch.equal(served_tensors[name], best[name]) for name in best)
    output = json.loads((tmp_path / "best.json").read_text())
    assert output == {"step": 1, "metric": "eval_sums_accuracy", "value": 0.5, "path": "checkpoint-1"}
