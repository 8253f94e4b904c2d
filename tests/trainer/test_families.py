"""Model families: packed to TRL's numbers, or scored the plain way with a line that says why. Tiny random models."""

import pytest
import torch
from small_families import compared, tiny_model, try_first
from small_generation import counted
from small_trainers import PROMPTS

from grpo_math.generation.decoding import lean_generation

PACKED = (
    *("cohere", "deepseek_v3", "gemma2", "gemma3", "gpt_neox", "gpt_oss", "mistral", "mixtral", "opt", "phi3"),
    *("falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "nemotron_h", "qwen3_next", "zamba2"),
)
SAMPLED_PLAIN = ("gemma3", "falcon_h1", "mamba2", "nemotron_h", "zamba2")  # generation is left to transformers
PLAIN = {
    "falcon": "its own attention",
    "diffllama": "2 layers and 4 calls of packed attention",
    "nemotron": "2 layers and 0 calls of packed attention",
    "falcon_mamba": "layers (FalconMambaMixer) that are not told how a row is packed",
    "minimax": "1 layers with a state, of which 0 continue a prompt's state",
    "stablelm": "2 layers and 0 calls of packed attention",
    # Positions that the model counts itself.
    **dict.fromkeys(("roberta", "bart"), "log-probs that change by"),
}


def scored_alike(trainer, *rows):
    logps, gradient = compared(trainer, *rows)
    assert logps < 1e-4
    assert gradient < 1e-5


@pytest.mark.full(keep=["gemma2", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("family", PACKED)
def test_a_family_that_is_packed_has_trls_log_probs_gradients_and_completions(family, ours, chars):
    model = tiny_model(family)
    inputs = chars([p for p in PROMPTS for _ in range(2)], return_tensors="pt", padding=True)
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=True)
    trainer = ours(model=model)
    # Some shorter than a convolution, one longer than a chunk, and completions of one token.
    for rows in (((7, 3, 12),), ((1, 2, 7),), ((70,),), ((7, 3), 4, (1,))):
        scored_alike(trainer, *rows)
    assert trainer.scorer is not None
    with counted(model) as shapes, lean_generation(model):
        assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=True), plain)
    assert (shapes[0][0] == len(PROMPTS)) == (family not in SAMPLED_PLAIN)


@pytest.mark.full(keep=["diffllama", "falcon", "roberta", "bart"])
@pytest.mark.parametrize("family", PLAIN)
def test_a_family_that_cannot_be_packed_is_scored_the_plain_way_and_named_once(family, ours, caplog):
    reason, model = PLAIN[family], tiny_model(family)
    trainer = ours(model=model)
    try_first(trainer)
    scored_alike(trainer, (7, 3, 12))
    assert (trainer.scorer, trainer.budget.splits) == (None, False)
    assert caplog.text.count(f"pack_updates: {type(model).__name__} has {reason}") == 1


@pytest.mark.slow
def test_the_rounding_of_half_precision_is_not_taken_for_a_model_that_cannot_be_packed(smollm, tokenizer, ours):
    trainer = ours(model=smollm, tokenizer=tokenizer, model_init_kwargs={"dtype": "bfloat16"})
    try_first(trainer)
    assert trainer.scorer is not None
