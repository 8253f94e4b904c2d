"""transformers' generation in a simulated run: prefill and a few tokens by the trainer's own code, and then
the last tokens, with keys and values as long as they get.

Does not know an engine: what vLLM takes it is told.
"""

from inspect import signature
from typing import Any

import torch
from gpu_like.simulation.device import TOKEN
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from grpo_math.generation.cache import SPARE_COLUMNS, GrowingLayer
from grpo_math.generation.decoding import sample
from grpo_math.generation.names import cache_name

FIRST = 3  # tokens that are computed at the start


def generate(trainer: Any, plain: Any, prompts: list[list[int]], *others: Any) -> None:
    """The peak of `trainer._generate_single_turn`, which is ``plain``."""
    settings, length = trainer.generation_config, trainer.max_completion_length
    settings.max_new_tokens = FIRST
    empty: Any = torch.cuda.empty_cache
    empty()
    torch.cuda.empty_cache = lambda: None  # not between the first tokens and the last
    plain(prompts, *others)
    torch.cuda.empty_cache, settings.max_new_tokens = empty, length
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped).eval()
    with torch.no_grad():
        _last_tokens(trainer, model, len(prompts), max(map(len, prompts)), length)
    model.train()
    empty()


def _last_tokens(trainer: Any, model: Any, rows: int, prompt: int, length: int) -> None:
    """The last step in which the buffers grow, and the one after it."""
    config = model.config.get_text_config()
    heads, width = config.num_key_value_heads, getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    dtype = model.get_input_embeddings().weight.dtype
    before, whole = prompt, prompt + length - 1  # the last token is not attended to
    while before + 1 + SPARE_COLUMNS < whole:
        before += 1 + SPARE_COLUMNS
    cache, shape = DynamicCache(config=config), (rows, heads, before, width)
    cache.layers = [GrowingLayer(*(torch.empty(shape, dtype=dtype, device="cuda") for _ in "kv")) for _ in cache.layers]
    name = cache_name(signature(GenerationMixin.prepare_inputs_for_generation).parameters)
    for length in (before + 1, before + 2):
        out = model(
            input_ids=torch.full((rows, 1), TOKEN, device="cuda"),
            attention_mask=torch.ones(rows, length, dtype=torch.long, device="cuda"),
            position_ids=torch.full((rows, 1), length - 1, device="cuda"),
            **{name: cache},
            use_cache=True,
            logits_to_keep=1,
        )
        sample(out.logits[:, -1].float() / trainer.temperature, torch.arange(rows, device="cuda"), rows)
