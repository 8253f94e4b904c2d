"""TRL's trainer and ours on one tiny model, from one seed, in float32: trained, scored, and compared.

`grpo-math selftest` and the tests share this harness. Dropout is off. The optimizer is SGD, whose step is as long as
the gradient: Adam would turn rounding at a zero gradient into a full step.
"""

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from grpo_math.algorithm.correction import log_ratios, sampler_ratio
from grpo_math.checks.tiny_model import CHARACTERS
from grpo_math.errors import UserError
from grpo_math.run import metrics
from grpo_math.system.replaced import replaced
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

PROMPTS = ["3 + 4?", "Hello", "What is 12 + 5?", "x"]  # of different lengths
ROWS = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
STEPS = {"max_steps": 3, "logging_steps": 1}
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
BASE: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 5,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 0.05,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
# Trainers that end with the same weights: arguments of `make`.
KINDS: dict[str, dict[str, Any]] = {
    "trl": {"trainer_class": GRPOTrainer, "config_class": GRPOConfig},
    "ours": {"trainer_class": MathGRPOTrainer, "config_class": MathGRPOConfig},
}
OF_TRAINER = ("peft_config", "eval_dataset", "tools", "rollout_func", "environment_factory")
# Metrics that both trainers log.
METRICS = {
    *("loss", "grad_norm", "entropy_coef", "reward", "reward_std", "frac_reward_zero_std"),
    *("completions/mean_length", "eval_loss"),
}
MEASURED = re.compile(r"seconds/|memory/|.*(step_time|runtime|per_second)$")
# TRL logs means over the rows of its micro-batches. An update may have others, or skip rows.
OF_MICRO_BATCHES = {
    *(metrics.KL, metrics.ENTROPY, metrics.CLIP_LOW, metrics.CLIP_HIGH, metrics.CLIP_REGION),
    *(metrics.CLIP_LOWEST, metrics.CLIP_HIGHEST, metrics.CISPO_CLIPPED, metrics.VESPO_WEIGHT),
}


class Run(NamedTuple):
    """The weights of a trainer before and after its training, and its log."""

    before: Tensor
    after: Tensor
    log: list[dict[str, Any]]


class Sampled(NamedTuple):
    """A rollout of TRL's trainer: its prompts and completions, and the state of the CPU's random numbers afterwards."""

    prompts: Any
    completions: Any
    state: Tensor


def letters(completions: list[Any], **columns: Any) -> list[float]:
    """Return rewards that vary within a group and need no gold answer."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def some_lengths(completions: list[Any], **columns: Any) -> list[float | None]:
    """Return the lengths of most completions: another reward, which cannot grade every completion."""
    ungraded = {1: None, 2: math.nan}
    return [ungraded.get(len(str(completion)) % 5, float(len(str(completion)))) for completion in completions]


def rollout_with_tools(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Return completions with tokens of a tool, which are masked (a `rollout_func`)."""
    drawn = torch.Generator().manual_seed(100 * trainer.state.global_step + trainer.accelerator.process_index)
    masks = [[1, 1, *[0] * n, 1] for n in torch.randint(0, 7, (len(prompts),), generator=drawn).tolist()]
    completions = [torch.randint(5, len(CHARACTERS), (len(mask),), generator=drawn).tolist() for mask in masks]
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "env_mask": masks, "logprobs": None}


def rollout_of_answers(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Return right and wrong answers (a `rollout_func`), which random weights do not give."""
    drawn = torch.Generator().manual_seed(trainer.state.global_step)
    texts = [f"#### {number}" for number in torch.randint(7, 9, (len(prompts),), generator=drawn).tolist()]
    prompt_ids, completion_ids = (trainer.processing_class(rows)["input_ids"] for rows in (prompts, texts))
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def right_answers(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == f"#### {number}") for text, number in zip(completions, answer, strict=True)]


def config(kind: type, folder: Any, **settings: Any) -> Any:
    return kind(str(folder), **{**BASE, **settings})


def make(
    trainer_class: type,
    config_class: type,
    model: Any,
    tokenizer: Any,
    folder: Any,
    rewards: Any = letters,
    rows: Any = None,
    **settings: Any,
) -> Any:
    """Return a trainer. ``rows``: of the data, or a data set. ``settings``: of the trainer and of its config."""
    others = {name: settings.pop(name) for name in OF_TRAINER if name in settings}
    rows = [{"prompt": prompt} for prompt in PROMPTS * 4] if rows is None else rows
    return trainer_class(
        model=model,
        reward_funcs=rewards,
        args=config(config_class, folder, **settings),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=tokenizer,
        **others,
    )


def weights(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten().to("cpu", copy=True) for p in model.parameters()])


def relative(a: Tensor, b: Tensor) -> float:
    """Return the length of the difference as a share of the length of ``b``.

    >>> relative(torch.tensor([0.5]), torch.tensor([0.25]))
    1.0
    """
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def train(trainer: Any, replayed: list[Sampled] | None = None) -> Run:
    """Train. ``replayed``: rollouts that TRL's trainer adds and ours uses.

    On a GPU the two may round logits differently, and a single other token changes all that follows.
    """
    generate, records = trainer._generate_single_turn, type(trainer) is GRPOTrainer
    rollouts: list[Sampled] = [] if replayed is None else replayed

    def generate_once(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if records:
            completions = generate(prompts, *args, **kwargs)
            rollouts.append(Sampled(prompts, completions, torch.get_rng_state()))
            return completions
        sampled = rollouts.pop(0)
        if sampled.prompts != prompts:
            raise UserError("the two trainers sample other prompts")
        # TRL shuffles the rows of a rollout.
        torch.set_rng_state(sampled.state)
        return sampled.completions

    before = weights(trainer.model)
    with nullcontext() if replayed is None else replaced(trainer, _generate_single_turn=generate_once):
        trainer.train()
    return Run(before, weights(trainer.model), trainer.state.log_history)


def differences(ours: Run, trl: Run, one_micro_batch: bool = False) -> tuple[float, float]:
    """Return the difference of the final weights as a share of the way from the first ones, and of the log.

    ``one_micro_batch``: each optimizer step computes all its rows in one micro-batch, so all metrics are TRL's.
    Infinite if nothing was trained, because then nothing was compared.
    """
    if not relative(trl.after, trl.before) > 1e-4:
        return math.inf, math.inf
    others, logs = set[str]() if one_micro_batch else OF_MICRO_BATCHES, [0.0]
    for theirs, line in zip(trl.log, ours.log, strict=True):
        names = theirs.keys() | (line.keys() & METRICS)
        compared = [name for name in names - others if not MEASURED.match(name)]
        logs += [metric_difference(line.get(name), theirs.get(name)) for name in compared]
    return relative(ours.after - trl.before, trl.after - trl.before), max(logs)


def metric_difference(value: Any, expected: Any) -> float:
    """Return the relative difference of two logged values. It is infinite if one of them is missing.

    >>> metric_difference(0.5, 0.25), metric_difference(None, float("nan")), metric_difference(None, 0.25)
    (1.0, 0.0, inf)
    """
    numbers = [math.nan if one is None else float(one) for one in (value, expected)]
    if any(map(math.isnan, numbers)):
        return 0.0 if all(map(math.isnan, numbers)) else math.inf
    return abs(numbers[0] - numbers[1]) / max(abs(numbers[1]), 0.01)


def sample_apart(trainer: Any) -> None:
    """Give each rollout the log-probs of a sampler that differs from the policy, and TRL's weights of its tokens."""
    generate = trainer._generate_and_score_completions

    def with_ratios(inputs: Any) -> Any:
        with replaced(trainer, use_vllm=False):
            output = generate(inputs)
        seed = trainer.state.global_step + 100 * trainer.accelerator.process_index
        mask = output["completion_mask"]
        noise = (0.5 + torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))).log().to(mask.device)
        rows = [torch.cat([output[f"prompt_{name}"], output[f"completion_{name}"]], dim=1) for name in ("ids", "mask")]
        with torch.no_grad():
            logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, *rows, mask.size(1))
        logps = output.get("old_per_token_logps", logps)
        output["sampling_per_token_logps"] = sampling = logps - noise
        settings = (getattr(trainer, f"vllm_importance_sampling_{name}") for name in ("mode", "clip_min", "clip_max"))
        # As TRL computes them: an update computes other weights again only if nobody has changed these.
        output["importance_sampling_ratio"] = sampler_ratio(log_ratios(logps, sampling, mask), *settings)
        return output

    trainer._generate_and_score_completions = with_ratios
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True


def run_out_of_memory(trainer: MathGRPOTrainer) -> None:
    """Let memory run out in the first loss of the run, and in a later training step of an optimizer step."""
    updates: Any = trainer.grpo_math.updates
    loss_of, due = updates.loss_of, [True, True]

    def with_errors(model: Any, rows: Any, step: Any) -> Any:
        is_late = any(one.micro_batches for one in step.done)
        if due[is_late]:
            due[is_late] = False
            raise torch.OutOfMemoryError("out of memory, as a test")
        return loss_of(model, rows, step)

    updates.loss_of = with_errors


def padded_batch(
    prompt_lengths: Sequence[int], group: int, lengths: Sequence[int], seed: int = 0
) -> tuple[Tensor, Tensor, int]:
    """Return rows of left-padded prompts and right-padded completions: ``group`` completions of each prompt."""
    prompts = torch.tensor(prompt_lengths).repeat_interleave(group)
    completions = torch.tensor(lengths)[torch.arange(len(prompts)) % len(lengths)]
    width, longest = max(prompt_lengths), max(1, *lengths)
    position = torch.arange(width + longest) - width  # from the end of the prompt
    mask = (position >= -prompts[:, None]) & (position < completions[:, None])
    ids = torch.randint(5, len(CHARACTERS), mask.shape, generator=torch.Generator().manual_seed(seed))
    ids[:, :width] = ids[::group, :width].repeat_interleave(group, dim=0)
    return ids.where(mask, 2), mask.long(), longest


def scored(
    kind: Any, trainer: Any, prompts: Sequence[int] = (7, 3, 12), group: int = 4, lengths: Sequence[int] = (5, 3, 9, 1)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and entropies (B, T), as TRL's method or ours (``kind``) computes them, and a gradient."""
    device = trainer.accelerator.device
    ids, mask, longest = padded_batch(prompts, group, lengths)
    ids, mask = ids.to(device), mask.to(device)
    counts = mask[:, -longest:]
    factors = torch.randn(counts.shape, generator=torch.Generator().manual_seed(1)).to(device) * counts
    trainer.model.zero_grad()
    logps, entropies, _ = kind._get_per_token_logps_and_entropies(
        trainer, trainer.model, ids, mask, longest, compute_entropy=True
    )
    (logps * factors).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    return logps.detach() * counts, entropies.detach() * counts, gradient
