"""A model whose training takes a moment, and what TRL's own trainer ends with, for the tests that compare with it."""

import pytest
from small_trainers import KINDS, STEPS, letters, make, sample_apart, save_small
from small_vllm import server
from transformers import AutoTokenizer

from grpo_math import MathGRPOConfig, MathGRPOTrainer
from grpo_math.checks.compared import train

__all__ = ["server"]


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a random model whose tokens are characters."""
    return save_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def chars(small):
    return AutoTokenizer.from_pretrained(small)


@pytest.fixture(scope="session")
def trainer_in(small, chars):
    """A trainer of ours on the small model, or what else `make` is given, in a folder."""

    def made(
        folder,
        rewards=letters,
        rows=None,
        model=small,
        tokenizer=chars,
        trainer_class=MathGRPOTrainer,
        config_class=MathGRPOConfig,
        **settings,
    ):
        return make(trainer_class, config_class, model, tokenizer, folder, rewards, rows, **settings)

    return made


@pytest.fixture
def ours(trainer_in, tmp_path):
    """`trainer_in`, whose ``folder`` is below ``tmp_path``."""
    return lambda *args, folder="", **settings: trainer_in(tmp_path / folder, *args, **settings)


@pytest.fixture(scope="module")
def trl_run(trainer_in, tmp_path_factory):
    """(rewards, settings) -> the `Run` of TRL's own trainer; each is run once."""
    done = {}

    def run(rewards, settings, apart=False):
        key = (rewards.__name__, apart, *sorted((name, str(value)) for name, value in settings.items()))
        if key not in done:
            trainer = trainer_in(tmp_path_factory.mktemp("trl"), rewards, **KINDS["trl"], **STEPS, **settings)
            if apart:
                sample_apart(trainer)
            done[key] = train(trainer)
        return done[key]

    return run
