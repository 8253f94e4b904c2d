"""Random changes of shipped recipes get a plan, or one line about what is wrong, and the same answer twice."""

from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grpo_math.errors import UserError
from grpo_math.planner import plan
from grpo_math.settings.fields import fields
from grpo_math.settings.recipe import check
from grpo_math.settings.rules import violations
from grpo_math.settings.run_settings import RunSettings

RECIPES = [yaml.safe_load(path.read_text()) for path in sorted(Path("launch/configs").glob("*_?gpu.yaml"))]
RECIPES += [yaml.safe_load(Path("launch/configs", f"{name}.yaml").read_text()) for name in ("gsm8k_8gb", "t4_16gb")]
NUMBERS = {"int": st.integers(0, 64) | st.sampled_from([1024, 10**6]), "float": st.floats(0, 2), "bool": st.booleans()}
# Fields of the plan: sizes, and what decides who holds which weights.
PLANNED = [
    name
    for name, field in fields().items()
    if field.kinds and NUMBERS.keys() & {*field.kinds} and not name.startswith(("eval_", "logging_", "push_", "save_"))
]


def changed_values(name: str) -> st.SearchStrategy:
    return st.one_of([NUMBERS[kind] for kind in fields()[name].kinds if kind in NUMBERS])


CHANGES = st.lists(st.sampled_from(PLANNED), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: changed_values(name) for name in names})
)


def answer(recipe: dict, changes: dict, gpus: int, gpu_gb: int) -> object:
    try:
        checked = {name: check(name, value) for name, value in changes.items()}
        return plan(RunSettings({**recipe, **checked}), gpus=gpus, gpu_gb=gpu_gb, cpu_gb=256)
    except UserError as error:
        return str(error)


@pytest.mark.slow
@given(st.sampled_from(RECIPES), CHANGES, st.sampled_from([1, 2, 8]), st.sampled_from([8, 24, 80]))
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
def test_a_changed_recipe_is_planned_or_refused_in_one_line_twice_alike(recipe, changes, gpus, gpu_gb):
    assert all("\n" not in str(line) for _, line in violations(RunSettings({**recipe, **changes})))
    first = answer(deepcopy(recipe), changes, gpus, gpu_gb)
    assert first == answer(deepcopy(recipe), changes, gpus, gpu_gb)
    assert not isinstance(first, str) or "\n" not in first
    if isinstance(first, dict):
        assert first["peak_gb"] > 0
        assert min(size for terms in first["phases"].values() for size in terms.values()) >= 0
