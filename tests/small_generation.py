"""What the tests of generation share: tiny models of bytes, prompts, and a count of what is computed."""

from contextlib import contextmanager
from types import FunctionType

import torch
from transformers import AutoConfig, AutoModelForCausalLM

PROMPTS = ["What is 3 + 4?", "Hello", "A longer prompt, so that the others are padded", "x"]
BYTES = 256
VOCABULARY = BYTES + 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": BYTES,
    "eos_token_id": BYTES + 1,
    "pad_token_id": BYTES + 1,
}


def small_model(family="llama", scale=3.0, **settings):
    """A random model of a family, over bytes. One token in eight ends a completion, so that lengths differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **settings})).eval()
    for parameter in model.parameters():  # far from the near-uniform start, so that log-probs differ
        parameter.data.mul_(scale if parameter.dim() > 1 else 1.0)
    model.generation_config.eos_token_id = list(range(2, model.config.vocab_size, 8))
    return model


def of_library(hook):
    """The hook as code of torch: a hook of a script would switch packing off."""
    call = lambda *args, **kwargs: hook(*args, **kwargs)  # noqa: E731
    return FunctionType(call.__code__, {"__name__": "torch"}, closure=call.__closure__)


@contextmanager
def counted(model):
    """The shape of the input of every forward pass: the list that it yields."""
    shapes: list[tuple[int, int]] = []
    names = ("input_ids", "inputs_embeds")
    hook = model.register_forward_pre_hook(
        of_library(
            lambda module, args, kwargs: shapes.append(
                next(tuple(x.shape[:2]) for x in (*args, *map(kwargs.get, names)) if x is not None)
            )
        ),
        with_kwargs=True,
    )
    yield shapes
    hook.remove()
