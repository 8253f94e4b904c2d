"""The largest micro-batch that a run can meet, as rows made up for a trial before the first step.

A run whose longest completions come at step 120 dies there, hours in, if memory is short by a little. The same rows at
the start, computed forward and backward and thrown away, say it at once.

Does not count memory: planner/ does.
"""

from typing import Any

import torch

from grpo_math.errors import ConfigError
from grpo_math.run.weights import split_by
from grpo_math.trainer.arrange import fill
from grpo_math.trainer.rows import Rows


def longest_rows(prompt: list[int], lengths: list[int], group: int, eos: int, device: torch.device) -> Rows:
    """A row for each of ``lengths``, the longest first: the tokens of a completion. A prompt serves ``group`` of them.

    Prompts differ in their first token, so that packing does not take two groups for one. ``num_items_in_batch`` is the
    number of the completions' tokens.

    >>> rows = longest_rows([5, 6], [4, 4, 3], 2, eos=9, device=torch.device("cpu"))
    >>> rows["prompt_ids"].tolist(), rows["completion_mask"].sum(dim=1).tolist(), rows["num_items_in_batch"].item()
    ([[0, 6], [0, 6], [1, 6]], [4, 4, 3], 11)
    """
    number = torch.arange(len(lengths), device=device)
    prompts = torch.tensor(prompt, device=device).repeat(len(lengths), 1)
    # Prompts that differ: rows with the same prompt would be packed as one group.
    prompts[:, 0] = number // group
    tokens = torch.tensor(lengths, device=device)
    mask = (torch.arange(lengths[0], device=device) < tokens[:, None]).long()
    zeros = torch.zeros(mask.shape, device=device)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.full_like(mask, eos),
        "completion_mask": mask,
        "advantages": 1.0 - 2.0 * (number % 2),
        "num_items_in_batch": tokens.sum(),
        "old_per_token_logps": zeros,
        "ref_per_token_logps": zeros,
        "importance_sampling_ratio": zeros + 1.0,
    }


def is_tried(args: Any, accelerator: Any) -> bool:
    """Return True on a GPU, or if the recipe asks for it."""
    # Asking autograd for gradients, without adding them up, is what reentrant checkpointing refuses.
    reason = "FSDP and ZeRO-3 split the model among processes" if split_by(accelerator) else None
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        reason = "use_reentrant does not give single gradients"
    if reason and args.longest_first:
        raise ConfigError("longest_first", True, f"does not work here: {reason}", "leave it out")
    if reason:
        return False
    return accelerator.device.type == "cuda" if args.longest_first is None else args.longest_first


def try_longest(trainer: Any, model: Any) -> None:
    """The largest micro-batch that can come, forward and backward, and all of it thrown away; halved until it fits.

    On the bare model, with gradients that are asked for and not accumulated: neither DDP nor DeepSpeed hears of it.
    """
    args, splits, prompt = trainer.settings, trainer.budget.splits, longest_prompt(trainer)
    length, limit, rows = trainer.max_completion_length, args.max_seq_length_train, args.per_device_train_batch_size
    # bnpo keeps TRL's micro-batch together, and so does an update that cannot be split.
    in_step = rows * args.gradient_accumulation_steps if splits and trainer.loss_type != "bnpo" else rows
    group = trainer.num_generations if splits else 1  # TRL shuffles: each row may have another prompt
    if limit:  # a short prompt leaves its completion more room, and the budget follows the longest of both
        length = max(1, min(length, limit - 1))
    budget = trainer.budget.tokens or rows * (len(prompt) + length)
    if limit:
        prompt = prompt[: max(1, limit - length)]
    device, model = trainer.accelerator.device, trainer.accelerator.unwrap_model(model)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    while True:
        reason: str | None = None
        full, last = fill(budget, len(prompt), length, group, in_step) if splits else (in_step, 0)
        lengths = [length] * full + [last] * bool(last)
        try:
            # A dropout must not draw from the generators of the run: the run has to end the same without the trial.
            random = torch.random.fork_rng([device] if device.type == "cuda" else [])
            with random, trainer.meter.only_seconds():
                with trainer.compute_loss_context_manager():
                    made_up = longest_rows(prompt, lengths, group, trainer.eos_token_ids[0], device)
                    loss = trainer._loss_of(model, made_up)
                torch.autograd.grad(loss, trained, allow_unused=True)
        except torch.OutOfMemoryError as error:
            reason = str(error)  # halved outside of the handler, whose traceback holds the activations
        loss = None  # whose graph holds them, too
        if trainer.budget.splits != splits:  # since the first packed pass has shown that this model cannot be packed
            try_longest(trainer, model)
            return
        if reason is None:
            return
        tokens = sum(lengths) + -(-len(lengths) // group) * (len(prompt) - 1)
        budget = trainer.budget.halve(tokens if len(lengths) > 1 else 0, tokens, reason)


def longest_prompt(trainer: Any) -> list[int]:
    """The token ids of the prompt with the most characters, of the first 100,000, with the tools of its environment.

    What an environment adds at the start of a rollout is not known here.
    """
    data = trainer.train_dataset
    first = next(iter(data))
    columns = data[:100_000] if hasattr(data, "__len__") else {name: [value] for name, value in first.items()}
    prompts = columns.get("prompt", [[{"role": "user", "content": ""}]])  # without, an environment gives them
    row = max(range(len(prompts)), key=lambda row: len(str(prompts[row])))
    trainer._batch_environments = [columns["environment"][row] if trainer._multi_environment else None]
    return trainer._tokenize_prompts([prompts[row]])[0][0]
