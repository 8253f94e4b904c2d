"""Generation: each prompt is prefilled once and its cache repeated for the group; completions for an evaluation.

TRL gives ``generate`` every prompt of the batch G times. All but one of those prefills are work done twice: the keys
and values of a prompt do not depend on which completion follows.

Does not sample: transformers does, from the same logits in the same order, so that a seed gives the same completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_math.attention import unsupported

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def shared_prefill(model: Any) -> Iterator[None]:
    """While open, ``model.generate(input_ids=..., attention_mask=...)`` prefills equal prompts once.

    For left-padded prompts of models whose layers all keep full keys and values (`attention.unsupported` tells).
    """
    plain = model.generate
    had_own = "generate" in model.__dict__

    def generate(input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        cache = prefill(model, input_ids, attention_mask)
        if cache is not None:
            kwargs["past_key_values"] = cache
        return plain(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    model.generate = generate
    try:
        yield
    finally:
        if had_own:
            model.generate = plain
        else:
            del model.generate


def prefill(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any | None:
    """The cache of all prompt tokens but the last, (B, S - 1), computed once for each distinct prompt.

    None where it would save nothing: no prompt occurs twice, or a prompt is one token long.
    """
    import torch
    from transformers import DynamicCache

    prompts, inverse = torch.unique(torch.stack([input_ids, attention_mask]), dim=1, return_inverse=True)
    ids, mask = prompts[0, :, :-1], prompts[1, :, :-1]
    if ids.size(0) == input_ids.size(0) or ids.size(1) == 0:
        return None
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    cache.batch_select_indices(inverse)
    return cache


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
    import torch
    from tqdm import tqdm
    from transformers import GenerationConfig

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
            with torch.no_grad(), shared_prefill(model) if shares else nullcontext():
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
