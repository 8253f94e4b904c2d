"""What several tests share: the embedded model, tiny models of the common families, and a tokenizer for them."""

from __future__ import annotations

import os

# Before any test imports them: no network, no forked tokenizer threads, no chatter.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_like import device as pretended_gpu
from progress import Progress

pretended_gpu.begin()  # before any test imports torch, too

collect_ignore = ["processes"]  # programs that tests start

# A shell that runs the tests in the background has them ignore Ctrl-C, nohup a hangup, and so would what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


MODELS = {"smollm", "tokenizer", "tiny"}  # fixtures that load a model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", dest="everything", help="also the tests marked full")
    parser.addoption("--fast", action="store_true", help="only tests that take well under a second")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Select the tier: --fast, the default, or --all. A test that is named by its id always runs."""

    def selected(item: pytest.Item) -> bool:
        if config.getoption("--fast") and (
            item.get_closest_marker("slow") or MODELS & set(getattr(item, "fixturenames", ()))
        ):
            return False
        full = item.get_closest_marker("full")
        return full is None or any(case in item.name for case in full.kwargs.get("keep", ()))

    if not (config.getoption("everything") or any("::" in argument for argument in config.args)):
        config.hook.pytest_deselected(items=[item for item in items if not selected(item)])
        items[:] = [item for item in items if selected(item)]
    # The slowest files first, so that the two processes end at about the same time.
    seconds: Counter[Path] = Counter()
    for item in items:
        seconds[item.path] += 10 if item.get_closest_marker("full") else bool(item.get_closest_marker("slow"))
    items.sort(key=lambda item: -seconds[item.path])
    # In a random order of the tests, too, the blocks of a page run from its top.
    pages = [item for item in items if item.path.name == "test_readme.py"]
    yield
    left = set(items)  # -m and -k may have deselected some
    places = [position for position, item in enumerate(items) if item.path.name == "test_readme.py"]
    for position, item in zip(places, [page for page in pages if page in left], strict=True):
        items[position] = item


@pytest.fixture(autouse=True)
def variables_of_one_test() -> Iterator[None]:
    """Give the environment's variables back after each test: a command that runs in this process may set some."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    folder = os.environ.get("GRPO_MATH_DATA")
    if not folder:
        pytest.skip("GRPO_MATH_DATA names no folder with GSM8K and MATH")
    return Path(folder)


@pytest.fixture(scope="session")
def smollm() -> str:
    """The embedded model's folder: real pretrained weights."""
    from grpo_math.generation.embedded import embedded_model

    return str(embedded_model())


@pytest.fixture(scope="session")
def tokenizer(smollm):
    from grpo_math.generation.models import load_tokenizer

    return load_tokenizer(smollm)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """family -> the folder of a tiny random model of that family, float32, with the embedded model's tokenizer."""
    import torch
    from transformers import (
        GemmaConfig,
        GemmaForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    shape = {
        "vocab_size": 49152,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}  # as many as a block of 4-bit weights has
    classes = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False)),
        "gemma": lambda: GemmaForCausalLM(GemmaConfig(**shape)),
        "wide": lambda: LlamaForCausalLM(LlamaConfig(**shape | wide, tie_word_embeddings=False)),
        # vLLM on a CPU takes no smaller head.
        "served": lambda: LlamaForCausalLM(LlamaConfig(**shape | {"head_dim": 32}, tie_word_embeddings=False)),
    }
    made: dict[str, str] = {}

    def folder(family: str = "llama") -> str:
        if family not in made:
            torch.manual_seed(0)
            model = classes[family]()
            for parameter in model.parameters():  # far from the near-uniform start, so that log-probs differ
                parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
            # One token in eight ends a completion, so that lengths differ.
            model.generation_config.eos_token_id = list(range(2, shape["vocab_size"], 8))
            path = tmp_path_factory.mktemp("models") / family
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
            made[family] = str(path)
        return made[family]

    return folder
