"""The canary against a sampler that is right, or wrong in one way: a small policy stands for vLLM's copy of it."""

import math

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_math.errors import UserError
from grpo_math.generation.adapters import logps, scaled
from grpo_math.generation.canary import TOKENS, Canary
from grpo_math.generation.completion import Completion


@pytest.fixture
def policy():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=512, **sizes))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # log-probs far from uniform, and an adapter that has hardly moved
            parameter.data.normal_(0, 1e-4 if "lora_B" in name else 0.2)
    return model.eval()


class Sampler:
    """Answers as vLLM would with the adapter that it was sent last; ``spoil`` changes its log-probs."""

    def __init__(self, model, spoil=lambda logprobs: logprobs):
        self.model, self.spoil, self.sent = model, spoil, [1.0]

    def ask(self, prompt):
        ids = list(prompt)
        with torch.no_grad(), scaled(self.model, self.sent[-1]):
            for _ in range(TOKENS):
                ids.append(int(self.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            output = logps(self.model, ids[: len(prompt)], ids[len(prompt) :]).tolist()
        return [Completion(ids[len(prompt) :], self.spoil(output))]

    def canary(self):
        return Canary(self.model, Accelerator(cpu=True), True, self.ask, self.sent.append, 512)


PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def test_a_right_sampler_agrees_and_keeps_the_adapter_at_its_own_effect(policy):
    sampler = Sampler(policy)
    canary = sampler.canary()
    canary.check(PROMPTS, 1)
    assert (canary.agreed, sampler.sent) == (1, [1.0])
    canary.check(PROMPTS, 2)
    assert canary.agreed == 2
    assert sampler.sent[-2] > 1
    assert sampler.sent[-1] == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda output: [math.nan, *output[1:]],
        lambda output: [None] * len(output),
        lambda output: [x - 0.5 for x in output],
    ],
    ids=["nan", "none", "half a nat"],
)
def test_a_sampler_with_other_log_probs_ends_the_run(spoil, policy):
    with pytest.raises(UserError, match="vLLM samples the wrong model: after sync 1"):
        Sampler(policy, spoil).canary().check(PROMPTS, 1)


def test_a_sampler_that_never_gets_the_adapter_ends_the_run(policy):
    sampler = Sampler(policy)
    canary = sampler.canary()
    canary.check(PROMPTS, 1)
    canary.send = lambda scale: None
    with pytest.raises(UserError, match="after sync 2"):
        canary.check(PROMPTS, 2)


def test_it_looks_again_after_a_sync_that_showed_too_little(policy):
    canary = Sampler(policy).canary()
    canary.agreed, canary._compare = 1, lambda scale, sync: canary.tolerance
    canary.check(PROMPTS, 2)
    assert canary.agreed == 1
