"""The small trainers of trainer_fixtures.py, for the tests of this folder."""

from trainer_fixtures import chars, ours, server, small, trainer_in, trl_run

__all__ = ["chars", "ours", "server", "small", "trainer_in", "trl_run"]
