"""Settings that cannot work together, or not here: refused before data and weights are read.

Does not know ranges or choices of a single setting (recipe.py), nor what trainer/config.py refuses by itself.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Trainer, get_scheduler

from grpo_math.errors import ConfigError, one_of
from grpo_math.run import checkpoints
from grpo_math.run.files import refuse_unwritable
from grpo_math.run.weights import kinds_of_checkpoint
from grpo_math.settings.arguments import TrainArguments, needing_whole
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.refusals import refuse_unforeseen

# What model_init_kwargs would set behind the back of a field that is checked
FIELDS_OF_MODEL = {
    **{name: name for name in ("dtype", "attn_implementation", "trust_remote_code")},
    "torch_dtype": "dtype",
    "revision": "model_revision",
    "quantization_config": "load_in_4bit",
}
# What generation_kwargs would set behind the back of a field that is checked
FIELDS_OF_GENERATION = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")},
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "max_tokens": "max_completion_length",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
}
# What a setting of transformers cannot be here, and why
CANNOT_BE = (
    ("load_best_model_at_end", True, "needs transformers' evaluations, and there are none", "leave it out"),
    ("save_strategy", "best", "needs transformers' evaluations, and there are none", "leave it out"),
    ("enable_jit_checkpoint", True, "would take SIGTERM for itself", "leave it out: the step is saved anyway"),
    ("remove_unused_columns", True, "would take the gold answers away from the rewards", "leave it out"),
    ("logging_strategy", "no", "would leave the run without its history", "leave it out, or set logging_steps"),
    ("ignore_data_skip", True, "would go on with other problems than the run has left off at", "leave it out"),
)
# of torch.utils.checkpoint.checkpoint
CHECKPOINT_ARGUMENTS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "context_fn", "early_stop")


def check(train_args: TrainArguments, config: MathGRPOConfig, run_dir: Path) -> None:
    """What cannot work, before data and weights are read."""
    own: Any = config.model_init_kwargs or {}
    if config.trust_remote_code or own.get("trust_remote_code"):
        raise ConfigError("trust_remote_code", True, "would run code of a model repository", "leave it off")
    if config.eval_strategy != "no":
        raise ConfigError("eval_strategy", _word(config.eval_strategy), "evaluates nothing here", "use heldout_every")
    if not whole_on_each(config):
        for name in needing_whole(vars(train_args)):
            why = "needs the whole model on each process"
            raise ConfigError(name, getattr(train_args, name), why, "leave it out, and evaluate after the run")
    refuse_unforeseen(config.staleness, {"tools": train_args.tools})
    if str(config.resume_from_checkpoint).lower() == "true" and not checkpoints.checkpoints(run_dir):
        raise ConfigError("resume_from_checkpoint", True, f"finds no checkpoint in {run_dir}", "leave it out")
    for name, bad, why, remedy in CANNOT_BE:
        if _word(getattr(config, name)) == bad:
            raise ConfigError(name, bad, why, remedy)
    for name in own:
        if name in FIELDS_OF_MODEL:
            raise ConfigError("model_init_kwargs", name, "has a field of its own", f"set {FIELDS_OF_MODEL[name]}")
    if rates := train_args.difficulty_file:
        refuse_unwritable("difficulty_file", rates, Path(rates).parent, "name another file")
    check_generation(config)
    _check_compute(config)
    _check_batches(config)
    try:
        Trainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        name, value = ("optim_args", config.optim_args) if config.optim_args else ("optim", _word(config.optim))
        raise ConfigError(name, value, f"cannot be used ({error})", "leave it out, or use adamw_torch") from None
    _check_optim_args(config)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    extra: Any = config.lr_scheduler_kwargs
    try:
        get_scheduler(config.lr_scheduler_type, optimizer, config.get_warmup_steps(100), 100, extra)
    except (TypeError, ValueError) as error:
        reason = f"does not suit lr_scheduler_type={_word(config.lr_scheduler_type)} ({error})"
        raise ConfigError("lr_scheduler_kwargs", extra, reason, "see that scheduler's own settings") from None


def whole_on_each(config: MathGRPOConfig) -> bool:
    """Whether each process holds the whole model: not with ZeRO-3 or FSDP."""
    sharded = config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage >= 3
    return not sharded and "FSDP" not in kinds_of_checkpoint(config)


def _word(value: Any) -> Any:
    """An enum's value, and anything else as it is."""
    return getattr(value, "value", value)


def _check_optim_args(config: MathGRPOConfig) -> None:
    """Every name in ``optim_args`` is one that this optimizer reads: transformers passes over others."""

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
            reason = f"holds {name}, which optim={_word(config.optim)} does not read"
            raise ConfigError("optim_args", config.optim_args, reason, "leave it out")


def check_generation(config: MathGRPOConfig) -> None:
    """Check ``generation_kwargs`` and ``cache_implementation`` before the first rollout.

    transformers ignores a name that it does not know only in some places, and finds other mistakes with the first
    batch: so a model of one small layer generates two tokens with the same settings.
    """
    stated: Any = config.generation_kwargs or {}
    for name, value in stated.items():
        if own := FIELDS_OF_GENERATION.get(name):
            reason = "would sample in another way than the loss takes it for"
            raise ConfigError("generation_kwargs", {name: value}, reason, f"set {own}")
        if config.use_vllm:
            continue
        if not hasattr(GenerationConfig(), name):
            raise ConfigError("generation_kwargs", name, "is not a setting of transformers' generate", "leave it out")
        if (name == "do_sample" and value is False) or (name == "num_beams" and value != 1):
            reason = "would not sample: the completions of a group would be alike"
            raise ConfigError("generation_kwargs", {name: value}, reason, "leave it out")
    if not config.use_vllm and (stated or config.cache_implementation):
        _try_generation(config, stated)


def _try_generation(config: MathGRPOConfig, stated: Mapping[str, Any]) -> None:
    """Generate two tokens with a model of one small layer, as TRL does: what generate refuses is refused here."""
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    device: Any = config.device
    ids = torch.ones(2, 2, dtype=torch.long, device=device)
    with torch.random.fork_rng(), torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=2**18, pad_token_id=0, **shape)).to(device)
        asked = {"max_new_tokens": 2, "do_sample": True, "cache_implementation": config.cache_implementation, **stated}
        try:
            expected = GenerationConfig(pad_token_id=0, **asked)
            tokens = model.generate(ids, attention_mask=ids, generation_config=expected)
            if not isinstance(tokens, torch.Tensor):
                raise TypeError("TRL expects tokens alone")
        except Exception as error:
            name = "generation_kwargs" if stated else "cache_implementation"
            reason = f"is refused by transformers' generate ({' '.join(str(error).split())[:200]})"
            raise ConfigError(name, stated or config.cache_implementation, reason, "leave it out") from None


def _check_batches(config: MathGRPOConfig) -> None:
    """What accelerate would do to a batch of rollouts, which is cut and shared out already."""
    own: Any = config.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(own, name, None):
            reason = "would tear groups of completions apart"
            raise ConfigError("accelerator_config", {name: True}, reason, "leave it out")
    if (getattr(own, "gradient_accumulation_kwargs", None) or {}).get("num_steps") is not None:
        remedy = "set gradient_accumulation_steps"
        raise ConfigError("accelerator_config", "num_steps", "has a field of its own", remedy)


def _check_compute(config: MathGRPOConfig) -> None:
    """What torch would refuse in the first forward pass."""
    for name in config.gradient_checkpointing_kwargs or {}:
        one_of("gradient_checkpointing_kwargs", name, CHECKPOINT_ARGUMENTS)
