"""What TRL's own trainer ends with, for the tests that compare with it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def trl_weights(tiny, tokenizer, tmp_path_factory):
    """(rewards, settings) -> the weights before and after TRL's own run of them; each is run once."""
    from small_trainers import make, weights
    from trl import GRPOConfig, GRPOTrainer

    done = {}

    def run(rewards, settings):
        key = (rewards.__name__, *sorted(settings.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("trl")
            trainer = make(GRPOTrainer, GRPOConfig, tiny("llama"), tokenizer, folder, rewards, **settings)
            before = weights(trainer.model)
            trainer.train()
            done[key] = before, weights(trainer.model)
        return done[key]

    return run
