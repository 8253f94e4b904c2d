"""A tiny model of bytes, in memory, in a folder and on a server: a test with it takes a fraction of a second."""

import pytest
from small_generation import small_model
from small_model import byte_tokenizer
from small_vllm import SmallVLLM


@pytest.fixture
def model():
    return small_model()


@pytest.fixture(scope="session")
def byte_ids():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory, byte_ids):
    """The folder of the model and its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "bytes"
    small_model().save_pretrained(path)
    byte_ids.save_pretrained(path)
    return str(path)


@pytest.fixture
def small(folder):
    """A stand-in for a vLLM server of that model."""
    small = SmallVLLM(folder)
    yield small
    small.stop()
