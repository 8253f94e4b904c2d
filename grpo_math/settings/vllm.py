"""vLLM, and what changes the sampling: settings and rules."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_math.settings.declare import Facts, Rule, entries, has_field, setting, without
from grpo_math.settings.trl_types import GRPOConfig
from grpo_math.system.addresses import NO_ADDRESS, is_address, is_this_machine

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # valid values of vLLM's --max-lora-rank
# Reason and remedy for a higher rank: of a recipe, or of an adapter that a script makes.
ABOVE = (f"is above {RANKS[-1]}, vLLM's largest", "train an adapter of lower rank")
NO_PREFETCH = "cannot prefetch: {} change what is requested from vLLM"
# Names in generation_kwargs that change the distribution that vLLM samples from, and not the trainer's.
BIASING = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    *("structured_outputs", "logits_processors"),
)


FACTS: Facts = {
    "vllm_sync": {"choices": ("adapter", "merged")},
    "staleness": {"ge": 0, "le": 1},
    "geometric_mask_low": {"gt": 0, "le": 1},
    "geometric_mask_high": {"ge": 1},
}


@dataclass
class Vllm(GRPOConfig):
    """vLLM."""

    vllm_sync: str = setting(
        "adapter",
        "The weights sent to vLLM when a PEFT adapter is trained: adapter (alone), or merged (every weight, as TRL "
        "does). DoRA and modules_to_save need merged, because vLLM refuses them in an adapter.",
    )
    vllm_share_weights: bool = setting(
        False, "Train an adapter on the weights of a colocated vLLM engine, instead of on a second copy of the base."
    )
    staleness: int = setting(
        0,
        "1: the vLLM server samples the next batch while this one is trained on (arXiv 2410.18252), and the loss is "
        "corrected for that. 0: they take turns.",
    )
    geometric_mask_low: float = setting(
        0.99, "With geometric_mask: the lowest mean ratio to vLLM of a kept completion."
    )
    geometric_mask_high: float = setting(1.01, "The highest mean ratio.")

    @property
    def generation(self) -> str:
        """Return what generates the completions: transformers, or vLLM in ``vllm_mode`` colocate or server."""
        return self.vllm_mode if self.use_vllm else "transformers"

    @property
    def external_server(self) -> str:
        """Return the address of an external server in the recipe, or "" if the run has to start a server."""
        # TRL's default host, 0.0.0.0, means a server on this machine.
        host = self.vllm_server_host
        return self.vllm_server_base_url or ("" if is_this_machine(host) else host)

    @property
    def starts_server(self) -> bool:
        """Return True if a run of the recipe has to start a vLLM server on this machine."""
        return self.generation == "server" and not self.external_server


def _samples(options: Mapping[str, Any]) -> bool:
    """Return True unless these options of ``generate`` make all completions of a prompt alike."""
    return bool(options.get("do_sample", True)) and options.get("num_beams", 1) == 1


RULES = [
    Rule(
        "error",
        "vllm_importance_sampling_mode",
        lambda s: (
            s.effective_surrogate == "vespo"
            and s.use_vllm
            and s.vllm_importance_sampling_correction
            and s.vllm_importance_sampling_mode not in ("token_truncate", "token_mask")
        ),
        "does not work with the surrogate vespo, which needs the ratio of each token between vLLM and the model",
        "use token_truncate or token_mask",
    ),
    Rule(
        "error",
        "vllm_importance_sampling_mode",
        lambda s: (
            s.effective_surrogate in ("dppo", "dppo_kl")
            and s.use_vllm
            and s.vllm_importance_sampling_mode == "geometric_mask"
        ),
        "does not work with the surrogate {surrogate}, whose ratio is that to vLLM",
        "use the surrogate clip, or leave it out",
    ),
    Rule(
        "error",
        "vllm_importance_sampling_clip_m.*",
        lambda s: (
            s.use_vllm
            and s.vllm_importance_sampling_correction
            and s.vllm_importance_sampling_mode in ("token_mask", "sequence_mask")
            and not (s.vllm_importance_sampling_clip_min or 0) <= 1 <= (s.vllm_importance_sampling_clip_max or 1)
        ),
        "leaves out what vLLM and the trainer score alike (a ratio of 1): almost every gradient is zero",
        "give bounds on both sides of 1",
    ),
    without("use_vllm", "vllm_(?!server_timeout).*"),
    Rule("no_effect", "vllm_server_timeout", lambda s: not s.use_vllm, "use_vllm is not set"),
    Rule(
        "no_effect",
        "vllm_server_base_url",
        lambda s: s.generation == "colocate",
        "vllm_mode={vllm_mode!r} has no server",
    ),
    Rule(
        "no_effect",
        "vllm_server_host",
        lambda s: (
            s.use_vllm
            and s.vllm_mode == "server"
            and s.vllm_server_base_url
            and not is_this_machine(s.vllm_server_host)
        ),
        "vllm_server_base_url names the server",
        "leave one of the two out",
    ),
    # The launcher adds the address of a server that it has started at the stated port.
    Rule(
        "no_effect",
        "vllm_server_port",
        lambda s: (
            s.use_vllm
            and s.vllm_mode == "server"
            and s.vllm_server_base_url
            and not re.search(rf":{s.vllm_server_port}(/|$)", str(s.vllm_server_base_url))
        ),
        "vllm_server_base_url names the port",
        "leave one of the two out",
    ),
    Rule(
        "no_effect",
        "vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_model_impl",
        lambda s: s.generation == "server",
        "vllm_mode is server",
        "give it to the server",
    ),
    Rule(
        "no_effect",
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max",
        lambda s: s.use_vllm and not s.vllm_importance_sampling_correction,
        "vllm_importance_sampling_correction=False",
    ),
    Rule(
        "no_effect",
        "geometric_mask_.*",
        lambda s: s.vllm_importance_sampling_mode != "geometric_mask",
        "vllm_importance_sampling_mode={vllm_importance_sampling_mode} is not geometric_mask",
    ),
    Rule(
        "error",
        "staleness",
        lambda s: s.staleness and s.generation != "server",
        "needs a server that samples on its own (use_vllm={use_vllm}, vllm_mode={vllm_mode})",
        "set use_vllm: true and vllm_mode: server",
    ),
    Rule(
        "error",
        "staleness",
        lambda s: s.staleness and s.vllm_sync == "merged",
        "with vllm_sync={vllm_sync!r} would change the weights that a batch is being sampled by",
        "set vllm_sync to adapter",
    ),
    Rule(
        "error",
        "staleness",
        lambda s: s.staleness and not s.vllm_importance_sampling_correction,
        "trains on samples of an older policy, and vllm_importance_sampling_correction=False leaves it at that",
        "set vllm_importance_sampling_correction to true",
    ),
    Rule(
        "error",
        "vllm_share_weights",
        lambda s: s.vllm_share_weights and s.generation != "colocate",
        "needs an engine in the training process (use_vllm={use_vllm}, vllm_mode={vllm_mode})",
        "set use_vllm: true and vllm_mode: colocate",
    ),
    Rule(
        "error",
        "vllm_share_weights",
        lambda s: s.vllm_share_weights and s.vllm_sync == "merged",
        "with vllm_sync={vllm_sync!r} would merge the adapter into the weights that vLLM uses",
        "set vllm_sync to adapter",
    ),
    Rule(
        "error",
        "vllm_share_weights",
        lambda s: s.vllm_share_weights and s.vllm_tensor_parallel_size > 1,
        "does not work with vllm_tensor_parallel_size={vllm_tensor_parallel_size}, which splits each weight",
        "set vllm_tensor_parallel_size to 1",
    ),
    Rule(
        "error",
        "vllm_share_weights",
        lambda s: s.vllm_share_weights and s.cast_lm_head_to_fp32,
        "does not work with cast_lm_head_to_fp32, which copies the LM head",
        "leave cast_lm_head_to_fp32 out",
    ),
    # These change the distribution that vLLM samples from, and not the trainer's.
    Rule(
        "warning",
        "top_p top_k min_p repetition_penalty vllm_structured_outputs_regex",
        lambda s: (
            (s.top_p != 1 or s.top_k or s.min_p or s.repetition_penalty != 1 or s.vllm_structured_outputs_regex)
            and s.use_vllm
            and s.vllm_importance_sampling_correction
        ),
        "changes the distribution: vLLM's log-probs are of the changed one, the trainer's are not, so the ratio that "
        "corrects the loss is biased",
    ),
    Rule(
        "warning",
        "generation_kwargs",
        lambda s: (
            s.use_vllm
            and s.vllm_importance_sampling_correction
            and any(entries(s.generation_kwargs).get(name) for name in BIASING)
        ),
        "changes the distribution that vLLM's log-probs are of, and not the trainer's, so the ratio that corrects the"
        " loss is biased",
    ),
    Rule(
        "error",
        "vllm_server_base_url",
        lambda s: s.vllm_server_base_url and not is_address(s.vllm_server_base_url),
        *NO_ADDRESS,
    ),
]
PROGRAM_RULES = [
    Rule(
        "error",
        "generation_kwargs",
        lambda s: not _samples(entries(s.generation_kwargs)),
        "would not sample: the completions of a group would be alike",
    ),
    Rule(
        "error",
        "vllm_share_weights",
        lambda s: s.vllm_share_weights and s.load_in_8bit,
        "does not work with load_in_8bit, which vLLM lacks",
        "leave load_in_8bit out",
    ),
    Rule(
        "error",
        "use_bnb_nested_quant",
        lambda s: (
            s.vllm_share_weights and s.load_in_4bit and (not s.use_bnb_nested_quant or s.bnb_4bit_quant_type != "nf4")
        ),
        "(bnb_4bit_quant_type={bnb_4bit_quant_type!r}) is not how vLLM quantises the weights of vllm_share_weights",
        "set use_bnb_nested_quant: true and bnb_4bit_quant_type: nf4",
    ),
    # vLLM's loader of adapters refuses DoRA and modules_to_save (its PEFTHelper).
    Rule(
        "error",
        "use_dora lora_modules_to_save lora_target_parameters",
        lambda s: (s.use_dora or s.lora_modules_to_save or s.lora_target_parameters) and s.use_vllm and s.sends_adapter,
        "cannot be served by vLLM as an adapter",
        "set vllm_sync to merged",
    ),
    Rule(
        "error",
        "staleness vllm_share_weights",
        lambda s: (s.staleness or s.vllm_share_weights) and not s.use_peft,
        "needs an adapter: training changes the full weights, which vLLM uses at that time",
        "set use_peft to true",
    ),
    Rule("error", "lora_r", lambda s: s.use_vllm and s.sends_adapter and s.lora_r > RANKS[-1], *ABOVE),
    *(
        has_field("generation_kwargs", key, field)
        for key, field in {
            **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
            "cache_implementation": "cache_implementation",
            **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
            **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
        }.items()
    ),
]
