"""The checks of `grpo-math selftest`: this package against stock TRL and transformers, on the installed versions.

Each check returns a number and has a limit. On a GPU there are also the packed kernel in 16 bit, and the time and the
memory of an update. Does not cover several processes, tools and images.
"""

import doctest
import importlib
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from grpo_math import algorithm, generation, grading, packing, planner, rewards, trainer
from grpo_math.checks.compared import (
    BASE,
    KINDS,
    PROMPTS,
    ROWS,
    SMALL,
    STEPS,
    Run,
    Sampled,
    differences,
    letters,
    make,
    relative,
    right_answers,
    rollout_of_answers,
    rollout_with_tools,
    run_out_of_memory,
    sample_apart,
    scored,
    some_lengths,
    train,
    weights,
)
from grpo_math.checks.tiny_model import save_tiny
from grpo_math.errors import UserError, first_line
from grpo_math.generation.decoding import lean_generation
from grpo_math.generation.dtypes import gpu_dtype
from grpo_math.generation.vllm_server import Server
from grpo_math.grading import grade
from grpo_math.planner.memory import OUTSIDE
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.machine import GB
from grpo_math.trainer.step_cost import UPDATE, Cost, measure_steps
from grpo_math.trainer.trainer import MathGRPOTrainer

TWO_UPDATES = {"num_iterations": 2, "beta": 0.01}
# The entropy of the third step is above the target.
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.05, "entropy_target": 4.495}
ADAPTIVE |= {"entropy_coef_max": 0.12}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if hint %}{{ hint }}{% endif %}"
# A check -> the settings of both trainers, and of each one alone. Each reaches another part of TRL's loss or loop.
RUNS: dict[str, dict[str, Any]] = {
    "dapo, evaluated": {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "eval_dataset": ROWS},
    "grpo, accumulated": {**SMALL, "loss_type": "grpo", "scale_rewards": "batch", "gradient_checkpointing": True},
    # A rollout ends within an optimizer step.
    "bnpo, accumulated": {**SMALL, "loss_type": "bnpo", "max_grad_norm": 0.1, "steps_per_generation": 6},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "reward_weights": [0.5]},
    "small rewards": {**SMALL, "reward_weights": [0.001]},
    "two rewards": {"rewards": [letters, some_lengths], "reward_weights": [1.0, -0.5]},
    "two normalized rewards": {"rewards": [letters, some_lengths], "reward_weights": [1.0, -0.5]}
    | {"multi_objective_aggregation": "normalize_then_sum", **SMALL},
    # The advantages are those of the group's mean, times 4 / 3 in a group of 4.
    "leave one out": {"scale_rewards": "none", "trl": {"reward_weights": [4 / 3]}}
    | {"ours": {"baseline": "leave_one_out"}},
    "clipped on three sides": {**TWO_UPDATES, "learning_rate": 0.5, "epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.3},
    "cispo": {**TWO_UPDATES, "loss_type": "cispo", "epsilon_high": 1.01, "top_entropy_quantile": 0.7},
    "sapo": {**TWO_UPDATES, "loss_type": "sapo", "sapo_temperature_neg": 2.0, "use_bias_correction_kl": False},
    "vespo": {**TWO_UPDATES, "loss_type": "vespo", "sampler": True, "vllm_importance_sampling_clip_max": 1.1}
    | {"vllm_importance_sampling_mode": "token_truncate"},
    "kl, moving reference": {"beta": 0.5, "num_iterations": 2, "gradient_accumulation_steps": 2}
    | {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "kl, refreshed reference": {"beta": 0.5, "ours": {"reference_refresh_steps": 2}}
    | {"trl": {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}},
    "LoRA, kl, accumulated": {**SMALL, "lora": True, "beta": 0.5, "num_iterations": 2},
    "entropy, truncated masked": {**SMALL, "entropy_coef": 0.01, "mask_truncated_completions": True}
    | {"repetition_penalty": 1.2},
    "adaptive entropy": {**ADAPTIVE, "top_entropy_quantile": 0.5}
    | {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": ROWS},
    "sequences, old rollouts": {"importance_sampling_level": "sequence", "loss_type": "luspo"}
    | {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "pad_to_multiple_of": 8},
    "weights of a sampler": {**SMALL, "loss_type": "grpo", "sampler": True, "off_policy_mask_threshold": 0.1},
    "settings of sampling": {"top_p": 0.9, "top_k": 40, "min_p": 0.2, "temperature": 0.7},
    "a chat": {"rows": [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]}
    | {"template": TEMPLATE, "chat_template_kwargs": {"hint": "briefly"}},
    "tokens of tools": {**SMALL, "rollout_func": rollout_with_tools, "beta": 0.1},
    "graded answers": {"rollout_func": rollout_of_answers, "trl": {"rewards": right_answers}}
    | {"rows": [{"prompt": prompt, "answer": str(7 + i % 2), "solution": "9"} for i, prompt in enumerate(PROMPTS)]}
    | {"ours": {"rewards": rewards.REWARDS["accuracy"]}},
    "several micro-batches": {**SMALL, "loss_type": "grpo", "num_iterations": 2, "beta": 0.05}
    | {"ours": {"max_tokens_per_micro_batch": 20}},
    "out of memory": {**SMALL, "loss_type": "grpo", "beta": 0.05, "ours": {"runs_out": True}},
}
# The fields of TRL's config that a check sets.
FIELDS = {name for settings in (BASE, STEPS, *RUNS.values()) for name in settings}
GRADED = (
    *(("72", "48 / 2 = 24. #### 72", "correct"), ("72", "#### 71", "wrong"), ("1/2", "#### 0.5", "correct")),
    *(("1,000", "#### 1000", "correct"), ("x^2", "\\boxed{x \\cdot x}", "correct"), ("72", "no idea", "unparseable")),
)
# Prompts, completions of a group, completions: their lengths.
SHAPES = (((7, 3, 12), 4, (5, 3, 9, 1)), ((6,), 4, (40, 1, 39, 3)), ((5, 8), 3, (4, 0, 2)))
# On a GPU: 25 million weights, and an update on 4 groups of 8 completions of 256 tokens.
MEDIUM = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
}
UPDATES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 8}
UPDATES |= {"max_completion_length": 256}


class Check(NamedTuple):
    """``measure`` returns a number that is at most ``limit`` if all is well, and perhaps words about it.

    ``expected`` names what is compared.
    """

    name: str
    expected: str
    limit: float
    measure: Callable[[], float | tuple[float, str]]


class CannotTrain(UserError):
    """Stock TRL itself cannot train here."""


@contextmanager
def in_float32() -> Iterator[None]:
    """Compute in float32 inside this context, also if the environment or a start-up script set another precision."""
    names = [name for name in os.environ if name.startswith("ACCELERATE_")]
    removed = {name: os.environ.pop(name) for name in names}
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        os.environ.update(removed)


def checks(folder: str, vllm: str | None) -> Iterator[Check]:
    """Yield the checks for this machine. ``folder`` is empty. ``vllm``: the address of a server."""
    tiny, on_gpu = save_tiny(folder), torch.cuda.is_available()
    for name, settings in RUNS.items():
        yield Check(f"training: {name}", "TRL's weights and log", 1e-4, partial(difference, tiny, settings))
    yield Check("resume from step 5 of 8", "weights without a stop", 1e-4, partial(resumed, tiny))
    yield Check("doctests", "their numbers", 0, failed_doctests)
    yield Check("packed scores and gradient", "TRL's", 1e-4, partial(packed_difference, tiny))
    # On a GPU, products of fewer rows are rounded in another way. A near tie may then flip, and the rest of its row.
    limit = 0.05 if on_gpu else 0
    yield Check("greedy tokens, shared prefill", "transformers' tokens", limit, partial(greedy_difference, tiny))
    yield Check("grader", f"{len(GRADED)} verdicts", 0, wrong_grades)
    if vllm:
        yield Check("vLLM: adapters that it got", "log-probs of the policy", 0, partial(canary, tiny, vllm))
    if on_gpu:
        medium = save_tiny(f"{folder}/medium", **MEDIUM)
        yield Check(f"packed scores in {gpu_dtype()}", "error / TRL's to float32", 1.5, partial(half_error, medium))
        yield Check("update: seconds", "a share of TRL's", 1, partial(time_share, medium))
        yield Check("update: memory", "a share of TRL's", 1, partial(memory_share, medium))
        yield Check("update: peak memory", "a share of the plan's", 1.1, partial(planned_share, medium))


def make_trainer(kind: str, model: str, folder: str, **settings: Any) -> Any:
    """Return a trainer of TRL or of this package (`KINDS`) on this machine's device. ``settings``: as in `RUNS`."""
    settings |= settings.pop(kind, {})
    sampler, lora, runs_out, *_ = (settings.pop(name, False) for name in ("sampler", "lora", "runs_out", *KINDS))
    if lora:
        # Random weights, because an adapter that begins at 0 changes no token.
        settings["peft_config"] = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.chat_template = settings.pop("template", tokenizer.chat_template)
    settings = {"model": model, "tokenizer": tokenizer, "folder": folder, **settings}
    trainer = make(use_cpu=not torch.cuda.is_available(), **KINDS[kind], **settings)
    if sampler:
        sample_apart(trainer)
    if runs_out:
        run_out_of_memory(trainer)
    return trainer


def difference(model: str, settings: dict[str, Any]) -> float:
    """Return how far our weights end from TRL's as a share of the way, or a tenth of the log's difference."""
    replayed: list[Sampled] | None = [] if torch.cuda.is_available() else None
    try:
        trl = train(make_trainer("trl", model, f"{model}/trl", **STEPS, **settings), replayed)
    except Exception as error:
        raise CannotTrain(f"stock TRL cannot train here: {type(error).__name__}: {first_line(error)}") from error
    # Our trainer runs no more of TRL: the profile of the command ends here, because it takes time.
    sys.setprofile(None)
    ours = train(make_trainer("ours", model, f"{model}/run", **STEPS, **settings), replayed)
    # Without a KL term, an update skips completions without advantage.
    whole = "beta" in settings and "gradient_accumulation_steps" not in settings
    of_weights, of_log = differences(ours, trl, whole)
    # With other settings, TRL logs other rewards.
    return of_weights if "trl" in settings else max(of_weights, of_log / 10)


def resumed(model: str) -> float:
    """Return how far a run that continues within a rollout of its second epoch ends from one that was not stopped."""
    settings: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "num_iterations": 2}
    # Adam, the reference and the coefficient of the entropy have a state.
    settings |= {"optim": "adamw_torch", "learning_rate": 1e-3}
    # The entropy is above the target, so that the coefficient falls.
    settings |= {**ADAPTIVE, "entropy_target": 4.0, "entropy_coef_delta": 0.01}
    settings |= {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "rows": ROWS, "logging_steps": 2}
    whole = train(make_trainer("ours", model, f"{model}/whole", **settings))
    second = make_trainer("ours", model, f"{model}/second", **settings)
    second.train(resume_from_checkpoint=f"{model}/whole/checkpoint-5")
    return max(differences(Run(whole.before, weights(second.model), second.state.log_history), whole, True))


def packing_trainer(model: str, **settings: Any) -> Any:
    """Return a trainer whose model runs packed."""
    trainer = make_trainer("ours", model, f"{model}/run", **settings)
    trainer.model.train()
    trainer.grpo_math.scorer.agree_to_pack()
    if trainer.grpo_math.scorer.packed is None:
        raise UserError("the model is not packed")
    return trainer


def packed_difference(model: str) -> float:
    """Return the largest difference of packed log-probs, entropies and gradients from TRL's."""
    trainer, largest = packing_trainer(model), 0.0
    for rows in SHAPES:
        ours, trl = (scored(kind, trainer, *rows) for kind in (MathGRPOTrainer, GRPOTrainer))
        largest = max(largest, *(relative(a, b) for a, b in zip(ours, trl, strict=True)))
    return largest


def half() -> dict[str, bool]:
    """Return the settings with which a run computes in the 16 bits of this GPU: a card without bfloat16 emulates it."""
    return {"bf16": gpu_dtype() == "bfloat16", "fp16": gpu_dtype() == "float16"}


def half_error(model: str) -> float:
    """Return the error of packed log-probs and gradients in 16 bit to float32, as a share of the error of TRL's."""
    exact, mixed = (packing_trainer(model, **formats) for formats in ({}, half()))
    # With fewer tokens, the two errors differ by chance.
    rows = ((30, 20, 25), 8, (40, 30, 17, 5))
    ours, trl = (scored(kind, mixed, *rows) for kind in (MathGRPOTrainer, GRPOTrainer))
    truth = scored(GRPOTrainer, exact, *rows)
    return max(relative(ours[i], truth[i]) / relative(trl[i], truth[i]) for i in range(3))


def greedy_difference(folder: str) -> float:
    """Return the share of tokens that differ from those of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    # Groups of 4, whose prompts begin alike.
    rows = ["Add the two numbers. " * 10 + end for end in PROMPTS for _ in range(4)]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    batch = tokenizer(rows, return_tensors="pt", padding=True).to(model.device)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [1, 9, 17], "pad_token_id": 2}
    expected = model.generate(**inputs, **settings)
    with lean_generation(model):
        tokens = model.generate(**inputs, **settings)
    return (tokens != expected).float().mean().item() if tokens.shape == expected.shape else 1.0


def failed_doctests() -> float:
    """Return the number of examples that print something else; infinite if Python has dropped them."""
    packages = (algorithm, packing, rewards, generation, grading, trainer)
    modules = [module for one in packages for module in pkgutil.iter_modules(one.__path__, f"{one.__name__}.")]
    results = [
        doctest.testmod(importlib.import_module(module.name), optionflags=doctest.ELLIPSIS) for module in modules
    ]
    return float(sum(result.failed for result in results)) if any(result.attempted for result in results) else math.inf


def wrong_grades() -> float:
    return float(sum(str(grade(gold, text)) != verdict for gold, text, verdict in GRADED))


def canary(folder: str, url: str) -> float:
    """Return 0 if the server samples with the adapters that it gets. The model is the server's."""
    served = Server(url).models()[0]
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "lora": True}
    trainer = make_trainer("ours", served, f"{folder}/vllm", max_steps=2, **server)
    trainer.train()
    return float(trainer.vllm_generation.canary.agreed < 1)


@cache
def costs(model: str) -> tuple[Cost, Cost]:
    """Return the cost of an update on the GPU: with TRL's trainer, and with ours."""
    kwargs = {"min_new_tokens": UPDATES["max_completion_length"]}
    settings = {**STEPS, **UPDATES, **half(), "generation_kwargs": kwargs}
    trl, ours = (measure_steps(make_trainer(kind, model, f"{model}/{kind}", **settings))[-1] for kind in KINDS)
    return trl[UPDATE], ours[UPDATE]


def time_share(model: str) -> tuple[float, str]:
    trl, ours = costs(model)
    return ours.seconds / trl.seconds, f"{ours.seconds:.3f} s, TRL {trl.seconds:.3f} s"


def memory_share(model: str) -> tuple[float, str]:
    trl, ours = ((cost.peak - cost.start) / 2**20 for cost in costs(model))
    return ours / max(trl, 1.0), f"{ours:.0f} MB, TRL {trl:.0f} MB"


def planned_share(model: str) -> tuple[float, str]:
    """Return the peak of the tensors of our update as a share of the memory plan's figure."""
    recipe = RunSettings({"model_name_or_path": model, "dtype": "float32", "optim": "sgd", **UPDATES, **half()})
    size = torch.cuda.get_device_properties(0).total_memory / GB
    _, plan = planner.choose(recipe, {"": None}, gpus=1, gpu_gb=size, prompt_tokens=max(map(len, PROMPTS)))
    outside = (*OUTSIDE, "fragmentation")
    planned = sum(size for term, size in plan.phases["training"].items() if term not in outside)
    peak = costs(model)[1].peak
    return peak / planned, f"{peak / 2**20:.0f} MB, planned {planned / 2**20:.0f} MB"
