"""Dry run: compute the largest micro-batch that can occur in a run, before its first step.

A run whose longest completions come at step 120 would fail there, after hours, if memory is short by a little. The same
number of tokens at the start, computed forward and backward and discarded, shows it at once.

planner/ estimates the memory.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_math.algorithm.rows import Rows
from grpo_math.errors import ConfigError
from grpo_math.packing.micro_batches import TokenBudget
from grpo_math.packing.row_plan import largest_micro_batch
from grpo_math.rewards.inputs import column_names
from grpo_math.run.weights import split_by
from grpo_math.system.replaced import replaced

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer


def largest_rows(prompt: list[int], lengths: list[int], group: int, eos: int, device: torch.device) -> Rows:
    """Return a row for each of ``lengths``, the completions' tokens, the longest first; ``group`` rows share a prompt.

    ``num_items_in_batch`` is the number of the completions' tokens.

    >>> rows = largest_rows([5, 6], [4, 4, 3], 2, eos=9, device=torch.device("cpu"))
    >>> rows["prompt_ids"].tolist(), rows["completion_mask"].sum(dim=1).tolist(), rows["num_items_in_batch"].item()
    ([[0, 6], [0, 6], [1, 6]], [4, 4, 3], 11)
    """
    number = torch.arange(len(lengths), device=device)
    prompts = torch.tensor(prompt, device=device).repeat(len(lengths), 1)
    # Groups differ in the first token of their prompts: rows with the same prompt would be packed as one group.
    prompts[:, 0] = number // group
    tokens = torch.tensor(lengths, device=device)
    mask = (torch.arange(lengths[0], device=device) < tokens[:, None]).long()
    zeros = torch.zeros(mask.shape, device=device)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.full_like(mask, eos),
        "completion_mask": mask,
        "advantages": torch.ones(len(lengths), device=device),
        "prompt_weight": torch.ones(len(lengths), device=device),
        "num_items_in_batch": tokens.sum(),
        "old_per_token_logps": zeros,
        "ref_per_token_logps": zeros,
        "importance_sampling_ratio": zeros + 1.0,
    }


def dry_run_enabled(args: Any, accelerator: Any) -> bool:
    """Return True on a GPU, or if the recipe turns the dry run on."""
    # Reentrant checkpointing refuses `torch.autograd.grad`, which the dry run needs.
    reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if split_by(accelerator) or reentrant:
        if args.longest_first:
            raise ConfigError(
                "longest_first",
                True,
                "does not work with FSDP and ZeRO-3, which split the model, nor with use_reentrant",
                "leave it out",
            )
        return False
    return accelerator.device.type == "cuda" if args.longest_first is None else args.longest_first


def dry_run(
    trainer: "TrlTrainer",
    loss_of: Callable[[Any, Rows], Tensor],
    budget: TokenBudget,
    model: Any,
    step_rows: Sequence[dict[str, Any]] = (),
    splits: bool = True,
) -> None:
    """Compute the largest micro-batch that can occur, forward and backward, and discard it. Halve it until it fits.

    ``loss_of`` changes no attribute of the trainer. ``step_rows`` are the rows of the first step. ``splits``: an update
    can be split. Nothing of the dry run remains, except a smaller token budget. The model is unwrapped, and
    `torch.autograd.grad` accumulates nothing: no hook of DDP or DeepSpeed runs.
    """
    with ExitStack() as stack:
        for module in trainer.accelerator.unwrap_model(model).modules():
            # A dynamic RoPE changes its frequencies, and stores the length of the longest row.
            # Quantized weights may be buffers, too. They do not change, and are large.
            copies = {
                name: value.clone()
                for name, value in module._buffers.items()
                if value is not None and value.is_floating_point()
            }
            numbers = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, Tensor))}
            stack.enter_context(replaced(module, **numbers, _buffers={**module._buffers, **copies}))
        _try_largest_batch(trainer, loss_of, budget, model, longest_prompt(trainer, step_rows), splits)


def _try_largest_batch(
    trainer: "TrlTrainer",
    loss_of: Callable[[Any, Rows], Tensor],
    budget: TokenBudget,
    model: Any,
    prompt: list[int],
    splits: bool,
) -> None:
    args = trainer.args
    length, rows = trainer.max_completion_length, args.per_device_train_batch_size
    # An update that cannot be split has TRL's micro-batches.
    in_step = rows * args.gradient_accumulation_steps if splits else rows
    # TRL shuffles rows: in an update that is not split, each row may have another prompt.
    group = trainer.num_generations if splits else 1
    limit = budget.tokens or rows * (len(prompt) + length)
    device, model = trainer.accelerator.device, trainer.accelerator.unwrap_model(model)
    # transformers checkpoints activations in training mode only.
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    while True:
        loss: Tensor | None = None
        full, last = largest_micro_batch(limit, len(prompt), length, group, in_step) if splits else (in_step, 0)
        lengths = [length] * full + [last] * bool(last)
        try:
            # Dropout must not use the run's random numbers: the run must end with the same weights without a dry run.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                with trainer.compute_loss_context_manager():
                    loss = loss_of(model, largest_rows(prompt, lengths, group, trainer.eos_token_ids[0], device))
                # Without ``allow_unused``, autograd raises for a parameter that the loss does not depend on.
                torch.autograd.grad(loss, trained, allow_unused=True)
            return
        except torch.OutOfMemoryError as error:
            # Keep only the text, and halve outside of the handler: the traceback keeps the activations alive.
            reason = str(error)
        loss = None  # the graph of the loss keeps the activations alive, too
        tokens = sum(lengths) + -(-len(lengths) // group) * (len(prompt) - 1)
        limit = budget.halve(tokens if len(lengths) > 1 else 0, tokens, reason, splits)


def longest_prompt(trainer: "TrlTrainer", step_rows: Sequence[dict[str, Any]] = ()) -> list[int]:
    """Return the token ids of the prompt with the most characters, of the first 100,000, with its environment's tools.

    A stream, and the function of ``with_transform``, may be read only once: then the prompt is one of ``step_rows``.
    The text that an environment adds at the start of a rollout is not known yet.
    """
    data = trainer.train_dataset
    is_readable = hasattr(data, "__len__") and column_names(data) is not None
    # Row by row, because a large data set with all its columns may be larger than the memory.
    rows = islice(data, 100_000) if is_readable else step_rows
    # Without this column an environment makes the prompts, and TRL starts with this message.
    start = [{"role": "user", "content": ""}]
    longest: Any = max(rows, key=lambda row: len(str(row.get("prompt", start))))
    environment = longest["environment"] if trainer._multi_environment else None
    with replaced(trainer, _batch_environments=[environment]):
        return trainer._tokenize_prompts([longest.get("prompt", start)])[0][0]
