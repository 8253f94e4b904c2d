"""``generation_kwargs`` and ``cache_implementation`` held against transformers' ``generate``, before a rollout.

transformers passes over what sampling does not read, and finds other mistakes with the first batch: a model of one
small layer is asked for two tokens with the same settings. What vLLM would be asked is not looked at, but for names.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpo_math.errors import ConfigError
from grpo_math.settings import recipe
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.ranges import RANGES, Rule

# What generation_kwargs would set behind the back of a field that is checked
FIELDS_OF_GENERATION = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")},
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "max_tokens": "max_completion_length",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
}
# Of transformers' generate: what sampling never reads, and numbers that it passes over without a word
UNSAMPLED = (
    *("num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping", "penalty_alpha", "low_memory"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "num_assistant_tokens"),
)
SAMPLED: dict[str, Rule] = {
    "typical_p": (lambda x: 0 < x <= 1, "a number above 0, and 1 at most"),
    "epsilon_cutoff": (lambda x: 0 <= x < 1, "a number from 0, and below 1"),
    "eta_cutoff": (lambda x: 0 <= x < 1, "a number from 0, and below 1"),
    "no_repeat_ngram_size": (lambda x: x >= 0, "0 or more"),
}
IDS = 2**18  # more than a vocabulary has


def _refused(value: object, reason: str, remedy: str = "leave it out") -> ConfigError:
    return ConfigError("generation_kwargs", value, reason, remedy)


def check_generation(config: MathGRPOConfig) -> None:
    """Names and numbers of ``generation_kwargs``, which transformers would pass over or find in the first rollout."""
    stated: Any = config.generation_kwargs or {}
    for name, value in stated.items():
        if not config.use_vllm and not hasattr(GenerationConfig(), name):
            raise _refused(name, "is not a setting of transformers' generate")
        if name in RANGES:
            recipe.check(name, value)
    if not config.use_vllm:
        cache = {"cache_implementation": config.cache_implementation}
        for field, value, settings, remedy in (
            ("cache_implementation", config.cache_implementation, cache, "leave it out"),
            ("generation_kwargs", stated, stated, "see transformers' GenerationConfig"),
        ):
            try:
                GenerationConfig(**settings).validate()
            except (ValueError, TypeError) as error:
                raise ConfigError(field, value, f"is refused ({' '.join(str(error).split())})", remedy) from None
    for name, value in stated.items():
        if own := FIELDS_OF_GENERATION.get(name):
            raise _refused({name: value}, "would sample in another way than the loss takes it for", f"set {own}")
    if not config.use_vllm:
        _check_what_trl_hands_on(stated)
        least, most = stated.get("min_new_tokens"), config.max_completion_length
        if isinstance(least, int) and most and least > most:
            raise _refused({"min_new_tokens": least}, f"asks for more than max_completion_length={most}", "give fewer")
        if stated or config.cache_implementation:
            _try_generation(config, stated)


def _try_generation(config: MathGRPOConfig, stated: Mapping[str, Any]) -> None:
    """Two tokens of a model of one small layer, as TRL asks for them: what generate refuses it refuses here."""
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    device: Any = config.device
    ids = torch.ones(2, 2, dtype=torch.long, device=device)
    with torch.random.fork_rng(), torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=IDS, pad_token_id=0, **shape)).to(device)
        asked = {"max_new_tokens": 2, "do_sample": True, "cache_implementation": config.cache_implementation, **stated}
        try:
            wanted = GenerationConfig(pad_token_id=0, **asked)
            tokens = model.generate(ids, attention_mask=ids, generation_config=wanted)
            if not isinstance(tokens, torch.Tensor):
                raise TypeError("TRL wants tokens alone")
        except Exception as error:
            name = "generation_kwargs" if stated else "cache_implementation"
            value = stated or config.cache_implementation
            reason = f"is refused by transformers' generate ({' '.join(str(error).split())[:200]})"
            raise ConfigError(name, value, reason, "leave it out") from None


def _check_what_trl_hands_on(stated: Mapping[str, Any]) -> None:
    """What transformers' ``generate`` would take, but not from TRL, or not for groups."""
    ids = stated.get("eos_token_id")
    if not isinstance(ids, int | None) and not (isinstance(ids, list) and all(isinstance(n, int) for n in ids)):
        raise _refused({"eos_token_id": ids}, "is not a token id", "give a number, or a list of them")
    for name, value in stated.items():
        said = {name: value}
        if name in UNSAMPLED and value != getattr(GenerationConfig(), name):
            raise _refused(said, "would be ignored: completions are sampled, one by one")
        if name in SAMPLED and isinstance(value, int | float) and not SAMPLED[name][0](value):
            raise _refused(said, "is out of range", f"give {SAMPLED[name][1]}")
        if name.endswith("_token_id") and value is not None:
            listed = value if isinstance(value, list) else [value]
            if not listed or not all(isinstance(n, int) and 0 <= n < IDS for n in listed):
                raise _refused(said, "is not a token id", "give one of the vocabulary")
        if name == "stop_strings" and value:
            raise _refused(said, "needs the tokenizer, which TRL does not hand to generate", "use vLLM's stop")
        if (name == "do_sample" and value is False) or (name == "num_beams" and value != 1):
            raise _refused(said, "would not sample: the completions of a group would be alike")
