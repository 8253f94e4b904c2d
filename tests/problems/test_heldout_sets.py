"""The sets that are evaluated during training: which problems, which settings of transformers, and what is refused."""

from __future__ import annotations

import pytest

from grpo_math.errors import UserError
from grpo_math.problems.of_recipe import RecipeProblems, evaluation_settings
from grpo_math.settings.recipe import read
from grpo_math.settings.rules import PROGRAM, violations

EVERY = ("--heldout_every", "5")


def problems(*words):
    return RecipeProblems(read(["--dataset", "generated", "--output_dir", "run", *words]).sound().values)


def errors(*words):
    settings = read(["--dataset", "generated", "--output_dir", "run", *words]).sound().values
    return [str(line) for _, line in violations(settings, PROGRAM)]


def test_by_default_64_other_problems_than_before_and_after(tmp_path):
    asked = problems("--dataset", "generated:sums", *EVERY)
    (one,) = asked.during
    assert (one.data, len(one.rows), len(asked.held_out)) == ("generated:sums", 64, 128)
    assert not {row["problem"] for row in one.rows} & {row["problem"] for row in asked.held_out}
    (few,) = problems("--dataset", "generated:products", *EVERY).during
    assert len(few.rows) == 41, "there are no others"
    assert problems("--dataset", "generated:sums").during == []


def test_a_file_gives_the_rest_of_what_is_held_out_of_training(tmp_path):
    extra = tmp_path / "own.jsonl"
    extra.write_text("".join(f'{{"problem": "What is {i} + 1?", "answer": "{i + 1}"}}\n' for i in range(100)))
    asked = problems("--dataset", str(extra), "--eval_n", "4", *EVERY)
    (one,) = asked.during
    parts = [[row["problem"] for row in rows] for rows in (asked.rows, asked.held_out, one.rows)]
    assert list(map(len, parts)) == [90, 4, 6]
    assert len({*parts[0], *parts[1], *parts[2]}) == 100


def test_a_recipe_names_its_sets():
    sets = ['{"data": "generated:sums", "n": 3}', '{"data": "generated:products", "samples": 4, "temperature": 1}']
    asked = problems("--dataset", "generated:sums", "--eval_n", "8", "--heldout", *sets, *EVERY)
    first, second = asked.during
    assert (len(first.rows), first.samples, len(second.rows), second.samples, second.temperature) == (3, None, 41, 4, 1)
    assert not {row["problem"] for row in first.rows} & {row["problem"] for row in asked.held_out}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{"n": 3}', "is not a set to evaluate"),
        ('{"data": "generated", "n": "many"}', "is not a set to evaluate"),
        ('{"data": "generated", "size": 3}', "the keys are data, split, columns, n, samples, temperature"),
        ('{"data": "generated:nothing"}', "level='nothing' is not known"),
        ('{"data": "generated", "split": "nowhere"}', "heldout='nowhere'"),
    ],
)
def test_an_entry_that_is_no_set_is_refused(entry, message):
    with pytest.raises(UserError) as error:
        _ = problems("--heldout", entry, *EVERY).during
    assert message in str(error.value)


def test_a_set_that_is_named_twice_is_refused():
    with pytest.raises(UserError, match="names a set twice"):
        _ = problems("--heldout", '{"data": "generated"}', '{"data": "generated"}', *EVERY).during


def test_heldout_every_is_the_short_form_of_transformers_settings():
    first = "eval_generated_sums_accuracy"
    settings = problems("--dataset", "generated:sums", "--keep_best", *EVERY).settings
    steps = {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": first}
    # TRL requires whole groups in a batch of its own evaluation, and makes none.
    assert evaluation_settings(settings) == {**steps, "num_generations_eval": 1}
    settings = problems("--eval_strategy", "steps", "--keep_best", "--metric_for_best_model", "eval_x_n").settings
    assert evaluation_settings(settings) == {"num_generations_eval": 1}
    assert evaluation_settings(problems().settings) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*EVERY, "--eval_strategy", "epoch"], "both say when to evaluate"),
        (["--eval_strategy", "steps"], "eval_steps=None is missing"),
        (["--heldout", '{"data": "math500"}'], "nothing is evaluated during training"),
        (["--load_best_model_at_end"], "load_best_model_at_end=True needs evaluations during training"),
        (["--keep_best"], "keep_best=True needs evaluations during training"),
        (["--stop_at", "0.9"], "stop_at=0.9 needs evaluations during training"),
        (["--keep_best", "--save_strategy", "no", *EVERY], "has no checkpoints"),
        (["--save_strategy", "best"], "save_strategy='best' needs evaluations during training"),
        ([*EVERY, "--eval_n", "0", "--eval_dataset", "math500", "--heldout", '{"data": "gsm8k"}'], "has no effect"),
    ],
)
def test_settings_that_contradict_each_other(words, message):
    assert any(message in line for line in errors(*words)), errors(*words)


def test_settings_that_go_together():
    assert errors(*EVERY, "--load_best_model_at_end") == []
    assert errors("--eval_strategy", "epoch", "--heldout", '{"data": "math500"}') == []
