"""What vLLM cannot serve is refused by name; what is saved is what peft reads back; a scale is one of the effect."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_math.errors import ConfigError
from grpo_math.generation.adapters import adapter_tensors, logps, refuse_unserved, save_adapter, scaled

PROMPT, COMPLETION = [5, 6, 7, 300], [11, 12, 13]


@pytest.fixture
def adapted(tiny):
    def make(**settings):
        base = AutoModelForCausalLM.from_pretrained(tiny())
        torch.manual_seed(0)
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **settings})
        model = get_peft_model(base, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.1)
        return model

    return make


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern="),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules='lm_head'"),
        ({"target_modules": ["embed_tokens"]}, "target_modules='embed_tokens'"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\]"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_name(settings, named, adapted):
    with pytest.raises(ConfigError, match=named + r".* cannot be synced as an adapter .*vllm_sync to merged") as error:
        refuse_unserved(adapted(**settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_a_saved_adapter_is_the_policy_with_its_effect_scaled(settings, scale, adapted, tiny, tmp_path):
    model = adapted(**settings)
    refuse_unserved(model)
    gathered = []
    tensors = adapter_tensors(model, lambda parameters: gathered.append(parameters) or nullcontext())
    assert len(gathered[0]) == len(tensors) == 8  # A and B of two maps in two layers
    save_adapter(model, tensors, tmp_path / "new" / "folder", scale)
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny()), tmp_path / "new" / "folder")
    plain = logps(model, PROMPT, COMPLETION)
    with scaled(model, scale):
        ours = logps(model, PROMPT, COMPLETION)
    assert torch.equal(logps(read, PROMPT, COMPLETION), ours)
    assert torch.equal(plain, ours) == (scale == 1)
    assert model.peft_config["default"].lora_alpha == 8


def test_the_reference_adapter_is_not_sent(adapted):
    model = adapted()
    model.add_adapter("ref", model.peft_config["default"])
    gathered = []
    tensors = adapter_tensors(model, lambda parameters: nullcontext(gathered.extend(parameters)))
    assert len(tensors) == len(gathered) == 8
    assert not any("ref" in name for name in tensors)
