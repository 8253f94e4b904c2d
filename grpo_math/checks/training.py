"""Try the settings with the classes of training, to find errors that would otherwise come after loading weights.

Does not check how settings combine: settings/rules.py does.
"""

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, SchedulerType, Trainer, get_scheduler
from transformers.training_args import OptimizerNames

from grpo_math.errors import ConfigError
from grpo_math.run.weights import kinds_of_checkpoint
from grpo_math.settings.arguments import TrainArguments, needing_whole
from grpo_math.trainer.config import MathGRPOConfig


def probe(arguments: TrainArguments, config: MathGRPOConfig) -> None:
    """Raise `ConfigError` for the first setting that transformers would refuse."""
    if not can_sample(config):
        settings = {**vars(config), **vars(arguments)}
        for name in needing_whole(settings):
            why = "needs the whole model on each process, or vLLM"
            raise ConfigError(name, settings[name], why, "set use_vllm, or leave it out")
    _try_generation(config)
    try:
        Trainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        name, value = ("optim_args", config.optim_args) if config.optim_args else ("optim", optimizer_name(config))
        raise ConfigError(name, value, f"cannot be used ({error})", "leave it out, or use adamw_torch") from None
    _check_optim_args(config)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    extra: Any = config.lr_scheduler_kwargs
    try:
        get_scheduler(config.lr_scheduler_type, optimizer, config.get_warmup_steps(100), 100, extra)
    except (TypeError, ValueError) as error:
        reason = f"does not suit lr_scheduler_type={SchedulerType(config.lr_scheduler_type).value} ({error})"
        raise ConfigError("lr_scheduler_kwargs", extra, reason, "see that scheduler's own settings") from None


def optimizer_name(config: MathGRPOConfig) -> str:
    return str(OptimizerNames(config.optim).value)


def can_sample(config: MathGRPOConfig) -> bool:
    """Return whether the model can be evaluated: by vLLM, or whole on each process, so not with ZeRO-3 or FSDP."""
    sharded = config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage >= 3
    return config.use_vllm or not (sharded or "FSDP" in kinds_of_checkpoint(config))


def _check_optim_args(config: MathGRPOConfig) -> None:
    """Raise `ConfigError` for a name in ``optim_args`` that the optimizer does not read: transformers ignores it."""

    def read_with(text: str | None) -> str:
        other = copy.copy(config)
        other.optim_args = text
        try:
            return str(Trainer.get_optimizer_cls_and_kwargs(other))
        except (ImportError, ValueError, TypeError) as error:
            return str(error)

    for pair in config.optim_args.replace(" ", "").split(",") if config.optim_args else ():
        name = pair.partition("=")[0]
        if len({read_with(None), read_with(pair), read_with(f"{name}=3")}) == 1:
            reason = f"holds {name}, which optim={optimizer_name(config)} does not read"
            raise ConfigError("optim_args", config.optim_args, reason, "leave it out")


def _try_generation(config: MathGRPOConfig) -> None:
    """Generate two tokens with a model of one small layer, as TRL does. Raises `ConfigError` if that fails."""
    stated: Any = config.generation_kwargs or {}
    if config.use_vllm or not (stated or config.cache_implementation):
        return
    for name in stated:  # transformers ignores an unknown name
        if not hasattr(GenerationConfig(), name):
            raise ConfigError("generation_kwargs", name, "is not a setting of transformers' generate", "leave it out")
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    device: Any = config.device
    ids = torch.ones(2, 2, dtype=torch.long, device=device)
    with torch.random.fork_rng(), torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=2**18, pad_token_id=0, **shape)).to(device)
        kwargs = {"max_new_tokens": 2, "do_sample": True, "cache_implementation": config.cache_implementation, **stated}
        try:
            expected = GenerationConfig(pad_token_id=0, **kwargs)
            tokens = model.generate(ids, attention_mask=ids, generation_config=expected)
            if not isinstance(tokens, torch.Tensor):
                raise TypeError("TRL expects tokens alone")
        except Exception as error:
            name = "generation_kwargs" if stated else "cache_implementation"
            reason = f"is refused by transformers' generate ({' '.join(str(error).split())[:200]})"
            raise ConfigError(name, stated or config.cache_implementation, reason, "leave it out") from None
