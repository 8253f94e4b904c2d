"""A random Llama of 10,000 weights whose tokens are characters. A step of its training takes milliseconds."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHARACTERS = ["<|im_start|>", "<|im_end|>", "<pad>", "\n", *map(chr, range(32, 127))]
SIZES: dict[str, Any] = {
    "vocab_size": len(CHARACTERS),
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def character_tokenizer(*more: str, template: str = SMOLLM2_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are characters and the special tokens ``more``."""
    vocabulary = {token: number for number, token in enumerate([*CHARACTERS, *more])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        chat_template=template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        padding_side="left",
        additional_special_tokens=list(more),
    )


def save_tiny(folder: Any, **sizes: int) -> str:
    """Save the model and its tokenizer, and return the folder. ``sizes``: other than `SIZES`."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SIZES, **sizes})).eval()
    for parameter in model.parameters():
        # Far from the near-uniform start, so that log-probs differ.
        parameter.data.mul_(6.0 if parameter.dim() > 1 else 1.0)
    # One token in eight ends a completion, so that lengths differ.
    model.generation_config.eos_token_id = list(range(1, len(CHARACTERS), 8))
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)
