"""On a real GPU: the gradient is TRL's, and the update is measured against TRL's. `grpo-math selftest` shows more."""

from pathlib import Path

import pytest
import torch
from benchmarks.update_phase import SHAPES, Shape, bench_update
from peft import LoraConfig
from small_trainers import make, padded_batch, weights
from trl import GRPOTrainer

from grpo_math.packing import varlen
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

pytestmark = pytest.mark.gpu
ALL_LINEAR = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
REHEARSED = Shape(prompt=5, longest=8, mean=1 / 2, groups=2)


@pytest.mark.parametrize("shape", ["gsm8k", "math", "equal"])
@pytest.mark.parametrize("lora_r", [16, 0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_is_that_of_trl(dtype, lora_r, shape, model, rehearsal, figure):
    """On the same rollouts. The speed is a figure to send."""
    measured = REHEARSED if rehearsal else SHAPES[shape]
    result = bench_update(model, measured, runs=1 if rehearsal else 5, dtype=dtype, lora_r=lora_r)
    says = "{ratio:.2f}x as fast as TRL, {shape}, {dtype}, LoRA rank {lora_r}".format(**{**result, "shape": shape})
    figure(says=f"{says}, gradients differ by {result['difference']:.0e}", **{**result, "model": Path(model).name})
    assert result["same"]
    if not rehearsal:
        assert result["waits_ours"] <= result["waits_trl"]
    if not rehearsal and dtype == "bfloat16":
        assert result["kernels"], "nothing was packed"
        assert varlen.NAMES[varlen.one_by_one] not in result["kernels"], "one call for each sequence"


def test_a_4_bit_base_is_scored_as_trl_scores_it_and_trains(model, tokenizer, tmp_path, figure):
    """With bitsandbytes' CUDA kernels, and its paged optimizer of 8 bit."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=quantised, dtype=torch.bfloat16)
    settings = {"use_cpu": False, "bf16": True, "max_steps": 3, "optim": "paged_adamw_8bit", "learning_rate": 1e-4}
    adapter = LoraConfig(**ALL_LINEAR)
    trainer = make(MathGRPOTrainer, MathGRPOConfig, base, tokenizer, tmp_path, peft_config=adapter, **settings)
    ids, mask, longest = padded_batch([7, 3, 12], 4, [5, 3, 9, 1])
    ids, mask = ids.cuda(), mask.cuda()
    scored = mask[:, -longest:].bool()
    with torch.no_grad():
        theirs, ours = (
            kind._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, longest)[0][scored]
            for kind in (GRPOTrainer, MathGRPOTrainer)
        )
    before = weights(trainer.model).float()
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    difference = (ours - theirs).abs().mean().item()
    peak = torch.cuda.max_memory_allocated()
    figure(says=f"log-probs differ by {difference:.0e}", mean_difference_of_log_probs=difference, peak_bytes=peak)
    assert difference < 0.1
    assert trainer.state.global_step == 3
    assert not torch.equal(weights(trainer.model).float(), before)
