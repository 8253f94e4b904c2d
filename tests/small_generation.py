"""What the tests of generation share: tiny families, prompts, and a count of what is computed."""

from __future__ import annotations

from contextlib import contextmanager

from transformers import AutoModelForCausalLM

FAMILIES = ("llama", "qwen2", "qwen3", "gemma")
PROMPTS = ["What is 3 + 4?", "Hello", "A longer prompt, so that the others are padded", "x"]
SAMPLED = {"do_sample": True, "top_k": 0}


def load(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


@contextmanager
def counted(model):
    """The shape of the input of every forward pass: the list that it yields."""
    shapes: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple((*args, kwargs.get("input_ids"))[0].shape)), with_kwargs=True
    )
    yield shapes
    hook.remove()
