"""The canary against a sampler that is right, or wrong in one way: a small policy stands for vLLM's copy of it."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft.helpers import rescale_adapter_scale
from small_vllm import adapted, move

from grpo_math.errors import UserError
from grpo_math.generation.adapters import logps
from grpo_math.generation.canary import Canary
from grpo_math.generation.completion import Completion
from grpo_math.generation.sampler import Sampler


@pytest.fixture
def policy(model):
    policy = adapted(model, init_lora_weights=True)
    move(policy, 1e-4)  # an adapter that has hardly moved
    return policy


class StandIn(Sampler):
    """Answers as vLLM would with the adapter that it was sent last; ``spoil`` changes its log-probs."""

    context = 4096

    def __init__(self, model, spoil=lambda logprobs: logprobs):
        super().__init__(SimpleNamespace(sent=1))
        self.model, self.spoil, self.scales = model, spoil, [1.0]

    def broadcast_adapter(self, scale=1.0):
        self.scales.append(scale)
        self.store.sent += 1

    def gather_completions(self, prompts, n):
        raise NotImplementedError

    def gather_greedy(self, prompt, tokens):
        ids = list(prompt)
        with torch.no_grad(), rescale_adapter_scale(self.model, self.scales[-1]):
            for _ in range(tokens):
                ids.append(int(self.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            output = logps(self.model, ids[: len(prompt)], ids[len(prompt) :]).tolist()
        return [Completion(ids[len(prompt) :], self.spoil(output))]

    def canary(self):
        return Canary(self.model, Accelerator(cpu=True), self, 0.02)


PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def test_a_right_sampler_agrees_and_keeps_the_adapter_at_its_own_effect(policy):
    sampler = StandIn(policy)
    canary = sampler.canary()
    canary.due = True
    canary.check(PROMPTS)
    assert (canary.agreed, canary.due, sampler.scales) == (1, False, [1.0])
    canary.check(PROMPTS)
    assert canary.agreed == 2
    first, scale, last = sampler.scales
    assert first == last == 1
    moved = []
    for factor in (0.0, scale / 4, scale):
        with rescale_adapter_scale(policy, factor):
            moved.append(logps(policy, canary.prompt[:1], canary.prompt[1:]))
    # A power of 2 at which the effect is seen, and not a much larger one.
    assert math.log2(scale).is_integer()
    assert (moved[1] - moved[0]).abs().mean() < 5 * 0.02 <= (moved[2] - moved[0]).abs().mean()


@pytest.mark.parametrize(
    ("spoil", "apart"),
    [
        (lambda output: [math.nan, *output[1:]], "nan"),
        (lambda output: [None] * len(output), "nan"),
        (lambda output: [x - 0.5 for x in output], "0.500"),
        (lambda output: [x + 0.021 for x in output], "0.021"),
        (lambda output: [x + 0.019 for x in output], None),
    ],
)
def test_a_sampler_with_other_log_probs_ends_the_run_but_rounding_does_not(spoil, apart, policy):
    error = f"after sync 1 its log-probs are {apart} nats .* at most 0.020 is rounding"
    with pytest.raises(UserError, match=error) if apart else nullcontext():
        StandIn(policy, spoil).canary().check(PROMPTS)


def test_a_sampler_that_never_gets_the_adapter_ends_the_run(policy):
    sampler = StandIn(policy)
    sampler.broadcast_adapter = lambda scale=1.0: setattr(sampler.store, "sent", sampler.store.sent + 1)
    canary = sampler.canary()
    canary.check(PROMPTS)
    sampler.store.sent = 2
    with pytest.raises(UserError, match="after sync 2"):
        canary.check(PROMPTS)


def test_it_looks_again_after_a_sync_that_showed_too_little(policy):
    sampler = StandIn(policy)
    canary = sampler.canary()
    canary.agreed, canary.compare = 1, lambda scale, sync: 2 * canary.tolerance
    canary.check(PROMPTS)
    assert canary.agreed == 1
    for parameter in policy.parameters():
        parameter.data *= 0  # nothing to see at any scale
    canary.check(PROMPTS)
    assert (canary.agreed, len(sampler.scales)) == (1, 3)  # all three at the second sync
