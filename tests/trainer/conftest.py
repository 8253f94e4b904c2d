"""A model whose training takes a moment, and what TRL's own trainer ends with, for the tests that compare with it."""

import pytest
from small_trainers import STEPS


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


@pytest.fixture
def ours(small, chars, tmp_path):
    """(rewards, rows, settings) -> a trainer of ours on the small model; ``folder``: its run's, below ``tmp_path``."""
    from small_trainers import letters, make

    from grpo_math import MathGRPOConfig, MathGRPOTrainer

    def made(rewards=letters, rows=None, folder="", **settings):
        return make(MathGRPOTrainer, MathGRPOConfig, small, chars, tmp_path / folder, rewards, rows, **settings)

    return made


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
            trainer = make(GRPOTrainer, GRPOConfig, small, chars, folder, rewards, **STEPS, **settings)
            if apart:
                sample_apart(trainer)
            before = weights(trainer.model)
            trainer.train()
            done[key] = before, weights(trainer.model), trainer.state.log_history
        return done[key]

    return run
