"""A Llava with images, as small as small_trainers.py's model."""

import torch
from PIL import Image
from small_trainers import CHARACTERS, character_tokenizer
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
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
    tokenizer = character_tokenizer(IMAGE, template=TEMPLATE)
    tokenizer.image_token, tokenizer.image_token_id = IMAGE, len(CHARACTERS)
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
    text = {"vocab_size": len(CHARACTERS) + 1, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=LlamaConfig(**sizes, **text, pad_token_id=2, num_key_value_heads=2),
        vision_config=CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=16),
        image_token_index=len(CHARACTERS),
        image_seq_length=4,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [1], 2
    model.save_pretrained(folder)
    return str(folder), processor


def images(n):
    return [Image.new("RGB", (28, 28), (40 * i % 256, 10, 200)) for i in range(n)]
