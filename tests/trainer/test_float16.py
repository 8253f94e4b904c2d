"""float16 with a loss scale, on a CPU: torch's autocast and `GradScaler("cpu")`, in place of accelerate's for a GPU."""

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from small_families import tiny_model
from small_trainers import relative, scored
from torch.amp import GradScaler
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOTrainer

from grpo_math.errors import ConfigError
from grpo_math.packing import varlen
from grpo_math.packing.pack import GroupLayout
from grpo_math.run import metrics
from grpo_math.trainer.trainer import MathGRPOTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def in_float16(ours, monkeypatch):
    """A trainer like `ours`, as accelerate sets it up on a GPU without bfloat16."""

    def trainer_in(scale=2.0**16, **settings):
        trainer = ours(peft_config=LORA, optim="adamw_torch", logging_steps=1, **settings)
        monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = GradScaler("cpu", init_scale=scale)
        return trainer

    return trainer_in


@pytest.mark.slow
def test_the_gradient_in_float16_is_as_near_to_float32_as_in_bfloat16(in_float16, ours, small):
    truth, _, true_gradient = scored(GRPOTrainer, ours(peft_config=LORA))
    bfloat16 = scored(MathGRPOTrainer, ours(peft_config=LORA, bf16=True))
    base = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float16)
    logps, entropies, gradient = scored(MathGRPOTrainer, in_float16(model=base))
    assert {logps.dtype, entropies.dtype, gradient.dtype} == {torch.float32}
    assert 0 < relative(logps, truth) < relative(bfloat16[0], truth)
    assert 0 < relative(gradient, true_gradient) < relative(bfloat16[2], true_gradient)


@pytest.mark.slow
def test_a_step_that_overflows_at_its_scale_is_not_a_bad_one_and_the_scale_survives_a_resume(in_float16):
    settings = {"max_nonfinite_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = in_float16(2.0**100, max_steps=2, **settings)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    scales = {metrics.SKIPPED: [0.0, 0.0], metrics.OVERFLOWED: [1.0, 1.0], metrics.LOSS_SCALE: [2.0**100, 2.0**99]}
    history = trainer.state.log_history[:2]
    assert {name: [line[name] for line in history] for name in scales} == scales
    resumed = in_float16(max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[2][metrics.LOSS_SCALE] == 2.0**98


def test_a_loss_that_is_not_finite_is_a_bad_step_at_any_scale(in_float16):
    trainer = in_float16(max_steps=1, max_nonfinite_steps=2)
    loss_of = trainer.grpo_math.updates.loss_of

    def loss(*args):
        result = loss_of(*args)
        return result._replace(**{name: getattr(result, name) * torch.nan for name in ("loss", "policy_loss")})

    trainer.grpo_math.updates.loss_of = loss
    trainer.train()
    line = trainer.state.log_history[0]
    assert (line[metrics.SKIPPED], line[metrics.OVERFLOWED], trainer.grpo_math.nonfinite.in_a_row) == (1.0, 0.0, 1)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    "scores", [{}, {"window": 3}, {"softcap": 50.0}, {"sinks": torch.tensor([1.0, 600.0])}], ids=str
)
def test_attention_in_float16_stays_finite_where_products_exceed_its_largest_number(scores):
    q, k, v = (torch.randn(12, 2, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    q, k = 100 * q, 100 * k
    assert (q[:, 0] @ k[:, 0].T).abs().max() > torch.finfo(torch.float16).max
    groups, params = (GroupLayout(0, 4, (5, 3)),), varlen.AttentionParams(**scores)
    exact, half = (
        varlen.attend(*(t.half().to(dtype) for t in (q, k, v)), groups, params, varlen.one_by_one)
        for dtype in (torch.float32, torch.float16)
    )
    assert relative(half.float(), exact) < 0.01


def test_rows_with_large_activations_have_the_log_probs_and_entropies_of_float32(in_float16, ours, small):
    """Residuals of some ten thousands, as some models have them in their first tokens."""
    exact, base = (AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32) for _ in range(2))
    for model in (exact, base):
        embedding = model.get_input_embeddings().weight
        embedding.data *= 30_000 / embedding.abs().max()
    truth = scored(MathGRPOTrainer, ours(model=exact, peft_config=LORA))
    half = scored(MathGRPOTrainer, in_float16(model=base.half()))
    assert all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in half)
    assert max(relative(one, other) for one, other in zip(half, truth, strict=True)) < 0.05


@pytest.mark.slow
def test_the_adapter_of_a_4_bit_base_is_trained_in_float32(ours, tiny, monkeypatch, bitsandbytes):
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(tiny("wide"), quantization_config=quantised, dtype=torch.float16)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    trainer = ours(model=model, peft_config=LORA)
    assert {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    ("family", "message"),
    [("llama", "fp16=True cannot scale .* of float16 weights"), ("gemma3", "computes gemma3 .*issues/36822")],
)
def test_what_float16_cannot_train_is_refused(family, message, ours, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match=message):
        ours(model=tiny_model(family).half())
