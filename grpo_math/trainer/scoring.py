"""Log-probs and entropies (B, T) as TRL's method gives them, from packed rows.

Rows go in padded and come out padded (`packing.py`); in between, each prompt is computed once and no padding is.

Does not hold a token budget of its own: `budget.TokenBudget` is shared with the update.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor

from grpo_math.errors import ConfigError
from grpo_math.run.weights import split_by
from grpo_math.trainer import attention, recurrent
from grpo_math.trainer.arrange import arrange
from grpo_math.trainer.budget import TokenBudget
from grpo_math.trainer.packing import Unpackable, layout, pack, unpack

logger = get_logger(__name__)

WORTH_PACKING = 0.97  # several rows that pack to more of the padded tokens than this are scored as TRL does
APART, APART_HALF = 1e-3, 1.0  # of a log-prob, by rounding: in float32; in half precision or TF32
TRIED = "one two three four five six seven eight nine ten"  # words: of odd tokens half precision is nats off by itself

Scores = tuple[Tensor, Tensor | None, Tensor | None]  # log-probs, entropies, and TRL's auxiliary loss


def set_up(trainer: Any, models: list[Any]) -> bool:
    """Switch the policy, and the reference where there is one, to the packed attention; False where one has none."""
    batching = trainer.use_transformers_continuous_batching
    adapters = [adapter for model in models if is_peft_model(model) for adapter in model.peft_config.values()]
    device_maps = [getattr(_bare(model), "hf_device_map", None) or {} for model in models]
    hindrances = {
        "layers on several devices (device_map)": any(len(set(devices.values())) > 1 for devices in device_maps),
        "an image processor": trainer._is_vlm,
        "a prompt-learning adapter": any(adapter.is_prompt_learning for adapter in adapters),
        "continuous batching to generate with, which has no packed attention": batching,
        "torch_compile, which would compile anew for every packed row": trainer.args.torch_compile,
    }
    models = [_bare(model) for model in models]
    reasons = [reason for reason, applies in hindrances.items() if applies]
    reasons += filter(None, (attention.unsupported(model.config, model._supports_sdpa) for model in models))
    if reason := of_any_rank(next(iter(reasons), None)):
        _say_unpacked(models[0], reason)
        return False
    for model in models:
        name = attention.register(model.config._attn_implementation)
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            _say_unpacked(model, "attention of its own, which transformers cannot replace")
            return False
        recurrent.fork_states(model)
        model.base_model.register_forward_hook(attention.only_scored, with_kwargs=True)
    if trainer.aux_loss_enabled:  # its mean takes a prompt as often as it has completions
        _say_unpacked(models[0], "an auxiliary loss of its router (router_aux_loss_coef: 0 leaves it out)", "updates")
    return True


def _put(values: Tensor, at: Tensor | slice, rows: Tensor) -> Tensor:
    rows = rows.to(values.dtype)
    return rows if isinstance(at, slice) else values.index_put((at,), rows)


def _bare(model: Any) -> Any:
    return model.get_base_model() if is_peft_model(model) else model


def _say_unpacked(model: Any, reason: object, subject: str = "rows") -> None:
    logger.warning(f"pack_updates: {type(model).__name__} has {reason}; {subject} are scored unpacked.")


def try_out(trainer: Any, model: Any) -> None:
    """Score two short rows of words packed and as TRL does. A model that cannot be packed, or takes its positions from
    elsewhere, shows it before anything is cut for packing; if it does on one rank, no rank packs. If weights are split
    over ranks (ZeRO-3, FSDP), the rows are scored packed alone."""
    vocabulary = _bare(trainer.model).config.get_text_config().vocab_size  # split weights (ZeRO-3) have no size
    words = [*trainer._tokenizer(TRIED, add_special_tokens=False).input_ids, *range(9)]  # one may know no words
    ids = torch.tensor([words[:8], words[:4] + words[5:9]], device=trainer.accelerator.device)
    rows = (trainer.model, ids % vocabulary, torch.ones_like(ids), 4)
    if (scorer := trainer.scorer) is None:
        return
    trainer.scorer = None
    score, training, reason = trainer._scores, model.training, None
    model.eval()
    with torch.no_grad():
        try:
            packed = scorer(score, *rows, None, False)[0]
        except Unpackable as error:
            reason = str(error)
        if not split_by(trainer.accelerator):
            plain = score(*rows)[0]
            half = trainer.accelerator.mixed_precision != "no" or trainer.model.dtype != torch.float32
            limit = APART_HALF if half or trainer.args.tf32 else APART
            if reason is None and (apart := (packed - plain).abs().max().item()) > limit:
                reason = f"log-probs that packing puts {apart:.2g} off"
    model.train(training)
    if reason := of_any_rank(reason):
        scorer.leave(reason)
    else:
        trainer.scorer = scorer


def of_any_rank(reason: str | None) -> str | None:
    """Return a reason that one of the ranks has, on every rank. A rank that decides alone leaves the others waiting in
    a collective."""
    return next(filter(None, gather_object([reason])), None)


def next_to_rows(score: Callable[..., Scores]) -> Callable[..., Scores]:
    """TRL's method, with scores on the device of the rows: a head on another GPU (device_map) leaves its own there."""

    def scores(model: Any, input_ids: Tensor, *arguments: Any, **kwargs: Any) -> Scores:
        logps, entropies, loss = score(model, input_ids, *arguments, **kwargs)
        entropies, loss = (value if value is None else value.to(input_ids.device) for value in (entropies, loss))
        return logps.to(input_ids.device), entropies, loss

    return scores


class PackedScorer:
    """Called as TRL's ``_get_per_token_logps_and_entropies`` is, with that method, ``plain``, before the rest.

    Raises `Unpackable` if the model did not run packed. Call `leave_alone` afterwards; do not call this again.
    """

    def __init__(self, accelerator: Any, budget: TokenBudget, models: list[Any]) -> None:
        self.accelerator, self.budget, self.models = accelerator, budget, [_bare(model) for model in models]
        self.said: set[str] = set()
        config = self.models[0].config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * getattr(config, "num_hidden_layers", 0)
        self.attending = sum(kind in attention.ATTENDING for kind in kinds)
        self.stateful = sum(kind in attention.STATEFUL for kind in kinds)

    def leave(self, reason: object) -> None:
        """Rows are scored, and updates cut, as without packing."""
        self.budget.splits = False
        for model in self.models:
            model.set_attn_implementation(model.config._attn_implementation.removeprefix("packed_"))
        _say_unpacked(self.models[0], reason)

    def leave_alone(self, reason: object) -> None:
        """Leave, after the other ranks have agreed to pack: they would wait for a process that computes other passes.

        Raises `ConfigError` if there are other ranks.
        """
        if self.accelerator.num_processes > 1:
            raise ConfigError("pack_updates", True, f"does not work on every rank ({reason})", "set it to false")
        self.leave(reason)

    def __call__(
        self,
        plain: Callable[..., Scores],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        **kwargs: Any,
    ) -> Scores:
        """0 where there is padding."""
        logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        entropies = torch.zeros_like(logps)
        for index in self._batches(input_ids, attention_mask, logits_to_keep, batch_size):
            is_all = index == list(range(len(input_ids)))  # as in an update: nothing to select, nor to put back
            at = slice(None) if is_all else torch.tensor(index).to(input_ids.device, non_blocking=True)
            ids, mask = input_ids[at], attention_mask[at]
            row = pack(ids, mask, logits_to_keep)
            # Not one token to score, while other ranks may wait for this forward pass; or next to none to save. A row
            # by itself is packed in any case, since then it needs no mask.
            if row is None or (len(ids) > 1 and row.input_ids.numel() > WORTH_PACKING * ids.numel()):
                scores = plain(model, ids, mask, logits_to_keep, compute_entropy=compute_entropy, **kwargs)
                row_scores: Any = scores[:2]
            else:
                called = attention.calls, recurrent.calls
                with self.accelerator.autocast():
                    outputs = model(
                        input_ids=row.input_ids,
                        position_ids=row.position_ids,
                        # A mask in four dimensions is taken as it is: transformers builds none, and ours needs none.
                        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
                        shift_labels=row.shift_labels,
                        fused_lm_head=True,
                        packed_groups=row.groups,
                        scored_index=row.scored_index,
                    )
                self._count(attention.calls - called[0], recurrent.calls - called[1])
                self._say_new_ways()
                row_scores = unpack(outputs.log_probs, row), compute_entropy and unpack(outputs.entropy, row)
            logps = _put(logps, at, row_scores[0])
            if compute_entropy:
                entropies = _put(entropies, at, row_scores[1])
        return logps, entropies if compute_entropy else None, None

    def _count(self, attended: int, states: int) -> None:
        """Raise `Unpackable` where a layer has not seen that its row is packed."""
        if attended != self.attending:
            raise Unpackable(f"{self.attending} layers and {attended} calls of packed attention")
        if states != self.stateful:
            raise Unpackable(f"{self.stateful} layers with a state, of which {states} go on from a prompt's")

    def _say_new_ways(self) -> None:
        """Once each: a long prompt may be the first to need another."""
        for way in sorted(attention.ways - self.said):
            logger.info(f"Packed attention on {self.accelerator.device.type}: {way}.")
        self.said |= attention.ways

    def _batches(
        self, input_ids: Tensor, attention_mask: Tensor, completion_length: int, batch_size: int | None
    ) -> list[list[int]]:
        """The rows of each forward pass. A part of the update is one; other rows are filled to the token budget, in as
        many passes on every rank."""
        if torch.is_grad_enabled():
            return [list(range(len(input_ids)))]
        prompts, prompt_tokens, tokens = layout(input_ids, attention_mask, completion_length)
        budget = self.budget.tokens or (batch_size or len(tokens)) * input_ids.size(1)
        batches = arrange(prompts, prompt_tokens, tokens, budget)[0] or [[0]]
        # Under ZeRO-3 and FSDP a forward pass is a collective: every rank makes as many.
        passes = int(self.accelerator.gather(torch.tensor([len(batches)], device=input_ids.device)).max())
        return batches + batches[-1:] * (passes - len(batches))
