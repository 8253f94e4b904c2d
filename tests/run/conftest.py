"""A model that is small enough for the quick tests of training."""

from __future__ import annotations

import pytest
from small_runs import write_letters_model


@pytest.fixture(scope="session")
def letters_model(tmp_path_factory):
    """The folder of a random model whose tokens are letters."""
    return write_letters_model(tmp_path_factory.mktemp("letters"))
