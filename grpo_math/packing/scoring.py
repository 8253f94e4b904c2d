"""Compute log-probs and entropies (B, T) as TRL's method does, from packed rows.

Input and output are padded (`pack.py`). In between, each prompt is computed once, and padding is not computed.

`micro_batches.TokenBudget` has the token budget, which the update uses too.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_math.generation.models import context_length, longest_width, rowwise_adapter
from grpo_math.packing import attention, recurrent
from grpo_math.packing.micro_batches import TokenBudget
from grpo_math.packing.pack import PaddedRows, Unpackable, layout, pack, unpack
from grpo_math.packing.row_plan import plan_micro_batches
from grpo_math.run.speed_ups import switched_off
from grpo_math.run.weights import split_by
from grpo_math.system.collectives import agree_on_all, agree_on_first, agree_on_largest
from grpo_math.system.replaced import replaced

# Several rows that pack to more of the padded tokens than this are scored as TRL does.
WORTH_PACKING = 0.97
# The most that packing may change log-probs in float32, in nats: more than the rounding of any model here.
MAX_DIFF = 1e-3
# In half precision the limit is 3 times the measured rounding, within these bounds: of a row's median and maximum.
# Another width alone would be too small a measure: it changes the median of SmolLM2-135M in bfloat16 by 0, and packing
# by 0.035 (maximum 0.21), as another attention kernel does. For tiny models that can be packed, packing changes the
# median by at most 0.0025; for the others, by at least 0.017.
MEDIAN_BOUNDS, MAXIMUM_BOUNDS = (0.005, 0.2), (0.2, 1.0)
# Common words in their usual order, because half precision alone changes the log-probs of unlikely tokens by nats.
WORDS = "one two three four five six seven eight nine ten"

# Log-probs, entropies, and TRL's auxiliary loss.
Scores = tuple[Tensor, Tensor | None, Tensor | None]


def agree_to_register(models: list[Any], args: Any, hindrances: Mapping[str, Any]) -> bool:
    """Switch the policy and the reference model to packed attention. Return False if a model does not support it.

    ``hindrances``: reasons against packing, and whether each applies. All ranks call this, and agree.
    """
    rowwise = next(filter(None, map(rowwise_adapter, models)), None)
    device_maps = [getattr(_bare(model), "hf_device_map", None) or {} for model in models]
    hindrances = {
        **hindrances,
        "layers on several devices (device_map)": any(len(set(devices.values())) > 1 for devices in device_maps),
        f"an adapter whose effect depends on the whole row ({rowwise})": rowwise,
        "torch_compile, which would compile again for every packed row": args.torch_compile,
        "neftune_noise_alpha, whose noise depends on the length of a row": args.neftune_noise_alpha,
    }
    models = [_bare(model) for model in models]
    unsupported = {model: attention.unsupported(model.config, model._supports_sdpa) for model in models}
    refusals = [(models[0], reason) for reason, applies in hindrances.items() if applies]
    refusals += [(model, reason) for model, reason in unsupported.items() if reason]
    if reason := agree_on_first(next((_has(*one) for one in refusals), None)):
        switched_off("packing", reason)
        _unregister(models)
        return False
    for model in models:
        name = attention.register(model.config._attn_implementation)
        model.set_attn_implementation(name)
        # transformers only warns if a model has its own attention classes.
        if model.config._attn_implementation != name:
            switched_off("packing", _has(model, "its own attention, which transformers cannot replace"))
            return False
        recurrent.fork_states(model)
        if attention.only_scored not in model.base_model._forward_hooks.values():
            model.base_model.register_forward_hook(attention.only_scored, with_kwargs=True)
    return True


def _unregister(models: list[Any]) -> None:
    """Give models that are not packed any more their own attention."""
    for model in models:
        name = getattr(model.config, "_attn_implementation", None) or ""
        # Flash attention keeps its name. `packed_attention` calls the original if no groups are given.
        if name.startswith("packed_"):
            model.set_attn_implementation(name.removeprefix("packed_"))


def _bare(model: Any) -> Any:
    return model.get_base_model() if is_peft_model(model) else model


def _has(model: Any, reason: str) -> str:
    return f"{type(model).__name__} has {reason}"


def _rounds_float32(device: torch.device) -> bool:
    """Return True if torch multiplies float32 in fewer bits: in TF32, or in bfloat16 on a CPU.

    A recipe, a script or an image may have set that.
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee")


def _differences(
    scorer: "PackedScorer", score_unpacked: Callable[..., Scores], model: Any, tokenizer: Any, limit: float | None
) -> Any:
    """Yield how the scores of packed rows differ from those of TRL, or None, after each comparison.

    ``limit``: the largest difference, or None in half precision, whose rounding is measured.
    """
    exact = limit is not None
    config, length = scorer.bare(model).config.get_text_config(), 4 if exact else 32
    ids = _word_rows(tokenizer, length).to(scorer.accelerator.device) % config.vocab_size
    rows = PaddedRows(ids, torch.ones_like(ids), length)
    # `_original_forward` is the method that accelerate has wrapped in autocast.
    bare = {"forward": getattr(model, "_original_forward", model.forward)} if exact else {}
    with replaced(model, **bare), replaced(scorer.accelerator, **({"autocast": nullcontext} if exact else {})):
        try:
            packed = scorer(score_unpacked, model, rows)[0]
            yield None
        except Unpackable as error:
            yield str(error)
        unpacked = score_unpacked(model, *rows.arguments)[0]
        rounding = (
            torch.zeros_like(unpacked) if exact else unpacked - _score_with_other_rounding(score_unpacked, model, rows)
        )
        change = _change(packed - unpacked, rounding, limit)
        yield None if change is None else f"log-probs that change by {change:.2g} when packed"
        # A model's own code may compute a position differently if the pass contains a later one. Positions beyond the
        # model's own may be beyond a table, too.
        if last := scorer.longest or context_length(config):
            short = PaddedRows(rows.ids[:, :8], rows.mask[:, :8], 4)
            near = scorer(score_unpacked, model, short)[0]
            hook = model.register_forward_pre_hook(partial(_move_last_position, last - 1), with_kwargs=True)
            try:
                far = scorer(score_unpacked, model, short)[0]
            finally:
                hook.remove()
            # Without the last column, which the moved token predicts.
            change = _change((far - near)[:, :-1], rounding, limit)
            yield None if change is None else f"log-probs that change by {change:.2g}: {attention.LONGEST_ROW}"


def _move_last_position(position: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the last token of a packed row another position. A forward pre-hook."""
    kwargs["position_ids"][..., -1] = position


def _word_rows(tokenizer: Any, length: int) -> Tensor:
    """Return the ids of two rows with one prompt of 4 tokens, which packing shares, and different completions."""
    words = tokenizer(WORDS, add_special_tokens=False).input_ids
    # A tokenizer may lack the words.
    words = words if len(set(words)) > 8 else list(range(9))
    completions = [[words[(4 + i + shift) % len(words)] for i in range(length)] for shift in (0, 1)]
    return torch.tensor([words[:4] + completion for completion in completions])


def _score_with_other_rounding(score: Callable[..., Scores], model: Any, rows: PaddedRows) -> Tensor:
    """Return the same log-probs from passes of another width, with another attention kernel."""
    # On the right: TRL counts padding on the left as positions in some models.
    padding, length = rows.ids[:, :8], rows.completion_length
    with sdpa_kernel(SDPBackend.MATH):
        wide = score(model, torch.cat([rows.ids, padding], 1), torch.cat([rows.mask, padding * 0], 1), length + 8)[0]
    return wide[:, :length]


def _change(difference: Tensor, rounding: Tensor, limit: float | None) -> float | None:
    """Return the largest difference of log-probs (B, T) if rounding does not explain it, or None.

    The median of a row, because a few tokens of a mixture of experts may take other experts.

    >>> rounding = torch.full((2, 9), 0.01)
    >>> _change(rounding * 2, rounding, limit=None)
    >>> _change(torch.tensor([[0.0] * 9, [0.1] * 9]), rounding, limit=None)
    0.10000000149011612
    """
    largest = difference.abs().max().item()
    if limit is not None:
        return largest if largest > limit else None
    for statistic, (least, most) in ((_median, MEDIAN_BOUNDS), (torch.max, MAXIMUM_BOUNDS)):
        if statistic(difference.abs()) > min(max(3 * statistic(rounding.abs()).item(), least), most):
            return largest
    return None


def _median(values: Tensor) -> Tensor:
    return values.float().median(dim=1).values.max()


def _check_calls(calls: Counter[str], config: Any) -> None:
    """Raise `Unpackable` if a layer of a model ignored that its row is packed.

    >>> from types import SimpleNamespace as Config
    >>> kinds = Config(layer_types=["full_attention", "hybrid", "conv", "mlp"])
    >>> _check_calls(Counter(attention=2, states=2), kinds)
    >>> _check_calls(Counter(attention=3), Config(num_hidden_layers=3))
    >>> for calls in ({"attention": 1, "states": 2}, {"attention": 2, "states": 3}):
    ...     try:
    ...         _check_calls(Counter(calls), kinds)
    ...     except Unpackable as error:
    ...         print(error)
    2 layers and 1 calls of packed attention
    2 layers with a state, of which 3 continue a prompt's state
    """
    # In a model without ``layer_types`` every layer has attention.
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * getattr(config, "num_hidden_layers", 0)
    attending = sum(kind in attention.ATTENDING for kind in kinds)
    stateful = sum(kind in attention.STATEFUL for kind in kinds)
    if calls["attention"] != attending:
        raise Unpackable(f"{attending} layers and {calls['attention']} calls of packed attention")
    if calls["states"] != stateful:
        raise Unpackable(f"{stateful} layers with a state, of which {calls['states']} continue a prompt's state")


class PackedScorer:
    """Scores rows packed.

    Raises `Unpackable` if the model did not run packed. `agree_to_pack` finds out before an update is split.
    """

    def __init__(self, accelerator: Any, budget: TokenBudget, models: list[Any]) -> None:
        self.accelerator = accelerator
        self.budget = budget
        self.models = [_bare(model) for model in models]
        # The padded width from which rows are scored as TRL does, or None.
        self.longest = min(filter(None, (longest_width(model.config) for model in self.models)), default=None)

    def bare(self, model: Any) -> Any:
        """Return the transformers model of a model that peft or accelerate may have wrapped."""
        return _bare(self.accelerator.unwrap_model(model))

    def agree_on_width(self, width: int) -> bool:
        """Return True if TRL's padded rows are narrow enough to be packed, on all ranks."""
        return self.longest is None or agree_on_all(width < self.longest)

    def agree_to_pack(self, score_unpacked: Callable[..., Scores], models: list[Any], tokenizer: Any) -> bool:
        """Compare each model's scores of two short rows of words with those of TRL's ``score_unpacked``.

        Return False if they differ: a model cannot be packed, or computes its own positions. The models then have
        their own attention again. If the scores differ on one rank, no rank packs. All ranks call this, before an
        update is split for packing.
        """
        for model in models:
            if reason := self._agree_on_difference(score_unpacked, model, tokenizer):
                _unregister(self.models)
                switched_off("packing", _has(self.bare(model), reason))
                return False
        return True

    def _agree_on_difference(self, score_unpacked: Callable[..., Scores], model: Any, tokenizer: Any) -> str | None:
        """Return how a model's packed scores differ from those of ``score_unpacked``, or None. All ranks call this."""
        training, bare = model.training, self.bare(model)
        # Flash attention takes no float32. FSDP casts weights without autocast.
        exact = (
            bare.dtype == torch.float32
            and not _rounds_float32(self.accelerator.device)
            and not split_by(self.accelerator)
            and "flash" not in bare.config._attn_implementation
        )
        # Dropout would make the two scores differ.
        model.eval()
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        # A rank that stops at a difference would leave the others waiting in their next pass: after each, all ranks
        # agree. A script's code may draw random numbers.
        with (
            torch.random.fork_rng(devices),
            torch.no_grad(),
            closing(_differences(self, score_unpacked, model, tokenizer, MAX_DIFF if exact else None)) as differences,
        ):
            reason = next(filter(None, map(agree_on_first, differences)), None)
        model.train(training)
        return reason

    def __call__(
        self,
        score_unpacked: Callable[..., Scores],
        model: Any,
        rows: PaddedRows,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **kwargs: Any,
    ) -> Scores:
        """Return log-probs (B, T), and entropies if ``compute_entropy``, 0 at padding; and TRL's auxiliary loss.

        ``score_unpacked``: TRL's ``_get_per_token_logps_and_entropies``. The other arguments are those of that method.
        """
        options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        score_unpacked = partial(score_unpacked, model, **options, **kwargs)
        is_one_batch, width = torch.is_grad_enabled() or compute_aux_loss, rows.ids.size(1)
        # Ranks agree on their batches below, so all of them must take the same path.
        is_narrow = width < (self.longest or math.inf) if is_one_batch else self.agree_on_width(width)
        # The rows of an update are one micro-batch already. Other rows may fit one batch, too. An auxiliary loss is a
        # mean over all rows.
        batches = self._agree_on_batches(rows, batch_size) if is_narrow and not is_one_batch else []
        if not is_narrow:
            switched_off("packing", f"rows of {self.longest} or more tokens have {attention.LONGEST_ROW}")
        if not is_narrow or batches is None:
            return score_unpacked(*rows.arguments, batch_size=batch_size)
        if len(batches) < 2:
            return self._score(score_unpacked, model, rows, **options)
        # `_score` returns float32, also if a script has set another default dtype.
        logps = torch.zeros(len(rows.ids), rows.completion_length, dtype=torch.float32, device=rows.ids.device)
        entropies = torch.zeros_like(logps) if compute_entropy else None
        for index in batches:
            at = torch.tensor(index).to(rows.ids.device, non_blocking=True)
            logps[at], batch_entropies, _ = self._score(score_unpacked, model, rows.take(at), **options)
            if entropies is not None and batch_entropies is not None:
                entropies[at] = batch_entropies
        return logps, entropies, None

    def _score(
        self,
        score_unpacked: Callable[..., Scores],
        model: Any,
        rows: PaddedRows,
        compute_entropy: bool,
        compute_aux_loss: bool,
    ) -> Scores:
        """Score these rows in one forward pass. ``score_unpacked`` has its model and these options already."""
        row, device = pack(rows, every_token=compute_aux_loss), rows.ids.device
        # With a hole in a mask, or without a token to score. The forward pass is still needed: other ranks may wait in
        # it. A single row is packed even if that saves no token, because a packed row needs no attention mask.
        if row is None or (len(rows.ids) > 1 and row.input_ids.numel() > WORTH_PACKING * rows.ids.numel()):
            scores = score_unpacked(*rows.arguments)
            return scores[0].float(), *scores[1:]
        # A layer may drop the argument ``packed_groups``, so each packed layer counts its call here.
        calls = Counter[str]()
        # transformers does not change a mask of four dimensions, and packed attention ignores it.
        if compute_aux_loss:
            # TRL weights the tokens of the auxiliary loss by this mask.
            counts = torch.tensor([n for group in row.groups for n in group.multiplicity()], dtype=torch.float32)
            weights = counts[None, None, None].to(device, non_blocking=True)
            model_kwargs = {"output_router_logits": True, "attention_mask": weights}
        else:
            model_kwargs = {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)}
        with self.accelerator.autocast():
            outputs = model(
                input_ids=row.input_ids,
                position_ids=row.position_ids,
                # TRL's head would shift ``labels`` by one, across the ends of the segments.
                shift_labels=row.shift_labels,
                fused_lm_head=True,
                packed_groups=row.groups,
                packed_calls=calls,
                scored_index=row.scored_index,
                **model_kwargs,
            )
        _check_calls(calls, self.bare(model).config.get_text_config())
        return (
            unpack(outputs.log_probs, row).float(),
            unpack(outputs.entropy, row).float() if compute_entropy else None,
            outputs.aux_loss if compute_aux_loss else None,
        )

    def _agree_on_batches(self, rows: PaddedRows, batch_size: int | None) -> list[list[int]] | None:
        """Return the rows of each forward pass without a gradient, each of at most the token budget.

        None if a mask of any rank has a hole.
        """
        prompts, prompt_tokens, tokens, has_holes = layout(rows)
        if not agree_on_all(not has_holes):
            return None
        # Without any token there is one batch, which may be repeated. A repeated batch gives the same scores.
        budget = self.budget.tokens or (batch_size or len(tokens)) * rows.ids.size(1)
        batches = plan_micro_batches(prompts, prompt_tokens, tokens, budget)[0] or [[0]]
        # Under ZeRO-3 and FSDP a forward pass is a collective: every rank needs the same number of them.
        passes = agree_on_largest(len(batches))
        return batches + batches[-1:] * (passes - len(batches))
