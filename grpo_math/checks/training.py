"""Try the settings with the classes of training, to find errors that would otherwise come after loading weights.

settings/ checks how settings combine.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import GenerationConfig, Trainer, get_scheduler
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from grpo_math.errors import ConfigError, as_config_error
from grpo_math.run.weights import checkpoint_kinds
from grpo_math.settings.run_settings import RunSettings
from grpo_math.trainer.config import MathGRPOConfig


def probe(settings: RunSettings, config: MathGRPOConfig) -> None:
    """Raise `ConfigError` for the first setting that transformers would refuse."""
    if not can_sample(config):
        for name in settings.needing_whole:
            why = "needs the whole model on each process, or vLLM"
            raise ConfigError(name, getattr(settings, name), why, "set use_vllm, or leave it out")
    # transformers' generate ignores an unknown name, TRL gives it no tokenizer to find a stop string with, and TRL ends
    # a completion at the model's own end tokens. vLLM has other names, so they are not checked here.
    for name in () if config.use_vllm else config.generation_kwargs or ():
        if name in ("stop_strings", "eos_token_id") or not hasattr(GenerationConfig(), name):
            reason = "is not a setting of transformers' generate in training"
            raise ConfigError("generation_kwargs", name, reason, "set use_vllm, or leave it out")
    # A schedule needs an optimizer, and no weight is loaded yet.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    warmup, extra = config.get_warmup_steps(100), cast(Any, config.lr_scheduler_kwargs)
    # A tracker's callback raises in its constructor if the tracker's package is missing.
    attempts: dict[str, Callable[[], object]] = {
        "optim": lambda: Trainer.get_optimizer_cls_and_kwargs(config),
        "lr_scheduler_kwargs": lambda: get_scheduler(config.lr_scheduler_type, optimizer, warmup, 100, extra),
        "report_to": lambda: [callback() for callback in get_reporting_integration_callbacks(config.report_to)],
    }
    for name, attempt in attempts.items():
        with as_config_error(name, config.to_dict()[name], "cannot be used", "correct it, or leave it out"):
            attempt()


def can_sample(config: MathGRPOConfig) -> bool:
    """Return True if the model can be evaluated: by vLLM, or whole on each process, so not with ZeRO-3 or FSDP."""
    sharded = config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage >= 3
    return config.use_vllm or not (sharded or "FSDP" in checkpoint_kinds(config))
