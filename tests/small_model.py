"""A random Llama of 32,000 weights with a tokenizer of bytes: it is written, loaded and asked in milliseconds.

The fixtures are those of each package that imports them into its conftest.py. They import torch, because a conftest.py
would make the light tests of its package wait for it.
"""

from itertools import cycle

import pytest

from grpo_math.checks.tiny_model import SMOLLM2_TEMPLATE

END = "<|im_end|>"


def byte_tokenizer():
    """Return a tokenizer whose tokens are bytes, with the chat template and the special tokens of SmolLM2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": END, "pad_token": END}
    settings = {"padding_side": "left", "chat_template": SMOLLM2_TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, **special, **settings)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of the model and its tokenizer."""
    from small_generation import small_model

    folder = tmp_path_factory.mktemp("models") / "small"
    model = small_model(max_position_embeddings=2048)
    model.generation_config.eos_token_id = model.config.eos_token_id
    for part in (model, byte_tokenizer()):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def script(monkeypatch):
    """Let every model answer ``texts``: by problem, a text for each time that the problem is asked.

    Returns the list of the batches that are asked: their problems, and their seed.
    """
    from grpo_math.evaluation import engines
    from grpo_math.generation.completions import read_off

    def scripted(texts):
        batches, answers = [], {problem: cycle(texts_of_problem) for problem, texts_of_problem in texts.items()}

        def generator(model, request):
            def generate(prompts, seed):
                problems = [next(p for p in texts if p in model.tokenizer.decode(prompt)) for prompt in prompts]
                batches.append((problems, seed))
                tokens = [model.tokenizer.encode(next(answers[problem]) + END) for problem in problems]
                return [read_off(model.tokenizer, ids[: request.max_new_tokens], [ids[-1]]) for ids in tokens]

            return generate

        monkeypatch.setattr(engines.Model, "generator", generator)
        return batches

    return scripted
