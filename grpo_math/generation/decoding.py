"""Faster generation with transformers: the tokens of `generate`, without repeated or unused computation.

TRL passes every prompt of the batch to ``generate`` G times, and ``generate`` computes every row until the last one
ends. Here each prompt is prefilled once, and its cache is repeated for the group. The shared prefix of all prompts (a
template's instructions and examples) is computed once for the batch. Finished rows are dropped from the batch, and the
cache grows in place.

Does not sample differently: the logits processors, the softmax and the random numbers of each row are those of
transformers. So a seed gives the same tokens, up to the rounding of the logits: a smaller matrix product may round
differently, which changes a few tokens in bfloat16. transformers runs the calls that `decode` does not support.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.generation import GenerationConfig, GenerationMixin, GenerationMode, logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from grpo_math.generation.cache import GrowingLayer, fill_shared_prefix
from grpo_math.generation.decode_mask import one_decode_mask
from grpo_math.generation.folded_adapter import folded_adapter
from grpo_math.generation.models import longest_width, rowwise_adapter
from grpo_math.generation.names import cache_name
from grpo_math.run.speed_ups import switched_off
from grpo_math.system.replaced import replaced
from grpo_math.system.user_functions import is_foreign

# Caches from which a row can be dropped.
CACHE_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}
# Arguments that `generate` passes to its loop, besides the settings and the cache.
LOOP_ARGUMENTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
# Processors that treat each row by itself: with fewer rows they return the same scores. A repetition penalty also
# depends on the padding of each row: transformers runs such calls.
ROW_BY_ROW = {
    *(logits_process.EpsilonLogitsWarper, logits_process.EtaLogitsWarper),
    *(logits_process.ExponentialDecayLengthPenalty, logits_process.ForcedBOSTokenLogitsProcessor),
    *(logits_process.ForcedEOSTokenLogitsProcessor, logits_process.InfNanRemoveLogitsProcessor),
    *(logits_process.LogitNormalization, logits_process.MinLengthLogitsProcessor),
    *(logits_process.MinNewTokensLengthLogitsProcessor, logits_process.MinPLogitsWarper),
    *(logits_process.NoBadWordsLogitsProcessor, logits_process.NoRepeatNGramLogitsProcessor),
    *(logits_process.SequenceBiasLogitsProcessor, logits_process.SuppressTokensAtBeginLogitsProcessor),
    logits_process.SuppressTokensLogitsProcessor,
    *(logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper),
    *(logits_process.TopPLogitsWarper, logits_process.TypicalLogitsWarper),
}


@contextmanager
def lean_generation(model: Any) -> Iterator[None]:
    """Make ``model.generate(input_ids=..., attention_mask=...)`` compute equal prompts once, and no finished rows.

    The output is that of the original method: tokens, shape, padding, and the state of the random numbers. Supports
    left-padded prompts, and layers with keys and values or with a state. The original method runs other calls: with
    beams, other caches, processors that mix rows, dropout, or several processes that step together (FSDP, ZeRO-3).
    """
    generate = model.generate
    # A method of the user may not take an argument that TRL does not pass, and `decode` would skip the user's loop.
    bare = model.get_base_model() if is_peft_model(model) else model
    methods = {name: getattr(bare, name) for name in ("generate", "_sample")}
    is_own = any(
        getattr(method, "__func__", None) is not getattr(GenerationMixin, name) or is_foreign(method)
        for name, method in methods.items()
    )
    if is_own or is_foreign(generate):
        switched_off("shared prefill", f"{type(bare).__name__} has its own generate or _sample")
        yield
        return

    def shared_prefill(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        try:
            _check_call(model, kwargs)
            # Only `decode` sees the settings as `generate` prepares them. If it refuses, nothing has been computed or
            # drawn, so `generate` can start again.
            with folded_adapter(model):
                return generate(**inputs, **kwargs, custom_generate=decode)
        except UnknownSetting as error:
            switched_off("shared prefill", str(error))
        return generate(**inputs, **kwargs)

    with replaced(model, generate=shared_prefill):
        yield


@contextmanager
def release_cached_memory() -> Iterator[None]:
    """Return the unused memory of torch's caching allocator to the GPU, before and after.

    An update leaves blocks that are too small for a prefill, and a prefill leaves blocks that an update would split.
    The GPU would need memory for both.
    """
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


class UnknownSetting(Exception):
    """Raised before anything is computed, with the reason, for a call that transformers' own loop must run."""


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Tensor:
    """Generate as the loop of `generate` does (it is its ``custom_generate``): prompts (B, S) become prompts and
    completions (B, S + T), padded.

    Each distinct prompt is prefilled once, and a finished row is not computed any more. Raises `UnknownSetting`.
    """
    _check_settings(model, input_ids, logits_processor, generation_config, model_kwargs)
    batch = input_ids.size(0)
    # Rows of the batch that are still computed.
    rows = torch.arange(batch, device=input_ids.device)
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    # Without an end token, transformers keeps sampling rows that a criterion has stopped. Then no row may be dropped.
    may_leave = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    # The next token of finished rows.
    padding = torch.zeros_like(input_ids[:, 0])
    if may_leave:
        padding += generation_config._pad_token_tensor.to(padding.device)
    unread = UnreadTokens(input_ids.device, stopping_criteria)

    # As in transformers, not inside `_optimize_model_for_decode`, which switches experts to batched_mm: it copies their
    # weights, and is faster for few tokens only.
    logits, model_kwargs = _prefill(model, input_ids, model_kwargs)
    with model._optimize_model_for_decode(), one_decode_mask(model, generation_config.max_length):
        while True:
            # Sample and append for the whole batch, so that a seed gives the tokens of `generate`.
            scores = logits_processor(input_ids[rows], logits)
            tokens = sample(scores, rows, batch) if generation_config.do_sample else scores.argmax(dim=-1)
            stays = unfinished[rows]
            failed = ((tokens < 0) & stays).any()
            tokens = tokens.clamp(min=0)  # the embedding has no row -1
            if may_leave:
                tokens = tokens.where(stays, padding[rows])
            input_ids = torch.cat([input_ids, padding.scatter(0, rows, tokens)[:, None]], dim=1)
            unfinished &= ~stopping_criteria(input_ids, None)

            unread.add(failed, unfinished[rows])
            if unread.is_due(input_ids.size(1), generation_config.max_length):
                n, holes, extra = unread.read()
                if n == 0:
                    return input_ids[:, : input_ids.size(1) - extra]
                if may_leave and n < rows.numel():
                    rows, model_kwargs = _drop_finished(rows, unfinished[rows], n, holes, model_kwargs)

            inputs = model.prepare_inputs_for_generation(input_ids[rows], next_sequence_length=1, **model_kwargs)
            outputs = model(**inputs, return_dict=True)
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            logits = outputs.logits[:, -1].float()


class UnreadTokens:
    """Tokens that the GPU may still be computing, and of which the host does not know which rows they end.

    Each read waits for the GPU. So a GPU computes up to four tokens between two reads, and the tokens behind the end of
    the last row are dropped again, together with the random numbers that they drew.
    """

    def __init__(self, device: torch.device, stopping_criteria: Any) -> None:
        # On a CPU a read costs nothing. Another criterion may do anything when it is called, so it sees each token.
        is_known = all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in stopping_criteria)
        self.most = 4 if device.type == "cuda" and is_known else 1
        self.device = device
        self.counts: list[Tensor] = []  # of each token: unfinished rows, or -1 if no token could be sampled
        self.random_states: list[Any] = []
        self.stays: Tensor | None = None

    def add(self, failed: Tensor, stays: Tensor) -> None:
        """Add a token of the computed rows (R,): ``stays`` is False for a finished row."""
        self.counts.append(stays.sum().masked_fill(failed, -1))
        if self.most > 1:
            self.random_states.append(_random_state(self.device))
        self.stays = stays

    def is_due(self, length: int, longest: int) -> bool:
        # At the maximum length all rows end.
        return len(self.counts) == self.most or length >= longest

    def read(self) -> tuple[int, int, int]:
        """Return three numbers: the unfinished rows n, those behind the first n rows, and the tokens behind the end of
        all rows. Restore the random numbers to the end of the last row. Raise if sampling failed."""
        assert self.stays is not None
        # Unfinished rows behind the first n of them fill the gaps that finished rows leave.
        is_behind = torch.arange(self.stays.numel(), device=self.device) >= self.stays.sum()
        *counts, behind = torch.stack([*self.counts, (self.stays & is_behind).sum()]).tolist()
        if -1 in counts:
            raise RuntimeError("the logits contain inf or nan: no token can be sampled from them")
        extra = counts.count(0) - 1 if 0 in counts else 0
        if extra:
            _set_random_state(self.device, self.random_states[-1 - extra])
        self.counts = []
        self.random_states = []
        return counts[-1], behind, extra


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _prefill(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Compute each distinct prompt once. Return the logits (B, V) of the first token, and a cache with all B rows."""
    batch = input_ids.size(0)
    # Prompts are equal if their masks and positions are, too: an id of padding may also be a token.
    shaped = [value for value in model_kwargs.values() if isinstance(value, Tensor) and value.shape == input_ids.shape]
    _, prompt = torch.unique(torch.cat([input_ids, *shaped], dim=1), dim=0, return_inverse=True)
    # `scatter_` keeps any one of a prompt's rows: they are equal.
    one_row = torch.zeros_like(prompt).scatter_(0, prompt, torch.arange(batch, device=prompt.device))
    one_row = one_row[: int(prompt.max()) + 1]  # of each prompt
    prompts, selected = input_ids[one_row], _select(model_kwargs, one_row, batch)

    cache = model_kwargs[cache_name(model_kwargs)]
    # A sliding layer would drop keys by their position. If all keys are kept, the mask excludes the same ones.
    cache.layers = [DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in cache.layers]
    if shared := fill_shared_prefix(model, prompts, selected):
        selected["next_sequence_length"] = prompts.size(1) - shared
    inputs = model.prepare_inputs_for_generation(prompts, is_first_iteration=True, **selected)
    outputs = model(**inputs, return_dict=True)

    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            # This selects rows by their numbers, so it can also repeat them.
            layer.reorder_cache(prompt)
        else:
            cache.layers[i] = GrowingLayer(layer.keys[prompt], layer.values[prompt])
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    return outputs.logits[:, -1].float()[prompt], model_kwargs


def _drop_finished(
    rows: Tensor, stays: Tensor, n: int, holes: int, model_kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Drop finished rows from the cache and from the arguments. The last rows fill the gaps.

    ``n`` of the rows stay, and ``holes`` of the first n are finished.
    """
    # Only rows that fill gaps are copied. `reorder_cache` would copy the keys and values of all remaining rows. Sorting
    # a mask finds its rows without a wait, because their number is known.
    places = torch.arange(n, device=rows.device)
    gaps = stays[:n].to(torch.uint8).sort(stable=True).indices[:holes]
    movers = n + (~stays[n:]).to(torch.uint8).sort(stable=True).indices[:holes]
    places[gaps] = movers

    for layer in model_kwargs[cache_name(model_kwargs)].layers:
        if isinstance(layer, GrowingLayer):
            layer.move(movers, gaps, n)
        else:
            layer.reorder_cache(places)
    return rows[places], _select(model_kwargs, places, rows.numel())


def _select(model_kwargs: dict[str, Any], rows: Tensor, batch: int) -> dict[str, Any]:
    """Return the arguments of these rows only."""
    return {
        name: value[rows] if isinstance(value, Tensor) and value.dim() == 2 and value.size(0) == batch else value
        for name, value in model_kwargs.items()
    }


def sample(scores: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Sample a token of each row from scores (R, V), as ``multinomial`` does for ``rows`` of the full batch.

    ``torch.multinomial(p, 1)`` is argmax(p / q), where q is exponential noise of p's shape. So q is drawn for the whole
    batch, which leaves the generator in the same state. Everything else is computed for R rows only. The token is -1
    for a row with inf or nan, which cannot be sampled.

    >>> scores = torch.randn(4, 1000)
    >>> _ = torch.manual_seed(0)
    >>> drawn = torch.multinomial(scores.softmax(dim=-1), 1)[:, 0]
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(sample(scores[[3, 1]], torch.tensor([3, 1]), 4), drawn[[3, 1]])
    True
    """
    noise = torch.empty(batch, scores.size(1), device=scores.device).exponential_()
    largest, tokens = scores.softmax(dim=-1).div_(noise[rows]).max(dim=-1)
    return tokens.where(largest > 0, -1)


def _refuse(hindrances: dict[str, bool]) -> None:
    """Raise `UnknownSetting` with the first reason that applies."""
    if reason := next((reason for reason, applies in hindrances.items() if applies), None):
        raise UnknownSetting(reason)


def _check_call(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise `UnknownSetting` unless `decode` may be tried. Checks what `generate` would not pass to `decode`."""
    # With a function as ``custom_generate``, `generate` drops streamer, synced_gpus and assistant_model.
    known = {"generation_config", "logits_processor", "stopping_criteria"} | set(vars(GenerationConfig()))
    others = sorted(set(kwargs) - known)
    drops = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    _refuse(
        {
            f"generate is called with {', '.join(others)}": bool(others),
            # Every forward gathers weights from all processes, so a process may not stop before the others.
            "ZeRO-3 or FSDP splits the weights": is_deepspeed_zero3_enabled()
            or any(is_fsdp_managed_module(module) for module in model.modules()),
            # No row may leave the batch, or share its prompt.
            f"the adapter is {rowwise_adapter(model)}": bool(rowwise_adapter(model)),
            # Dropout draws random numbers for each row that is computed, so fewer rows would change the samples.
            "the model generates with dropout": bool(
                model.training and (drops or getattr(model.config, "attention_dropout", 0))
            ),
        }
    )


def _check_settings(
    model: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, model_kwargs: dict[str, Any]
) -> None:
    """Raise `UnknownSetting` unless `decode` gives the result of transformers' loop with these prepared settings."""
    name = cache_name(model_kwargs)
    cache = model_kwargs.get(name)
    # A RoPE that reads the longest row would miss the rows that are dropped.
    limit = longest_width(model.config)
    mode = generation_config.get_generation_mode()
    others = ", ".join(sorted(set(model_kwargs) - LOOP_ARGUMENTS - {name}))
    processors = {type(processor) for processor in logits_processor} - ROW_BY_ROW
    _refuse(
        {
            f"transformers {transformers.__version__} passes {others} to its loop": bool(others),
            f"the mode of generation is {mode}": mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH),
            "return_dict_in_generate is set": bool(generation_config.return_dict_in_generate),
            "prefill_chunk_size is set": generation_config.prefill_chunk_size is not None,
            f"rows of {limit} or more tokens have positions that depend on the longest row": limit is not None
            and generation_config.max_length >= limit,
            "the cache is not an empty DynamicCache of keys, values and states": type(cache) is not DynamicCache
            or cache.offloading
            or cache.get_seq_length() > 0
            or any(type(layer) not in CACHE_LAYERS for layer in cache.layers),
            f"{', '.join(sorted(kind.__name__ for kind in processors))} depends on other rows": bool(processors),
            # Row numbers are on the device of the prompts, so the whole cache has to be there.
            "the model is on several devices": len(set(getattr(model, "hf_device_map", {}).values())) > 1
            or input_ids.device != model.device,
            # On other devices (MPS) `generate` may stop a step late, so it draws once more than it returns.
            f"the device is {input_ids.device.type}": input_ids.device.type not in ("cpu", "cuda"),
        }
    )
