"""One step off policy: a batch is sampled while the one before is trained on, and the loss is that of such samples."""

import threading
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import waiting
from peft import get_peft_model
from small_trainers import letters, logps_of
from small_vllm import trainer_of
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import IntervalStrategy

from grpo_math.errors import ConfigError
from grpo_math.generation.completions import batch_seed
from grpo_math.generation.prefetch import Prefetch, PrefetchedRollout
from grpo_math.run import metrics
from grpo_math.trainer.rollout_queue import order, refuse_unknown_requests

AHEAD = {"staleness": 1, "max_steps": 5, "vllm_importance_sampling_mode": "token_truncate"}
RATE = 0.05
PLAIN = {"loss_type": "grpo", "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant"}
PLAIN |= {"max_grad_norm": 0.0, "surrogate": "reinforce"}
EVALUATED = {"per_device_eval_batch_size": 2, "num_generations_eval": 2}


def lines(trainer) -> list[dict]:
    return [line for line in trainer.state.log_history if "loss" in line]


def trained(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if "lora_" in name])


def by_hand(model, server, prompts: list[list[list[int]]], tokenizer, staleness: int) -> torch.Tensor:
    """The adapter after a step on each batch of ``prompts``, batch k sampled with the weights before step
    k - ``staleness``: -A pi(y) / sampler(y), the ratio at most 3, mean over tokens, then over completions."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    earlier = []
    for number, batch in enumerate(prompts):
        earlier.append(deepcopy(model).eval())
        server.adapters["by hand"] = earlier[max(0, number - staleness)]
        for position, prompt in enumerate(batch):
            seed = batch_seed(batch_seed(42, number), position)
            asked = {"model": "by hand", "prompt": [prompt], "n": 2, "max_tokens": 6, "temperature": 1.0, "seed": seed}
            choices = server.complete(asked)
            texts = tokenizer.batch_decode([choice["token_ids"] for choice in choices], skip_special_tokens=True)
            rewards = torch.tensor(letters(texts))
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for choice, advantage in zip(choices, advantages, strict=True):
                logps = logps_of(model, prompt, choice["token_ids"])
                sampler = torch.tensor(choice["logprobs"]["token_logprobs"])
                ratio = (logps.detach() - sampler).exp().clamp(max=3.0)
                (-(advantage * ratio * logps).mean() / (2 * len(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained(model)


@pytest.mark.slow
def test_it_trains_what_a_loop_by_hand_trains_that_samples_with_the_weights_of_one_step_before(
    server, small, chars, tmp_path
):
    settings = {**AHEAD, **PLAIN, **EVALUATED, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(server.url, small, chars, tmp_path, **settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(small), trainer.model.peft_config["default"])
    model.load_state_dict(trainer.model.state_dict())
    # An evaluation finds the next batch under way.
    trainer.eval_dataset, trainer.args.eval_steps = trainer.train_dataset.select(range(2)), 1
    trainer.args.eval_strategy = IntervalStrategy.STEPS
    trainer.train()
    rows = [trainer.train_dataset[index]["prompt"] for index in order(trainer.grpo_math.queue.sampler, 0)]
    batches = [chars(rows[at : at + 2])["input_ids"] for at in range(0, 8, 2)]
    on_policy, hand = (by_hand(deepcopy(model), server, batches, chars, staleness) for staleness in (0, 1))
    torch.testing.assert_close(trained(trainer.model), hand, atol=1e-6, rtol=0)
    assert (on_policy - hand).abs().max() > 1e-3
    assert [line[metrics.STALENESS] for line in lines(trainer)] == [0, 1, 1, 1]
    assert lines(trainer)[0][metrics.SECONDS_SYNC] > 0
    assert all(line[metrics.SECONDS_OVERLAP] <= line[metrics.SECONDS_SAMPLING] for line in lines(trainer))
    # A checkpoint has the next batch.
    resumed = trainer_of(server.url, small, chars, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(trained(resumed.model), hand, atol=1e-6, rtol=0)
    assert [line[metrics.STALENESS] for line in lines(resumed)] == [0, 1, 1, 1]


@pytest.mark.slow
def test_the_next_batch_is_sampled_while_one_is_trained_on_by_the_adapter_of_its_rollout(
    server, small, chars, tmp_path
):
    """The server keeps the answers to batch k + 1 back until step k is done: a trainer that waited for them would
    never get there. An epoch has three batches."""
    rows = [{"prompt": f"What is {number} + 1?"} for number in range(6)]
    trainer = trainer_of(server.url, small, chars, tmp_path, rows=rows, **AHEAD)
    asked, lock = [], threading.Lock()

    def hold_back(body):
        if body["temperature"]:
            with lock:
                number = len(asked) // 2  # two prompts a batch; the first two batches are of step 0
                asked.append(int(body["model"].rpartition("-")[2]))
            assert len(server.adapters) <= 2
            waiting.until(
                lambda: not number or trainer.state.global_step >= number,
                60,
                "the trainer waits for the answers before it trains",
            )

    server.sampling = hold_back
    trainer.train()
    # Each batch once, by the adapter of its rollout. Two canaries: the second sends the adapter three times.
    assert asked == [1, 1, 1, 1, 4, 4, 5, 5, 6, 6]
    assert [line[metrics.STALENESS] for line in lines(trainer)] == [0, 1, 1, 1, 1]
    assert [folder.name for folder in trainer.vllm_generation.sampler.store.root.iterdir()] == list(server.adapters)
    for line in lines(trainer)[1:]:
        assert 0 < line[metrics.SECONDS_OVERLAP] <= line[metrics.SECONDS_SAMPLING]


@pytest.mark.slow
def test_the_next_batch_is_asked_for_after_the_groups_that_are_drawn_again(server, small, chars, tmp_path):
    rows = [{"prompt": f"What is {number} + 1?", "answer": "0"} for number in range(16)]
    trainer, asked = trainer_of(server.url, small, chars, tmp_path, rows=rows, resample_groups=1, **AHEAD), []
    server.sampling = lambda body: asked.append(body["prompt"][0]) if body["temperature"] else None
    trainer.train()
    rows = [trainer.train_dataset[index]["prompt"] for index in order(trainer.grpo_math.queue.sampler, 0)]
    batches = [chars(rows[at : at + 2])["input_ids"] for at in range(0, 10, 2)]
    # No answer is right: each batch is followed by two groups that are drawn again.
    assert [sorted(asked[at : at + 2]) for at in range(0, 20, 4)] == list(map(sorted, batches))
    assert [line[metrics.STALENESS] for line in lines(trainer)] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_steps": 7}, marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, marks=pytest.mark.slow),
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 4},
        pytest.param(
            {"num_iterations": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_steps": 4},
            marks=pytest.mark.slow,
        ),
        {"shuffle_dataset": False, "max_steps": 2},
    ],
    ids=str,
)
def test_the_next_prompts_are_those_that_the_next_rollout_samples_and_none_after_the_last(settings, ours):
    """An epoch has five rollouts of 2 prompts, which are optimizer steps or not, or one of 6, or two of 4."""
    trainer = ours(rows=[{"prompt": f"What is {number} + 1?", "answer": "1"} for number in range(11)], **settings)
    sample, sampled, expected = trainer._generate_single_turn, [], []

    def recorded(prompts, *others, **named):
        sampled.append(prompts[::4])
        expected.append(trainer.grpo_math.queue.next_prompts())
        return sample(prompts, *others, **named)

    trainer._generate_single_turn = recorded
    trainer.train()
    assert expected == [*sampled[1:], []]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"tools": [letters]}, "cannot prefetch: tools change"),
        ({"rollout_func": letters}, "cannot prefetch: rollout_func change"),
        ({"environment_factories": letters}, "cannot prefetch: environments change"),
        ({"train_dataset": iter(())}, "needs a train_dataset of known length"),
    ],
)
def test_what_is_not_known_beforehand_is_refused(others, message):
    trainer = {"tools": [], "rollout_func": None, "environment_factories": None, "train_dataset": []}
    with pytest.raises(ConfigError, match=message):
        refuse_unknown_requests(SimpleNamespace(**{**trainer, **others}))


@pytest.mark.parametrize(("prompts", "taken"), [([[1]], "requested"), ([[2]], "new")])
def test_a_batch_of_other_prompts_than_the_requested_ones_is_sampled_anew(prompts, taken):
    sampler = Mock(training_request=lambda prompts, n: lambda: ["new"])
    sampler.gather_from_main = lambda prompts, n, sample: sample(prompts, n)
    prefetch = Prefetch(sampler)
    prefetch.requested = PrefetchedRollout([[1]], 0).start(lambda: ["requested"])
    with prefetch.training_batch(1, []):
        assert prefetch.gather_completions(prompts, 1) == [taken]
