"""What vLLM cannot serve is refused by name; what is saved is what peft reads back; a scale is one of the effect."""

from contextlib import nullcontext

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from peft.helpers import rescale_adapter_scale
from small_generation import small_model
from small_vllm import adapted

from grpo_math.errors import ConfigError
from grpo_math.generation.adapter_store import AdapterStore
from grpo_math.generation.adapters import logps, refuse_unserved

PROMPT, COMPLETION = [5, 6, 7, 30], [11, 12, 13]


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
def test_what_vllm_cannot_serve_is_refused_by_name(settings, named, model):
    with pytest.raises(ConfigError, match=named + r".* cannot be synced as an adapter .*vllm_sync to merged"):
        refuse_unserved(adapted(model, **settings))


def test_other_kinds_of_adapters_are_refused(model):
    with pytest.raises(ConfigError, match="peft_type='IA3' cannot be synced as an adapter"):
        refuse_unserved(get_peft_model(model, IA3Config(target_modules=["q_proj"], feedforward_modules=[])))


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"lora_dropout": 0.5, "exclude_modules": ["lm_head"]}])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_a_saved_adapter_is_the_policy_with_its_effect_scaled(settings, scale, model, tmp_path):
    policy = adapted(model, **settings).train()
    refuse_unserved(policy)
    policy.add_adapter("ref", policy.peft_config["default"])
    gathered = []
    store = AdapterStore(policy, lambda parameters: nullcontext(gathered.extend(parameters)), tmp_path, 0)
    tensors = store.gather_next()
    assert len(gathered) == len(tensors) == 8  # A and B of two maps in two layers, without those of the reference
    store.write(tensors, scale)
    saved = PeftModel.from_pretrained(small_model(), store.current)
    plain = logps(policy, PROMPT, COMPLETION)
    with rescale_adapter_scale(policy, scale):
        ours = logps(policy, PROMPT, COMPLETION)
    assert torch.equal(logps(saved, PROMPT, COMPLETION), ours)
    assert torch.equal(logps(policy, PROMPT, COMPLETION), plain)
    assert torch.equal(plain, ours) == (scale == 1)
    assert policy.training
    assert policy.peft_config["default"].lora_alpha == 8
    if scale == 0:
        by_hand = small_model()(torch.tensor([PROMPT + COMPLETION])).logits[0].log_softmax(-1)
        assert torch.allclose(ours, by_hand[[3, 4, 5], COMPLETION])
