"""A measurement is a formula of tokens and keys: what it says of a row that was not among its sizes."""

import pytest

from grpo_math.planner.measure import fitted, highest
from grpo_math.planner.memory import Precision, at, how_of
from grpo_math.planner.model import shape_of
from grpo_math.planner.settings import resolve
from grpo_math.planner.work import Work

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
SIZES = [[1.0, 10.0, 10.0], [1.0, 20.0, 20.0], [1.0, 20.0, 30.0]]


def test_a_moment_of_the_same_allocations_is_a_line_and_any_other_stretch_its_highest():
    same = [[[7 + 3 * int(t) + 2 * int(k), 5]] for _, t, k in SIZES]
    assert fitted(same, SIZES) == [[[7.0, 3.0, 2.0], [5.0, 0.0, 0.0]]]
    other = [[[1, 5], [7 + 3 * int(t)][:1]] for _, t, k in SIZES]
    assert fitted(other, SIZES)[1] == [[7.0, 3.0, 0.0]]
    assert fitted([[[1, 9, 4]]], SIZES) == [[[9.0, 0.0, 0.0]]]
    assert highest([[[7.0, 3.0, 2.0], [5.0, 0.0, 0.0]]], SIZES) == [[7.0, 3.0, 2.0]]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", "4 bit", "full"])
def test_the_formula_says_what_another_row_takes(kind):
    shape = shape_of("small", {"model_type": "qwen2", **SMALL})
    fields = {"use_peft": kind != "full", "lora_target_modules": "all-linear", "load_in_4bit": kind == "4 bit"}
    work = Work(300, [[500] * 4, [500, 500, 40]])
    how = how_of(shape, resolve(fields), Precision(2, 4, True), 3)
    groups = [{"prompt": 299, "lengths": lengths} for lengths in work.groups]
    formula, row = shape.measured(how), shape.measured({**how, "row": groups})
    for name in ("forward", "backward"):
        assert at(formula[name], work.sizes) == pytest.approx(row[name][0], rel=0.01)
    highest_of = [max(at(line, work.sizes) for line in output["moments"]) for output in (formula, row)]
    assert highest_of[0] == pytest.approx(highest_of[1], rel=0.02)
