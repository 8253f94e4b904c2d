"""A shared base in 4 bit, in an engine that stores weights as vLLM's loader of bitsandbytes does."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_generation import small_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_math.errors import ConfigError
from grpo_math.generation.four_bit import find_constants
from grpo_math.generation.shared import SharedBase, find_views, storage_address

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "up", "up_proj": "up"}
NESTED = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)


def fused(name):
    kind = next((kind for kind in FUSED if kind in name), None)
    return name.replace(kind, FUSED[kind]) if kind and name.endswith("weight") else name


class Engine(nn.Module):
    """Holds the bytes of fused weights one after the other, with the dequantised constants of each."""

    def __init__(self, state):
        super().__init__()
        functional = pytest.importorskip("bitsandbytes.functional")
        self.places, parts, states = {}, {}, {}
        for name, tensor in state.items():
            target = fused(name)
            if "_proj" in name and name.endswith("weight"):
                tensor, constants = functional.quantize_4bit(tensor, compress_statistics=True, quant_type="nf4")
                constants.absmax = functional.dequantize_blockwise(constants.absmax, constants.state2)
                constants.absmax += constants.offset
                constants.nested, constants.state2, constants.offset = False, None, None
                states.setdefault(target, {})[len(parts.get(target, []))] = constants
            before = parts.setdefault(target, [])
            self.places[name] = target, sum(map(len, before)), len(tensor)
            before.append(tensor)
        self.held = {name: nn.Parameter(torch.cat(tensors), requires_grad=False) for name, tensors in parts.items()}
        for name, parameter in self.held.items():
            self.register_parameter(name.replace(".", "_"), parameter)
            if name in states:
                parameter.bnb_quant_state = states[name]
                parameter.bnb_shard_offsets = torch.tensor([0, *map(len, parts[name])]).cumsum(0)

    def load_weights(self, weights):
        for name, tensor in weights:
            target, start, length = self.places[name]
            self.held[target].data.narrow(0, start, length).copy_(tensor)


def test_a_shared_base_computes_what_a_copy_in_4_bit_computes(tmp_path, bitsandbytes):
    small_model("qwen2").save_pretrained(tmp_path)  # with biases

    def make(path, **kwargs):
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)

    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(3)
    copy = get_peft_model(make(tmp_path, quantization_config=NESTED, dtype=torch.float32), adapter)
    base = SharedBase()
    model = base.create(make, str(tmp_path), quantization_config=NESTED, dtype=torch.float32)
    torch.manual_seed(3)
    policy = get_peft_model(model, adapter)
    assert all(p.untyped_storage().nbytes() <= 4 for n, p in policy.named_parameters() if "lora_" not in n)
    engine = Engine(small_model("qwen2").state_dict())
    before = {name: tensor.clone() for name, tensor in engine.held.items()}
    base.views = find_views(base.skeleton, engine)
    base.constants = find_constants(base.views, engine)
    base.attach(policy, torch.device("cpu"))
    inside = {storage_address(tensor) for tensor in engine.held.values()}
    assert all(storage_address(p) in inside for n, p in policy.named_parameters() if "lora_" not in n)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.held.items())
    assert model.is_loaded_in_4bit
    assert model.config.quantization_config is NESTED
    gradients = []
    for one in (copy, policy):
        logits = one(input_ids=torch.tensor([[1, 2, 3, 4]])).logits
        logits.sum().backward()
        gradients.append([logits, *(p.grad for p in one.parameters() if p.requires_grad)])
    assert len(gradients[0]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "setting", [{"bnb_4bit_quant_type": "fp4"}, {"bnb_4bit_use_double_quant": False}, {"load_in_8bit": True}]
)
def test_another_quantisation_than_vllms_is_refused(setting, tmp_path):
    small_model().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        **{
            "load_in_4bit": "load_in_8bit" not in setting,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        }
        | setting
    )
    with pytest.raises(ConfigError, match="nf4, with nested constants"):
        SharedBase().create(AutoModelForCausalLM.from_pretrained, str(tmp_path), quantization_config=config)
