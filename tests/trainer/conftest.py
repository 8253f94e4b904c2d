"""A model whose training takes a moment, and what TRL's own trainer ends with, for the tests that compare with it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a random model whose tokens are characters."""
    from small_trainers import save_small

    folder = tmp_path_factory.mktemp("small")
    save_small(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chars(small):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small)


@pytest.fixture(scope="module")
def trl_run(small, chars, tmp_path_factory):
    """(rewards, settings) -> the weights before and after TRL's own run of them, and its log; each is run once."""
    from small_trainers import make, sample_apart, weights
    from trl import GRPOConfig, GRPOTrainer

    done = {}

    def run(rewards, settings, apart=False):
        key = (rewards.__name__, apart, *sorted((name, str(value)) for name, value in settings.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("trl")
            trainer = make(GRPOTrainer, GRPOConfig, small, chars, folder, rewards, logging_steps=1, **settings)
            if apart:
                sample_apart(trainer)
            before = weights(trainer.model)
            trainer.train()
            done[key] = before, weights(trainer.model), trainer.state.log_history
        return done[key]

    return run
