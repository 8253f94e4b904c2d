"""transformers' generation in a simulated run: prefill and a few tokens by the trainer's own code, and then
the last tokens, with keys and values as long as they get.

Does not know an engine: what vLLM takes it is told.
"""

from typing import Any

import torch
from gpu_like.simulation.device import CUDA, TOKEN

from grpo_math.generation.cache import ROOM, GrowingLayer
from grpo_math.generation.decoding import _knows_call, sample

FIRST, LAST = 3, 2  # tokens that are computed at the start, and at the end


def generate(trainer: Any, plain: Any, prompts: list[list[int]], *others: Any) -> None:
    """The peak of `trainer._generate_single_turn`, which is ``plain``."""
    settings, length = trainer.generation_config, trainer.max_completion_length
    settings.max_new_tokens = min(FIRST, length)
    gives_back: Any = torch.cuda.empty_cache
    gives_back()
    torch.cuda.empty_cache = lambda: None  # but not between the first tokens and the last
    plain(prompts, *others)
    torch.cuda.empty_cache = gives_back
    settings.max_new_tokens = length
    if length > FIRST:
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        was_training, lean = model.training, bool(trainer.scorer) and _knows_call(model, {})
        model.eval()
        with torch.no_grad():
            _last_tokens(trainer, model, len(prompts), max(map(len, prompts)), length, lean)
        model.train(was_training)
    gives_back()


def _last_tokens(trainer: Any, model: Any, rows: int, prompt: int, length: int, lean: bool) -> None:
    """The last step in which the buffers grow, and the one after it; ``lean``: as decoding.py generates."""
    config = model.config.get_text_config()
    heads, width = config.num_key_value_heads, getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    dtype = model.get_input_embeddings().weight.dtype
    before, whole = prompt, prompt + length - 1  # the last token is not attended to
    if lean:
        while before + 1 + ROOM < whole:
            before += 1 + ROOM
    else:
        before = whole - LAST
    from transformers.cache_utils import DynamicCache

    cache: Any = DynamicCache(config=config)
    shape = rows, heads, before, width
    for layer in cache.layers:
        keys, values = (torch.empty(shape, dtype=dtype, device=CUDA) for _ in range(2))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    if lean:
        cache.layers = [GrowingLayer(layer.keys, layer.values) for layer in cache.layers]
    del keys, values, layer
    for step in range(LAST):
        ids = torch.full((rows, 1), TOKEN, device=CUDA)
        mask = torch.ones(rows, before + step + 1, dtype=torch.long, device=CUDA)
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=torch.full((rows, 1), before + step, device=CUDA),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1].float()
        scores = logits / trainer.temperature
        sample(scores, torch.arange(rows, device=CUDA), rows)
