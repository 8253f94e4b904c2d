"""How often an update may wait for the GPU: ceilings, as of today.

A wait costs the CPU the lead that it has over the GPU. Lower a ceiling when the number falls.
"""

import pytest
import torch
from gpu_like.counting import OURS, counting, of
from peft import LoraConfig
from small_trainers import SMALL, make
from transformers import AutoConfig, LlamaForCausalLM

from grpo_math.generation.decoding import lean_generation
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

TRL_ARGUMENTS = {
    "full": 65,
    "kl with lora": 72,
}  # by lines of TRL, which logs figure by figure and scores the reference
BACKWARD = 2  # in autograd's own thread: TRL's head picks the scored tokens by a mask
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
KINDS = {"full": {}, "kl with lora": {"beta": 0.1, "peft_config": LORA}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_the_gpu_as_rarely_as_this(kind, tiny, tokenizer, tmp_path):
    settings = {**SMALL, "max_steps": 2, "longest_first": False, "use_cpu": False, **KINDS[kind]}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny(), tokenizer, tmp_path, **settings)
    # Once for a run, and so no part of a step.
    trainer.grpo_math.scorer.agree_to_pack()
    with counting() as counts:
        trainer.train()
    assert (of(counts, "grpo_math") - of(counts, "grpo_math/generation")) / 2 <= OURS, counts
    assert of(counts, "trl") / 2 <= TRL_ARGUMENTS[kind], counts
    assert counts["backward"] / 2 <= BACKWARD, counts


def test_four_sampled_tokens_wait_for_the_gpu_once(tiny, tokenizer):
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tiny())).to("cuda")
    inputs = tokenizer(["What is 3 + 4?"] * 2 + ["Hello"], return_tensors="pt", padding=True).to("cuda")

    def waits(tokens):
        with counting() as counts, lean_generation(model):
            model.generate(**inputs, max_new_tokens=tokens, eos_token_id=None, do_sample=True, top_k=0)
        return counts.total()

    # The last token is read at once, because all rows end at the maximum length.
    assert waits(16) - waits(4) == 3
    assert waits(17) - waits(16) == 1


@pytest.mark.parametrize("seed", range(6))
def test_tokens_that_are_read_late_leave_no_trace(seed, tiny, tokenizer):
    """Rows end at any token: the output and the next random number are those of the CPU, which reads each token."""
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tiny()))
    inputs = tokenizer(["What is 3 + 4?"] * 3 + ["Hello"], return_tensors="pt", padding=True)
    sampling = {"do_sample": True, "top_k": 0, "eos_token_id": list(range(0, len(tokenizer), 3)), "pad_token_id": 1}
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(seed)
        with lean_generation(model.to(device)):
            tokens = model.generate(**inputs.to(device), max_new_tokens=30, **sampling)
        results.append((tokens.cpu().tolist(), torch.rand(1).item()))
    assert results[0] == results[1]
    assert len(results[0][0][0]) < inputs["input_ids"].size(1) + 30
