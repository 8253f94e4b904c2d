"""On a real GPU: generation without vLLM against transformers' own."""

import time
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_math.generation.decoding import lean_generation

pytestmark = pytest.mark.gpu
GROUP = 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generation_gives_the_tokens_of_transformers(dtype, model, rehearsal, figure):
    """The most likely tokens, in float32. Products of fewer rows round differently, so that a near tie may flip, and
    what follows in that row. In bfloat16 ties are frequent: a figure."""
    prompts, width, length = (2, 6, 4) if rehearsal else (8, 128, 256)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to("cuda").eval()
    ids = torch.randint(5, 40000, (prompts, width), generator=torch.Generator().manual_seed(0))
    ids = ids.repeat_interleave(GROUP, dim=0).to("cuda")
    settings = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    seconds, tokens = {}, []
    for name, way in (("transformers", nullcontext), ("ours", lambda: lean_generation(policy))):
        for _ in range(2):  # the first run chooses kernels
            with way(), torch.no_grad():
                torch.cuda.synchronize()
                started = time.perf_counter()
                sampled = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
                torch.cuda.synchronize()
                seconds[name] = time.perf_counter() - started
        tokens.append(sampled.cpu())
    same = (tokens[0] == tokens[1])[:, width:].float().mean().item()
    rate = len(ids) * length / seconds["ours"]
    says = f"{seconds['transformers'] / seconds['ours']:.2f}x as fast as transformers, {rate:.0f} tokens/s, {dtype}"
    figure(says=says, dtype=dtype, seconds=seconds, same_tokens=same)
    if dtype == "float32":
        assert same >= (1.0 if rehearsal else 0.95)
