"""Training on the pretended GPU: no two devices meet, and it ends with the weights of a CPU.

Two steps each. In float32 the weights agree to rounding: the device computes with the CPU's kernels, but keys are
repeated for query heads, TRL's head leaves out what is not scored, and the largest micro-batch is tried first. In
bfloat16 they are near: CUDA's autocast rounds in other places than a CPU's.
"""

import pytest
import torch
import transformers
from accelerate import dispatch_model
from peft import LoraConfig
from small_trainers import PROMPTS, SMALL, make, relative, weights

from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
KINDS = {
    "full": {},
    "kl with lora": {"beta": 0.1, "peft_config": LORA},
    "resampling": {"resample_groups": 2},
    "reference refresh": {"beta": 0.1, "reference_refresh_steps": 1},
    "offloading with lora": {"activation_offloading": True, "gradient_checkpointing": True, "peft_config": LORA},
    "small passes": {"max_tokens_per_micro_batch": 40},
}
ROWS = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(PROMPTS * 4)]


def trained(tiny, tokenizer, folder, cpu: bool, **settings):
    """The trainable weights after two steps, on the CPU, and before."""
    settings = {**SMALL, "max_steps": 2, "use_cpu": cpu, **settings}
    if cpu:  # which has nothing to offload from
        settings.pop("activation_offloading", None)
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny(), tokenizer, folder, rows=ROWS, **settings)
    assert trainer.accelerator.device.type == ("cpu" if cpu else "cuda")
    before = weights(trainer.model).cpu()
    trainer.train()
    assert trainer.state.global_step == 2
    assert {p.device.type for p in trainer.model.parameters()} == {trainer.accelerator.device.type}
    return weights(trainer.model).cpu(), before


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_end_with_the_weights_of_a_cpu(kind, tiny, tokenizer, tmp_path):
    on_gpu, before = trained(tiny, tokenizer, tmp_path, False, **KINDS[kind])
    here, _ = trained(tiny, tokenizer, tmp_path, True, **KINDS[kind])
    assert relative(here, before) > 1e-4, "nothing was trained"
    assert relative(on_gpu - before, here - before) < 1e-5


@pytest.mark.parametrize(
    "precision",
    [{"bf16": True, "gradient_checkpointing": True}, {"fp16": True, "bf16": None}],
    ids=["bfloat16", "float16 with a loss scale"],
)
def test_an_adapter_in_float32_under_autocast_ends_near_that_of_float32(precision, tiny, tokenizer, tmp_path):
    on_gpu, before = trained(tiny, tokenizer, tmp_path, False, **precision, peft_config=LORA)
    here, _ = trained(tiny, tokenizer, tmp_path, True, peft_config=LORA)
    assert on_gpu.dtype == torch.float32
    assert 0 < relative(on_gpu - before, here - before) < 0.5


def test_a_model_with_layers_on_two_devices_is_not_packed_and_trains(tiny, tokenizer, tmp_path, caplog):
    """As TRL loads it in one process that sees two GPUs, with ``device_map="auto"``."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    model = dispatch_model(loaded, {**places, "model.rotary_emb": 0}, force_hooks=True)
    on_gpu, before = trained(lambda: model, tokenizer, tmp_path, False)
    here, _ = trained(tiny, tokenizer, tmp_path, True)
    assert relative(here, before) > 1e-4, "nothing was trained"
    assert relative(on_gpu - before, here - before) < 1e-5
    assert "has layers on several devices" in caplog.text
