"""Names of transformers: each supported version and family has one of them."""

from types import SimpleNamespace

import pytest

from grpo_math.generation.names import experts_for_trl, experts_per_token


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_trl_reads_the_number_of_experts_of_any_family_and_the_config_keeps_its_names(name):
    config = SimpleNamespace(**{name: 8})
    with experts_for_trl(config):
        assert config.num_experts == 8
    assert vars(config) == {name: 8}


def test_a_dense_config_has_no_number_of_experts():
    config = SimpleNamespace()
    with experts_for_trl(config):
        assert not hasattr(config, "num_experts")
    assert experts_per_token(config) == 1
    assert experts_per_token(SimpleNamespace(num_experts_per_tok=None, top_k_experts=2)) == 2
