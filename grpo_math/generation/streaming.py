"""Stream the text after one prompt, from a model or from the base model under its adapter.

Does not batch: completions.py does, for evaluations.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from tokenizers.decoders import DecodeStream


def tokens(
    model: Any,
    ids: list[int],
    stops: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    adapter: bool = True,
) -> Iterator[int]:
    """Yield the token ids after a prompt as soon as they are sampled, up to one of ``stops``.

    Temperature 0 is greedy. ``adapter`` False: a PEFT model answers as its base does. Two streams of one model may be
    read alternately.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    inputs, cache = torch.tensor([ids], device=model.device), None
    model.eval()
    for _ in range(max_new_tokens):
        # Entered for each token and left before `yield`: meanwhile the reader may use the model with its adapter.
        with torch.no_grad(), nullcontext() if adapter else model.disable_adapter():
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1].float()
        if temperature:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        yield token
        if token in stops:
            return
        inputs = torch.tensor([[token]], device=model.device)


def pieces(tokenizer: Any, stream: Iterator[int]) -> Iterator[str]:
    """Decode a stream of tokens piece by piece. Characters of several tokens are yielded whole, and never in part."""
    decoded = DecodeStream(skip_special_tokens=True)
    for token in stream:
        if piece := decoded.step(tokenizer.backend_tokenizer, token):
            yield piece
