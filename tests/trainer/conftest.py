"""What TRL's own trainer ends with, for the tests that compare with it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def trl_run(tiny, tokenizer, tmp_path_factory):
    """(rewards, settings) -> the weights before and after TRL's own run of them, and its log; each is run once."""
    from small_trainers import make, sample_apart, weights
    from trl import GRPOConfig, GRPOTrainer

    done = {}

    def run(rewards, settings, apart=False):
        key = (rewards.__name__, apart, *sorted((name, str(value)) for name, value in settings.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("trl")
            trainer = make(
                GRPOTrainer, GRPOConfig, tiny("llama"), tokenizer, folder, rewards, logging_steps=1, **settings
            )
            if apart:
                sample_apart(trainer)
            before = weights(trainer.model)
            trainer.train()
            done[key] = before, weights(trainer.model), trainer.state.log_history
        return done[key]

    return run
