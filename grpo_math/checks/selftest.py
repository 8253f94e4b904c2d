"""The checks of `grpo-math selftest`: this package against stock TRL and transformers, on the installed versions.

Each check returns a number and has a limit. On a GPU there are also the packed kernel in bfloat16, and the time and the
memory of an update. Does not cover several processes, tools and images.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from grpo_math import planner
from grpo_math.checks.compared import (
    KINDS,
    PROMPTS,
    SMALL,
    STEPS,
    Sampled,
    differences,
    make,
    relative,
    sample_apart,
    scored,
    train,
    weights,
)
from grpo_math.checks.tiny_model import save_tiny
from grpo_math.errors import UserError, first_line
from grpo_math.generation.decoding import lean_generation
from grpo_math.generation.vllm_server import Server
from grpo_math.grading import grade
from grpo_math.planner.memory import OUTSIDE
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.machine import GB
from grpo_math.trainer.step_cost import UPDATE, Cost, measure_steps
from grpo_math.trainer.trainer import MathGRPOTrainer

# A check -> the settings of both trainers. Each reaches another part of TRL's loss or loop.
RUNS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, accumulated": {**SMALL, "loss_type": "grpo"},
    "bnpo, accumulated": {**SMALL, "loss_type": "bnpo", "max_grad_norm": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "reward_weights": [0.5]},
    "cispo, two updates": {"loss_type": "cispo", "num_iterations": 2, "top_entropy_quantile": 0.5},
    "kl, two updates": {"beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2, "epsilon_high": 0.3},
    "LoRA, kl, accumulated": {**SMALL, "lora": True, "beta": 0.5, "num_iterations": 2, "temperature": 0.7},
    "entropy, truncated masked": {"entropy_coef": 0.01, "mask_truncated_completions": True},
    "sequences, old rollouts": {"importance_sampling_level": "sequence", "loss_type": "luspo"}
    | {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "weights of a sampler": {**SMALL, "loss_type": "grpo", "sampler": True, "off_policy_mask_threshold": 0.1},
}
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
UPDATES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 8, "bf16": True}
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


def checks(folder: str, vllm: str | None) -> Iterator[Check]:
    """Yield the checks for this machine. ``folder`` is empty. ``vllm``: the address of a server."""
    tiny = save_tiny(folder)
    for name, settings in RUNS.items():
        yield Check(f"training: {name}", "TRL's weights and log", 1e-4, partial(difference, tiny, settings))
    yield Check("resume from step 2 of 4", "weights without a stop", 1e-4, partial(resumed, tiny))
    yield Check("packed scores and gradient", "TRL's", 1e-4, partial(packed_difference, tiny))
    yield Check("greedy tokens, shared prefill", "transformers' tokens", 0, partial(greedy_difference, tiny))
    yield Check("grader", f"{len(GRADED)} verdicts", 0, wrong_grades)
    if vllm:
        yield Check("vLLM: adapters that it got", "log-probs of the policy", 0, partial(canary, tiny, vllm))
    if torch.cuda.is_available():
        medium = save_tiny(f"{folder}/medium", **MEDIUM)
        yield Check("packed scores in bfloat16", "error / TRL's to float32", 1.5, partial(bfloat16_error, medium))
        yield Check("update: seconds", "a share of TRL's", 1, partial(time_share, medium))
        yield Check("update: memory", "a share of TRL's", 1, partial(memory_share, medium))
        yield Check("update: peak memory", "a share of the plan's", 1.1, partial(planned_share, medium))


def make_trainer(kind: str, model: str, folder: str, **settings: Any) -> Any:
    """Return a trainer of TRL or of this package (`KINDS`) on this machine's device."""
    sampler, lora = settings.pop("sampler", False), settings.pop("lora", False)
    if lora:
        settings["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    settings = {"model": model, "tokenizer": tokenizer, "folder": folder, **settings}
    trainer = make(use_cpu=not torch.cuda.is_available(), **KINDS[kind], **settings)
    if sampler:
        sample_apart(trainer)
    return trainer


def difference(model: str, settings: dict[str, Any]) -> float:
    """Return how far our weights end from TRL's as a share of the way, or a tenth of the log's difference."""
    replayed: list[Sampled] | None = [] if torch.cuda.is_available() else None
    try:
        trl = train(make_trainer("trl", model, f"{model}/trl", **STEPS, **settings), replayed)
    except Exception as error:
        raise CannotTrain(f"stock TRL cannot train here: {type(error).__name__}: {first_line(error)}") from error
    of_weights, of_log = differences(
        train(make_trainer("ours", model, f"{model}/run", **STEPS, **settings), replayed), trl
    )
    return max(of_weights, of_log / 10)


def resumed(model: str) -> float:
    """Return how far a run that continues from its second step ends from one that was not stopped."""
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 2}
    # Unlike SGD, Adam has a state.
    settings |= {"optim": "adamw_torch", "learning_rate": 1e-3}
    whole = train(make_trainer("ours", model, f"{model}/whole", **settings))
    second = make_trainer("ours", model, f"{model}/second", **settings)
    second.train(resume_from_checkpoint=f"{model}/whole/checkpoint-2")
    return relative(weights(second.model) - whole.before, whole.after - whole.before)


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


def bfloat16_error(model: str) -> float:
    """Return the error of packed log-probs and gradients in bfloat16 to float32, as a share of the error of TRL's."""
    exact, mixed = (packing_trainer(model, bf16=bf16) for bf16 in (False, True))
    truth, ours, trl = scored(GRPOTrainer, exact), scored(MathGRPOTrainer, mixed), scored(GRPOTrainer, mixed)
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
    settings = {**STEPS, **UPDATES, "generation_kwargs": kwargs}
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
    recipe = RunSettings({"model_name_or_path": model, "dtype": "float32", "optim": "sgd", **UPDATES})
    size = torch.cuda.get_device_properties(0).total_memory / GB
    _, plan = planner.choose(recipe, {"": None}, gpus=1, gpu_gb=size, prompt_tokens=max(map(len, PROMPTS)))
    outside = (*OUTSIDE, "fragmentation")
    planned = sum(size for term, size in plan.phases["training"].items() if term not in outside)
    peak = costs(model)[1].peak
    return peak / planned, f"{peak / 2**20:.0f} MB, planned {planned / 2**20:.0f} MB"
