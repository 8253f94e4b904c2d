"""A Llava with images, as small as small_trainers.py's model."""

import torch
from PIL import Image
from small_trainers import CHARACTERS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

IMAGE = "<image>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_llava(folder):
    """Save the model, and return its folder and its processor."""
    vocabulary = {character: number for number, character in enumerate([*CHARACTERS, IMAGE])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        padding_side="left",
        additional_special_tokens=[IMAGE],
        chat_template=TEMPLATE,
    )
    tokenizer.image_token, tokenizer.image_token_id = IMAGE, vocabulary[IMAGE]
    size = {"height": 28, "width": 28}
    processor = LlavaProcessor(
        image_processor=LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(**sizes, **text, pad_token_id=2, num_key_value_heads=2),
        vision_config=CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=16),
        image_token_index=vocabulary[IMAGE],
        image_seq_length=4,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [1], 2
    model.save_pretrained(folder)
    return str(folder), processor


def images(n):
    return [Image.new("RGB", (28, 28), (40 * i % 256, 10, 200)) for i in range(n)]
