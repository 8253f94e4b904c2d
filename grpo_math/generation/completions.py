"""Completions of a model for an evaluation: prompts -> texts, in order, greedy or sampled.

The prompts are split into batches once, by length, and each batch has a separate seed. So the completions of a batch
do not depend on earlier batches, and an interrupted evaluation resumes with the same answers.

evaluation/engines.py uses vLLM. In training, TRL generates, in `decoding.lean_generation`.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, TextStreamer

from grpo_math.generation.completion import Completion, is_truncated
from grpo_math.generation.decoding import lean_generation
from grpo_math.generation.request import Request

MAX_REQUESTS = 256  # requests to one server

Prompt = str | list[dict[str, Any]]

# From a batch's prompts, as token ids, and its seed.
Generate = Callable[[list[list[int]], int], list[Completion]]


def token_ids(
    tokenizer: Any, prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return exactly the ids that TRL trains on: messages with the chat template, and plain text without one."""
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **(template_kwargs or {})}
    encoded = [
        tokenizer(text=prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, **settings)
        for prompt in prompts
    ]
    return [encoding["input_ids"] for encoding in encoded]


def with_open_thoughts(
    tokenizer: Any, prompts: Sequence[Any], texts: Sequence[str], ids: Sequence[Sequence[int]], **template: Any
) -> list[str]:
    """Return the texts for the grader: with the ``<think>`` that the prompt has opened, if the completion has no end.

    The grader finds no answer in a thought that does not end. ``ids``: the tokens of the completions, because TRL may
    have parsed the text. ``template``: arguments of the chat template.

    >>> with_open_thoughts(None, ["1 + 1? <think>", "1 + 1? <think>", "1 + 1?"], ["2", "so </think> 2", "2"], [[]] * 3)
    ['<think>2', 'so </think> 2', '2']
    """
    texts, chat = list(texts), ""
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            settings = {**template, "add_generation_prompt": True, "tokenize": False}
            chat = chat or tokenizer.apply_chat_template([{"role": "user", "content": "x"}], **settings)
            prompt = chat
        is_open = prompt.rstrip().endswith("<think>") and "</think>" not in texts[row]
        if is_open and not (ids[row] and "</think>" in tokenizer.decode(ids[row])):
            texts[row] = f"<think>{texts[row]}"
    return texts


def batches(ids: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Return the prompts of each batch: similar lengths together, against padding, and equal prompts side by side.

    >>> batches([[5, 5, 5], [5], [5, 5, 5], [5, 5]], batch_size=2)
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def batch_seed(seed: int, number: int) -> int:
    """Return the seed of a batch: a hash, because neighbouring seeds of evaluations must not share batch seeds.

    >>> [batch_seed(0, 1) == batch_seed(*other) for other in ((0, 1), (1, 0), (0, 2), (1, 1))]
    [True, False, False, False]
    """
    return int.from_bytes(sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def ask_each(
    ask: Callable[[list[int], int], list[Completion]], prompts: Sequence[list[int]], seed: int
) -> list[Completion]:
    """Return the completions of all prompts. ``ask`` requests those of a prompt from a server, with a seed.

    Each prompt is a separate request, because vLLM uses one seed for all prompts of a request.
    """
    seeds = [batch_seed(seed, number) for number in range(len(prompts))]
    with ThreadPoolExecutor(MAX_REQUESTS) as pool:
        return list(chain.from_iterable(pool.map(ask, prompts, seeds)))


def settings_for(model: Any, tokenizer: Any, request: Request) -> dict[str, Any]:
    """Return the arguments of transformers' ``generate`` for a request. Raises `ConfigError` if only vLLM can do it."""
    # transformers takes every missing value from the model's generation_config, then from its own defaults (a top_k of
    # 50). Chat models set sampling and a repetition penalty there, so that a greedy evaluation would sample.
    sampling = {"min_p": 0.0} if getattr(model.generation_config, "min_p", None) else {}
    sampling |= request.for_transformers(vars(GenerationConfig()))
    stops = stop_ids(tokenizer, model.generation_config, request)
    config = GenerationConfig(
        max_new_tokens=request.max_new_tokens, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id, **sampling
    )
    # transformers needs the tokenizer to find stop strings.
    return {"generation_config": config, **({"tokenizer": tokenizer} if request.stop else {})}


class Stream(TextStreamer):
    """Passes the text of one completion to ``show``, word by word as it comes."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.show(text)


def with_model(model: Any, tokenizer: Any, request: Request, show: Callable[[str], None] | None = None) -> Generate:
    """Return a function that generates a batch with transformers' ``generate`` in this process.

    ``show``: get the text of a batch of one prompt as it comes.
    """
    settings = settings_for(model, tokenizer, request)
    stops = settings["generation_config"].eos_token_id

    def generate(prompts: list[list[int]], seed: int) -> list[Completion]:
        # On the left, also with a script's tokenizer, which may pad on the right or have no padding token.
        rows = [torch.tensor(prompt) for prompt in prompts]
        ids, mask = (
            pad_sequence(some, batch_first=True, padding_side="left").to(model.device)
            for some in (rows, [torch.ones_like(row) for row in rows])
        )
        was_training = model.training
        model.eval()
        try:
            # An evaluation during training must not change the random numbers of the training.
            with torch.random.fork_rng(), torch.no_grad(), nullcontext() if show else lean_generation(model):
                torch.manual_seed(seed)
                streamer = {"streamer": Stream(tokenizer, show)} if show else {}
                output = model.generate(input_ids=ids, attention_mask=mask, **settings, **streamer)
        finally:
            model.train(was_training)
        return [read_off(tokenizer, row, stops, request.stop) for row in output[:, ids.size(1) :].tolist()]

    return generate


def stop_ids(tokenizer: Any, generation_config: Any, request: Request) -> list[int]:
    """Return every token that ends a completion, by the request, the tokenizer or the model's generation_config.

    >>> from types import SimpleNamespace
    >>> tokenizer, request = SimpleNamespace(eos_token_id=9), Request(stop_token_ids=[5])
    >>> [stop_ids(tokenizer, GenerationConfig(eos_token_id=ends), request) for ends in (None, 7, [3, 9])]
    [[5, 9], [5, 7, 9], [3, 5, 9]]
    >>> stop_ids(tokenizer, None, request), stop_ids(tokenizer, None, Request(options={"ignore_eos": True}))
    ([5, 9], [])
    """
    ends = generation_config.eos_token_id if generation_config is not None else None
    of_model = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    return sorted({*request.stop_token_ids, *(() if request.options.get("ignore_eos") else of_model)})


def read_off(tokenizer: Any, ids: list[int], stops: list[int], stop: Sequence[str] = ()) -> Completion:
    """Return the completion in generated ids, up to the first token, or the first of the texts ``stop``, that ends
    one."""
    end = next((t for t, token in enumerate(ids) if token in stops), len(ids))
    if stop and end == len(ids):
        # In a batch, transformers fills the row behind a stop string with padding. A text that is in the first tokens
        # is also in more of them, so the first token is found by halves.
        end = bisect_left(range(len(ids)), True, key=lambda t: not is_truncated(tokenizer, ids[: t + 1], stops, stop))
    kept = ids[: end + 1]
    text = tokenizer.decode(kept, skip_special_tokens=True)
    return Completion(kept, text=text, truncated=is_truncated(tokenizer, kept, stops, stop))
