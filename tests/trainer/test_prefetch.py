"""One step off policy: a batch is sampled while the one before is trained on, and the loss is that of such samples."""

import threading
from types import SimpleNamespace

import pytest
import waiting
from small_trainers import letters
from small_vllm import trainer_of
from transformers.trainer_utils import IntervalStrategy

from grpo_math.errors import ConfigError
from grpo_math.run import metrics
from grpo_math.trainer.prefetch import Prefetch, order

AHEAD = {"staleness": 1, "max_steps": 5, "vllm_importance_sampling_mode": "token_truncate"}


def lines(trainer) -> list[dict]:
    return [line for line in trainer.state.log_history if "loss" in line]


def test_a_batch_is_corrected_for_the_step_since_it_was_sampled_and_an_evaluation_does_not_take_it(
    server, small, chars, tmp_path, caplog
):
    trainer = trainer_of(
        server.url, lambda: small, chars, tmp_path, **AHEAD, per_device_eval_batch_size=2, num_generations_eval=2
    )
    trainer.eval_dataset, trainer.args.eval_steps = trainer.train_dataset.select(range(2)), 1
    trainer.args.eval_strategy = IntervalStrategy.STEPS
    trainer.train()
    assert [line[metrics.STALENESS] for line in lines(trainer)] == [0, 1, 1, 1, 1]
    assert "differs from the prefetched prompts" not in caplog.text
    first, *others = (line[metrics.LOGP_SUM_SPREAD] for line in lines(trainer))
    assert first < 1e-4 < min(others)
    assert max(others) < 0.3, "these are log-probs of other tokens"
    assert lines(trainer)[0][metrics.SECONDS_SYNC] > 0


@pytest.mark.slow
def test_the_next_batch_is_sampled_while_one_is_trained_on_by_the_adapter_of_its_rollout(
    server, small, chars, tmp_path
):
    """The server keeps the answers to batch k + 1 back until step k is done: a trainer that waited for them would
    never get there. An epoch has three batches."""
    trainer = trainer_of(
        server.url, lambda: small, chars, tmp_path, prompts=[f"What is {n} + 1?" for n in range(6)], **AHEAD
    )
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
    assert [folder.name for folder in trainer.vllm_generation.root.iterdir()] == list(server.adapters)
    for line in lines(trainer)[1:]:
        assert 0 < line[metrics.SECONDS_OVERLAP] <= line[metrics.SECONDS_SAMPLING]


@pytest.mark.slow
def test_the_next_batch_is_asked_for_after_the_groups_that_are_drawn_again(server, small, chars, tmp_path):
    settings = {**AHEAD, "resample_groups": 1, "prompts": [f"What is {number} + 1?" for number in range(16)]}
    trainer, asked = trainer_of(server.url, lambda: small, chars, tmp_path, row={"answer": "0"}, **settings), []
    server.sampling = lambda body: asked.append(body["prompt"][0]) if body["temperature"] else None
    trainer.train()
    rows = [trainer.train_dataset[index]["prompt"] for index in order(trainer.train_sampler, 0)]
    batches = [chars(rows[at : at + 2])["input_ids"] for at in range(0, 10, 2)]
    # No answer is right: each batch is followed by two groups that are drawn again.
    assert [sorted(asked[at : at + 2]) for at in range(0, 20, 4)] == list(map(sorted, batches))
    assert [line[metrics.STALENESS] for line in lines(trainer)] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 7},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 4},
        {"num_iterations": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 2, "max_steps": 4},
        {"shuffle_dataset": False, "max_steps": 2},
    ],
    ids=str,
)
def test_the_next_prompts_are_those_that_the_next_rollout_samples_and_none_after_the_last(settings, ours):
    """An epoch has five rollouts of 2 prompts, which are optimizer steps or not, or one of 6, or two of 4."""
    trainer = ours(rows=[{"prompt": f"What is {number} + 1?"} for number in range(11)], **settings)
    trainer.vllm_generation, sample = SimpleNamespace(), trainer._generate_single_turn
    prefetch, sampled, expected = Prefetch(trainer), [], []

    def recorded(prompts, *others, **named):
        sampled.append(prompts[::4])
        expected.append(prefetch._next_prompts())
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
        Prefetch(SimpleNamespace(**{**trainer, **others}))
