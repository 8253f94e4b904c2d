"""How often an update may wait for the GPU, and how many kernels a layer may launch: ceilings, as of today.

A wait costs the CPU the lead that it has over the GPU; a launch some microseconds, however little it computes. Lower a
ceiling when the number falls.
"""

from __future__ import annotations

import pytest
import torch
from gpu_like.counting import counting
from peft import LoraConfig
from small_trainers import SMALL, make, padded_batch
from transformers import AutoConfig, LlamaForCausalLM

from grpo_math.generation.decoding import lean_generation
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

OURS = 20  # waits of a step by lines of grpo_math besides sampling
OF_TRL = 65  # by lines of TRL, whose loss logs figure by figure
BACKWARD = 2  # in autograd's own thread: TRL's head picks the scored tokens by a mask
LAUNCHES = 200  # of a layer, forward and backward, whatever the number of groups
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


KINDS = {"full": {}, "kl with lora": {"beta": 0.1, "peft_config": LORA}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_the_gpu_as_rarely_as_this(kind, tiny, tokenizer, tmp_path):
    settings = {**SMALL, "max_steps": 2, "longest_first": False, "use_cpu": False, **KINDS[kind]}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny(), tokenizer, tmp_path, **settings)
    with counting() as counts:
        trainer.train()
    sampling = sum(n for line, n in counts.synchronisations.items() if line.startswith("grpo_math/generation/"))
    assert (counts.of("grpo_math") - sampling) / 2 <= OURS, counts.synchronisations
    assert counts.of("trl") / 2 <= OF_TRL, counts.synchronisations
    assert counts.synchronisations["backward"] / 2 <= BACKWARD, counts.synchronisations


def passes(layers, groups, tiny, tokenizer, folder):
    """Counts of a forward and a backward pass over so many groups of four, in bfloat16."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tiny(), num_hidden_layers=layers)).bfloat16()
    trainer = make(MathGRPOTrainer, MathGRPOConfig, model, tokenizer, folder, use_cpu=False)
    ids, mask, longest = padded_batch([7, 3, 12, 5, 9, 1, 4, 8][:groups], 4, [5, 3, 9, 1])
    rows = (trainer.model, ids.to("cuda"), mask.to("cuda"), longest)
    with counting() as counts:
        logps, _, _ = trainer._get_per_token_logps_and_entropies(*rows)
        logps.sum().backward()
    return counts.kernels


def test_a_layer_launches_at_most_this_and_as_much_for_any_number_of_groups(tiny, tokenizer, tmp_path):
    def a_layer(groups):
        one, three = (passes(layers, groups, tiny, tokenizer, tmp_path) for layers in (1, 3))
        assert three["_varlen_attn"] == three["_varlen_attn_backward"] == 3
        return (three.total() - one.total()) / 2

    few, many = (a_layer(groups) for groups in (1, 8))
    assert few == many <= LAUNCHES


def test_a_sampled_token_waits_for_the_gpu_once(tiny, tokenizer):
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tiny())).to("cuda")
    inputs = tokenizer(["What is 3 + 4?"] * 2 + ["Hello"], return_tensors="pt", padding=True).to("cuda")

    def waits(tokens):
        with counting() as counts, lean_generation(model):
            model.generate(**inputs, max_new_tokens=tokens, eos_token_id=None, do_sample=True, top_k=0)
        return counts.of("grpo_math")

    assert waits(14) - waits(4) == 10
