"""The defaults that the planner reads out of source text are those of the classes that training reads a recipe with."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from grpo_math.errors import ConfigError
from grpo_math.planner.settings import DEFAULTS, PLANNED, resolve


@pytest.mark.slow
def test_a_default_is_that_of_the_real_class():
    from grpo_math.trainer.from_recipe import CLASSES

    every = [field for kind in CLASSES for field in fields(kind)]
    real = {f.name: f.default_factory() if f.default is MISSING else f.default for f in every}
    assert {name: getattr(real[name], "value", real[name]) for name in PLANNED} == DEFAULTS


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"dtype": "bf16"}, "dtype='bf16'"),
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"load_in_4bit": True}, "load_in_4bit=True"),
        ({"fsdp": "full_shard"}, "fsdp='full_shard'"),
        ({"attn_implementation": "paged"}, "attn_implementation='paged'"),
    ],
)
def test_what_cannot_be_planned_is_refused_on_one_line(recipe, named):
    with pytest.raises(ConfigError) as refused:
        resolve(recipe)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_model_init_kwargs_win_over_the_fields_that_they_repeat():
    assert resolve({"dtype": "float32", "model_init_kwargs": {"dtype": "bfloat16"}})["dtype"] == "bfloat16"
