"""Reject adapters that vLLM cannot serve, and compute log-probs as the canary compares them.

vLLM adds ``lora_alpha / r * B A`` to linear layers, with the same rank and alpha in every layer. It rejects other
contents of an adapter late, ignores them, or scales them wrongly.
"""

from typing import Any

import torch
from peft import LoraConfig, PeftType
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from grpo_math.errors import ConfigError

# The adapter that TRL trains. The adapter "ref" is the reference.
ADAPTER = "default"
MERGED = "leave it out, or set vllm_sync to merged"
# Settings of `peft.LoraConfig` that may differ from peft's defaults. With any other setting, the policy is more than
# the base and one low-rank term for each layer, all with the same lora_alpha / r.
SERVED = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "megatron_config", "megatron_core"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# Ways of initialising that also change base weights.
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def refuse_unserved(model: Any) -> None:
    """Raise `ConfigError` for the first setting of the trained adapter that vLLM would serve differently."""
    config, head = model.peft_config[ADAPTER], model.get_output_embeddings()
    if config.peft_type != PeftType.LORA:
        raise _refusal("peft_type", getattr(config.peft_type, "value", config.peft_type), "vLLM takes LoRA alone")
    defaults = vars(LoraConfig())
    for name, value in vars(config).items():
        if name not in SERVED and value and value != defaults.get(name):
            raise _refusal(name, value, "vLLM adds one low-rank term to each layer, and nothing else")
    if str(config.init_lora_weights).lower().startswith(CHANGE_THE_BASE):
        raise _refusal("init_lora_weights", config.init_lora_weights, "it changes the base, which vLLM has unchanged")
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            base = layer.get_base_layer()
            if isinstance(base, nn.Embedding | nn.modules.conv._ConvNd) or layer is head or base is head:
                raise _refusal("target_modules", name.rsplit(".", 1)[-1], "vLLM adapts only linear layers")


def _refusal(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError(name, value, f"cannot be synced as an adapter ({reason})", MERGED)


@torch.no_grad()
def logps(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Return log-probs (T,) of a completion's tokens in float32, at temperature 1 and without dropout."""
    device = next(model.parameters()).device
    ids = torch.tensor([prompt + completion], device=device)
    was_training = model.training
    model.eval()
    # The logits of a position predict the next token: begin one position early, and drop the last.
    logits = model(input_ids=ids, logits_to_keep=len(completion) + 1, use_cache=False).logits[0, :-1]
    model.train(was_training)
    return logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
