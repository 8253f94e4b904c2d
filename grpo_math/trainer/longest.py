"""The largest micro-batch that a run can meet, as rows made up for a trial before the first step.

A run whose longest completions come at step 120 dies there, hours in, if memory is short by a little. The same rows at
the start, computed forward and backward and thrown away, say it at once.

Does not count memory: planner/ does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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


def is_tried(asked: bool | None, accelerator: Any) -> bool:
    """Whether it is: on a GPU, or where it was asked for."""
    if split_by(accelerator):
        if asked:
            reason = "needs the whole model on each process, and FSDP and ZeRO-3 split it"
            raise ConfigError("longest_first", True, reason, "leave it out")
        return False
    return accelerator.device.type == "cuda" if asked is None else asked


def try_longest(trainer: Any, model: Any) -> None:
    """The largest micro-batch that can come, forward and backward, and all of it thrown away; halved until it fits.

    On the bare model, with gradients that are asked for and not accumulated: neither DDP nor DeepSpeed hears of it.
    """
    args, cuts, prompt = trainer.settings, trainer.budget.cuts, longest_prompt(trainer)
    length, limit, rows = trainer.max_completion_length, args.max_seq_length_train, args.per_device_train_batch_size
    in_step = rows * args.gradient_accumulation_steps if cuts and trainer.loss_type != "bnpo" else rows
    group = trainer.num_generations if cuts else 1  # TRL shuffles: each row may have another prompt
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
        full, last = fill(budget, len(prompt), length, group, in_step) if cuts else (in_step, 0)
        lengths = [length] * full + [last] * bool(last)
        try:
            random = torch.random.fork_rng([device] if device.type == "cuda" else [])
            with random, trainer.meter.only_seconds(), _not_reentrant(model, args):
                with trainer.compute_loss_context_manager():
                    made_up = longest_rows(prompt, lengths, group, trainer.eos_token_ids[0], device)
                    loss = trainer._loss_of(model, made_up)
                torch.autograd.grad(loss, trained, allow_unused=True)
        except torch.OutOfMemoryError as error:
            reason = str(error)  # halved outside of the handler, whose traceback holds the activations
        loss = None  # whose graph holds them, too
        if trainer.budget.cuts != cuts:  # since the first packed pass has shown that this model cannot be packed
            try_longest(trainer, model)
            return
        if reason is None:
            return
        tokens = sum(lengths) + -(-len(lengths) // group) * (len(prompt) - 1)
        budget = trainer.budget.halve(tokens if len(lengths) > 1 else 0, tokens, reason)


@contextmanager
def _not_reentrant(model: Any, args: Any) -> Iterator[None]:
    """Checkpointing of the other kind, which keeps as much: gradients that are asked for cannot be had of this one."""
    asked = args.gradient_checkpointing_kwargs or {}
    if not (args.gradient_checkpointing and asked.get("use_reentrant")):
        yield
        return
    model.gradient_checkpointing_enable({**asked, "use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_enable(asked)


def longest_prompt(trainer: Any) -> list[int]:
    """The token ids of the prompt with the most characters, of the first 100,000.

    With environments, of each the longest with its tools, and of these the one with the most tokens. What they say at
    the start of a rollout is not known here, nor is a prompt that they give alone.
    """
    rows = trainer.train_dataset
    columns = (
        rows[:100_000] if hasattr(rows, "__len__") else {name: [value] for name, value in next(iter(rows)).items()}
    )
    if trainer.environment_factories is None:
        prompts, names = columns["prompt"], [None] * len(columns["prompt"])
    else:
        n = len(next(iter(columns.values())))
        prompts = columns.get("prompt", [[{"role": "user", "content": ""}]] * n)
        names = columns["environment"] if trainer._multi_environment else [None] * n
    longest: dict[str | None, Any] = {}
    for name, prompt in zip(names, prompts, strict=True):  # text or messages
        longest[name] = max(longest.get(name, ""), prompt, key=lambda prompt: len(str(prompt)))
    tokenized = []
    for name, prompt in longest.items():
        trainer._batch_environments = [name]
        tokenized.append(trainer._tokenize_prompts([prompt])[0][0])
    return max(tokenized, key=len)
