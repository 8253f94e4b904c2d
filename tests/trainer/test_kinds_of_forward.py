"""Packed updates under the settings that change what a forward pass is: quantised bases, autocast, a vLLM's log-probs.

Each is held to TRL's own way on the same trainer or the same rollouts.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from small_trainers import SMALL, make, padded_batch, relative, weights
from trl import GRPOConfig, GRPOTrainer

from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def scored_both_ways(trainer, **kwargs):
    """(log-probs, gradient) of TRL's method and of ours."""
    ids, mask, longest = padded_batch([7, 3, 12], 4, [5, 3, 9, 1])
    scored = mask[:, -longest:].bool()
    results = []
    for kind in (GRPOTrainer, MathGRPOTrainer):
        trainer.model.zero_grad()
        logps, _, _ = kind._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, longest)
        (logps * scored).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])
        results.append((logps.detach() * scored, gradient))
    return results


def test_a_4_bit_base_with_lora_is_scored_as_trl_scores_it(tiny, tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    # Widths of 64, which bitsandbytes quantises in whole blocks.
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**widths, vocab_size=49152, eos_token_id=2)).save_pretrained(tmp_path / "model")
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=quantised, dtype=torch.float32)
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
    trainer = make(MathGRPOTrainer, MathGRPOConfig, model, tokenizer, tmp_path, peft_config=LoraConfig(**LORA))
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:  # TRL makes a quantised model's adapter bfloat16, whose rounding would hide a difference
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    (plain, plain_gradient), (ours, gradient) = scored_both_ways(trainer)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)
    assert relative(gradient, plain_gradient) < 1e-5
    trainer.train()
    assert trainer.state.global_step == 5


def test_autocast_changes_the_packed_pass_as_little_as_the_plain_one(tiny, tokenizer, tmp_path):
    exact = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path)
    mixed = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, bf16=True)
    (truth, true_gradient), _ = scored_both_ways(exact)
    (plain, plain_gradient), (ours, gradient) = scored_both_ways(mixed)
    assert 0 < relative(plain, truth) < 0.1
    assert relative(ours, truth) < 1.5 * relative(plain, truth)
    assert relative(gradient, true_gradient) < 1.5 * relative(plain_gradient, true_gradient)


def test_the_reference_of_an_adapter_is_scored_with_the_adapter_off(tiny, tokenizer, tmp_path):
    runs = []
    for kind, config_class, own in (
        (GRPOTrainer, GRPOConfig, {}),
        (MathGRPOTrainer, MathGRPOConfig, {"advantage_eps": 1e-4}),
    ):
        settings = {**SMALL, "beta": 0.5, "num_iterations": 2, "peft_config": LoraConfig(**LORA), **own}
        trainer = make(kind, config_class, tiny("llama"), tokenizer, tmp_path, **settings)
        trainer.train()
        runs.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad]))
    assert relative(runs[1], runs[0]) < 1e-5


@pytest.mark.full(keep=["[grpo]"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo"])
def test_the_importance_correction_of_a_vllm_follows_its_row(loss_type, tiny, tokenizer, tmp_path):
    """A vLLM's own log-probs are made up here: what is tested is that each row keeps them wherever it goes."""
    runs = []
    for kind, config_class, own in (
        (GRPOTrainer, GRPOConfig, {}),
        (MathGRPOTrainer, MathGRPOConfig, {"advantage_eps": 1e-4}),
    ):
        trainer = make(kind, config_class, tiny("llama"), tokenizer, tmp_path, **SMALL, loss_type=loss_type, **own)
        generate = trainer._generate_and_score_completions

        def with_sampler(inputs, trainer=trainer, generate=generate):
            trainer.use_vllm = False
            output = generate(inputs)
            trainer.use_vllm = True
            generator = torch.Generator().manual_seed(trainer.state.global_step)
            shape = output["completion_mask"].shape
            output["importance_sampling_ratio"] = 0.5 + torch.rand(shape, generator=generator)
            output["sampling_per_token_logps"] = torch.rand(shape, generator=generator)
            return output

        trainer._generate_and_score_completions = with_sampler
        trainer.vllm_importance_sampling_correction = True
        before = weights(trainer.model)
        trainer.train()
        runs.append(weights(trainer.model))
    assert relative(runs[0], before) > 1e-4
    assert relative(runs[1], runs[0]) < 1e-6
