"""One prompt -> text as it is generated, piece by piece, from a model or from the base under its adapter.

Does not batch: completions.py does, for evaluations.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch


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
    """The token ids after a prompt's, each as soon as it is known, up to one of ``stops``.

    0 as temperature is greedy. ``adapter`` False: a PEFT model answers as its base does. Two of these streams of one
    model may take turns.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    inputs, cache = torch.tensor([ids], device=model.device), None
    model.eval()
    for _ in range(max_new_tokens):
        with torch.no_grad(), nullcontext() if adapter else model.disable_adapter():
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1].float()
        if temperature:
            drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
            token = int(drawn)
        else:
            token = int(logits.argmax())
        yield token
        if token in stops:
            return
        inputs = torch.tensor([[token]], device=model.device)


def pieces(tokenizer: Any, stream: Iterator[int]) -> Iterator[str]:
    """The text of a stream of tokens in pieces that add up to it; a character of several tokens comes whole."""
    ids: list[int] = []
    said = ""
    for token in stream:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(said) :]
            said = text
    if ids and (rest := tokenizer.decode(ids, skip_special_tokens=True)[len(said) :]):
        yield rest
