"""The plan's live memory against the bytes that a short run holds on the pretended GPU.

Does not check the LM head, because TRL's Triton kernel is not there. The vocabulary is small, so that the head that
computes in its place holds little.
"""

from __future__ import annotations

import pytest
from gpu_like.counting import memory
from peft import LoraConfig
from small_trainers import PROMPTS, make
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_math.planner import plan
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

WORDS = {"<pad>": 0, "<end>": 1, **{f"w{n}": n for n in range(2, 512)}}
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SETTINGS = {
    "bf16": True,
    "optim": "adamw_torch",
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 256,
    "max_steps": 2,
    "gradient_checkpointing": False,
}
LORA = {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
PLANNED = {"use_peft": True, "lora_r": 16, "lora_target_modules": LORA["target_modules"], "lora_dropout": 0.0}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_plan_says_what_is_live(kind, tmp_path):
    words = Tokenizer(models.WordLevel(WORDS, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).bfloat16()
    model.config.save_pretrained(tmp_path)
    adapter = None if kind == "full" else LoraConfig(**LORA, task_type="CAUSAL_LM")
    memory.reset()
    before = memory.allocated
    trainer = make(
        *(MathGRPOTrainer, MathGRPOConfig, model, tokenizer, tmp_path),
        **(SETTINGS | {"use_cpu": False, "peft_config": adapter}),
    )
    trainer.train()
    recipe = {"model_name_or_path": str(tmp_path), "dtype": "bfloat16", **SETTINGS, **(PLANNED if adapter else {})}
    longest = max(len(tokenizer(prompt).input_ids) for prompt in PROMPTS)
    phases = plan(recipe, gpus=1, gpu_gb=80, cpu_gb=64, prompt_tokens=longest)["phases"]
    terms = max(phases.values(), key=lambda terms: sum(terms.values()))
    live = sum(terms.values()) - terms["cuda_context"] - terms["allocator"]
    held = memory.peak - before
    assert live - terms["lm_head_workspace"] <= held <= 1.05 * live
