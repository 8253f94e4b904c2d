"""Completions of a model for an evaluation: prompts -> texts, in order, greedy or sampled.

Does not grade them, and does not generate for training: TRL does, within `decoding.lean_generation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from grpo_math.attention import unsupported
from grpo_math.decoding import lean_generation


class Completion(NamedTuple):
    """One answer of a model: its text, its length with the end token, and whether the limit cut it off."""

    text: str
    tokens: int
    truncated: bool


def complete(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, str]]],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> list[Completion]:
    """One completion of each prompt, in order; 0 as temperature is greedy. The caller's generators stay as they are."""
    token_ids = [_token_ids(tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(token_ids[i]))  # long with long, so that little is padded
    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=sorted(stops), pad_token_id=tokenizer.pad_token_id, **sampling
    )
    shares = unsupported(model.config) is None
    completions: dict[int, Completion] = {}
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(), tqdm(total=len(order), desc="evaluating", unit="", disable=not progress) as bar:
        torch.manual_seed(seed)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            inputs = tokenizer.pad({"input_ids": [token_ids[i] for i in batch]}, return_tensors="pt").to(model.device)
            with torch.no_grad(), lean_generation(model) if shares else nullcontext():
                output = model.generate(**inputs, generation_config=config)
            for i, ids in zip(batch, output[:, inputs["input_ids"].size(1) :].tolist(), strict=True):
                end = next((t for t, token in enumerate(ids) if token in stops), None)
                kept = ids if end is None else ids[: end + 1]
                completions[i] = Completion(tokenizer.decode(kept, skip_special_tokens=True), len(kept), end is None)
            bar.update(len(batch))
    model.train(was_training)
    return [completions[i] for i in range(len(prompts))]


def _token_ids(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    """Exactly the ids that TRL trains on: the chat template for messages, the plain text otherwise."""
    if isinstance(prompt, str):
        return tokenizer(text=prompt)["input_ids"]
    encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return encoded["input_ids"]
