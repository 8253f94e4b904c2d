"""The trial of the largest micro-batch: it changes nothing, and it finds what does not fit before the first step."""

from copy import deepcopy
from unittest.mock import Mock, patch

import pytest
import torch
from small_generation import counted, of_library
from small_trainers import SMALL, STEPS, runs_out_forward, untimed, weights
from trl.chat_template_utils import qwen3_chat_template

from grpo_math.errors import OutOfMemory
from grpo_math.trainer.largest_batch import longest_prompt


def passes(model):
    """The tokens of each forward pass with gradients, in training mode."""
    seen = []

    def hook(module, args, kwargs):
        if torch.is_grad_enabled():
            assert module.training, "nothing is checkpointed in an evaluation"
            seen.append(kwargs["input_ids"].numel())

    model.register_forward_pre_hook(of_library(hook), with_kwargs=True)
    return seen


@pytest.mark.full(keep=["kl_estimator", "adaptive"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_per_micro_batch": 60},
        {"pack_updates": False},
        {"num_iterations": 2, "kl_estimator": "k1", "beta": 0.1},
        {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.05},
    ],
    ids=str,
)
def test_the_trial_is_the_largest_pass_of_the_run_and_leaves_no_trace(settings, ours):
    results = []
    for first in (False, True):
        trainer = ours(folder=str(first), longest_first=first, **SMALL, **STEPS, **settings)
        seen = passes(trainer.model)
        trainer.train()
        results.append((seen, weights(trainer.model), untimed(trainer)))
    (without, plain_weights, plain_logs), (seen, own_weights, logs) = results
    assert seen[1:] == without
    assert seen[0] >= max(without)
    assert torch.equal(own_weights, plain_weights)
    assert logs == plain_logs


def test_the_longest_prompt_is_found_among_messages_too(ours):
    prompts = [[{"role": "user", "content": text}] for text in ("one", "one two three four five", "one two")]
    trainer = ours(rows=[{"prompt": prompt} for prompt in prompts])
    expected = trainer._tokenize_prompts(prompts)[0]
    with patch.object(type(trainer.train_dataset), "__getitem__", side_effect=AssertionError):  # no rows in bulk
        assert longest_prompt(trainer) == expected[1]
    # Rows that are made when they are read are not read for this.
    trainer.train_dataset = trainer.train_dataset.with_transform(Mock(side_effect=AssertionError))
    assert longest_prompt(trainer, [{"prompt": prompts[0]}, {"prompt": prompts[2]}]) == expected[2]


class Sums:
    """An environment of TRL's: it gives each rollout its problem, and pays for it."""

    def reset(self, **row):
        return "What is 3 + 4?"

    def get_reward(self):
        return 1.0


@pytest.mark.parametrize(
    ("factory", "rows"),
    [
        (Sums, [{"prompt": [{"role": "user", "content": "Well: " * n}]} for n in (1, 5)] * 4),
        (
            {"some": Sums, "others": Sums},
            [{"environment": name, "problem": "3 + 4"} for name in ("some", "others") * 4],
        ),
    ],
    ids=["with prompts", "of two kinds, without"],
)
def test_an_environment_is_trained_in_after_the_trial(factory, rows, ours, chars):
    tokenizer = deepcopy(chars)
    tokenizer.chat_template = qwen3_chat_template  # which can render tools
    trainer = ours(None, rows, tokenizer=tokenizer, environment_factory=factory, max_steps=1, longest_first=True)
    seen = passes(trainer.model)
    trainer.train()
    *_, trial = seen[:3]  # after two short rows, scored both ways
    assert trial > max(1, *seen[3:], 0)
    assert trainer.state.global_step == 1


def test_what_does_not_fit_is_cut_before_the_first_step(ours, caplog):
    trainer = ours(longest_first=True, max_steps=1, **SMALL)
    seen = passes(trainer.model)
    runs_out_forward(trainer.model, 45)
    trainer.train()
    halvings = caplog.text.count("max_tokens_per_micro_batch is now")
    assert min(seen[:halvings]) > 45 >= max(seen[halvings:])
    assert trainer.grpo_math.updates.budget.tokens == seen[halvings - 1] // 2
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "one completion, .* lower max_completion_length"),
        ({"entropy_coef": 0.01}, "lower per_device_train_batch_size"),
    ],
    ids=str,
)
def test_what_fits_in_no_way_ends_before_anything_is_generated(settings, advice, ours):
    trainer = ours(longest_first=True, **SMALL, **settings)
    runs_out_forward(trainer.model, 0)
    with counted(trainer.model) as shapes, pytest.raises(OutOfMemory, match=advice):
        trainer.train()
    assert len(shapes) <= 4, "after the passes over two short rows, something was generated"
