"""A tiny model of bytes, in memory, in a folder and on a server: a test with it takes a fraction of a second."""

import pytest
from small_generation import small_model
from small_model import byte_tokenizer, small
from small_vllm import server

__all__ = ["server", "small"]


@pytest.fixture
def model():
    return small_model()


@pytest.fixture(scope="session")
def byte_ids():
    return byte_tokenizer()
