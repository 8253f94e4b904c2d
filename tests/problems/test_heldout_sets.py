"""The sets that are evaluated during training: which problems, which settings of transformers, and what is refused."""

import json

import pytest

from grpo_math.errors import UserError
from grpo_math.problems.from_recipe import RecipeProblems, evaluation_settings
from grpo_math.settings.recipe import read

EVERY = ("--heldout_every", "5")


def problems(*words):
    return RecipeProblems(
        read(["--dataset", "generated", "--output_dir", "run", *words]).raise_first_problem().settings
    )


def write(path, n):
    # One problem twice.
    path.write_text("".join(f'{{"problem": "What is {i} + 1?", "answer": "{i + 1}"}}\n' for i in [*range(n), 0]))
    return str(path)


def names(rows):
    return {row["problem"] for row in rows}


@pytest.mark.parametrize(
    ("words", "before_and_after", "during"),
    [
        (["--dataset", "generated:sums"], 128, None),
        (["--dataset", "generated:sums", *EVERY], 128, 64),
        (["--dataset", "generated:sums", "--eval_n", "200", "--eval_on_start"], 200, 64),
        (["--dataset", "generated:sums", "--eval_n", "0", *EVERY], 0, 64),
        (["--dataset", "generated:sums", "--eval_n", "0"], 0, None),
        (["--dataset", "generated:products", *EVERY], 41, 41),  # there are no others
    ],
)
def test_by_default_64_other_problems_than_before_and_after(words, before_and_after, during):
    asked = problems(*words)
    whole, sets, _ = asked.evaluation
    assert len(whole.rows if whole else []) == before_and_after
    assert [len(one.rows) for one in sets] == [during] * (during is not None)
    for one in sets:
        assert (one.data, one.split, one.samples, one.temperature) == (words[1], "test", 1, 0.0)
        assert during == 41 or whole is None or not names(one.rows) & names(whole.rows)
    assert asked.sample(100) == asked.rows[:: len(asked.rows) // 100 + 1]


@pytest.mark.parametrize(
    ("n", "words", "sizes"),
    [
        (100, ["--eval_n", "4", *EVERY], (90, 4, [10])),  # not 6
        (2600, ["--eval_n", "200", *EVERY], (2344, 200, [64])),  # not 56
        (100, ["--eval_n", "0", *EVERY], (90, 0, [10])),
        (100, [], (90, 10, [])),
        (9, EVERY, (9, 9, [9])),
        (2600, ["--eval_n", "300"], (2344, 256, [])),
        (100, ["--eval_n", "0"], (100, 0, [])),
        (100, ["--eval_split", "train[:20]", "--dataset_split", "train[20:100]", *EVERY], (80, 20, [20])),
        (100, ["--eval_dataset", "generated:sums", *EVERY], (100, 128, [64])),
    ],
)
def test_a_file_holds_a_tenth_out_of_training_for_the_evaluations(tmp_path, n, words, sizes):
    asked = problems("--dataset", write(tmp_path / "own.ndjson", n), *words)
    whole, sets, _ = asked.evaluation
    train, held_out, during = names(asked.rows), names(whole.rows if whole else []), [names(one.rows) for one in sets]
    assert (len(train), len(held_out), [*map(len, during)]) == sizes
    assert sum(sizes[:2]) + sum(sizes[2]) != n or len(train.union(held_out, *during)) == n


def test_a_line_says_what_is_evaluated_by_default(tmp_path):
    file = write(tmp_path / "own.jsonl", 100)
    divided = (
        f"10 of the 101 problems of {file} are held out of training by a hash, to evaluate on "
        "(dataset_split and eval_split choose others)"
    )
    assert problems("--dataset", file, "--eval_n", "4").evaluation.line == divided
    assert problems("--dataset", file).evaluation.line == (
        f"{divided}; before and after training 10 problems of {file}, test, are evaluated: 20 additional completions "
        "(eval_n: 0 turns it off)"
    )
    assert problems("--eval_n", "0").evaluation.line is None
    none = problems("--eval_dataset", str(tmp_path / "nowhere.csv"))
    assert none.evaluation.line.startswith(
        f"no evaluation before and after training: {tmp_path}/nowhere.csv cannot be read (No such file"
    )
    assert (none.overlap, none.evaluation.before_and_after) == (None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--eval_split", "x", "--eval_n", "1"], "eval_split='x'"),
        (["--eval_split", "x", *EVERY], "eval_split='x' is not known"),
        (["--eval_dataset", "gsm9k", "--eval_n", "1"], "eval_dataset='gsm9k' is not known"),
        (
            ["--dataset", "generated:products", "--eval_n", "99"],
            "eval_n=99 is more than the 41 problems of generated:pro",
        ),
        (["--heldout", '{"n": 3}', *EVERY], "is not a set to evaluate"),
        (["--heldout", '{"n": 3}'], "is not a set to evaluate"),  # nothing evaluates it, but `evaluate --run` reads it
        *(
            (["--heldout", json.dumps({"data": "generated", **value}), *EVERY], "is not a set to evaluate")
            for value in (
                *({"n": n} for n in ("many", True, None, 1.5, 0, -5)),
                *({"samples": 2.0}, {"samples": True}, {"temperature": "1"}, {"temperature": False}),
                *({"columns": 3}, {"split": 1}, {"data": 7}),
            )
        ),
        (["--heldout", '{"data": "x", "size": 3}', *EVERY], "the keys are data, split, columns, n, samples, temp"),
        (["--heldout", '{"data": "generated:nothing"}', *EVERY], "level='nothing' is not known"),
        (["--heldout", '{"data": "generated", "split": "nowhere"}', *EVERY], "heldout='nowhere'"),
        (["--heldout", *['{"data": "generated"}'] * 2, *EVERY], "names a set twice"),
    ],
)
def test_problems_that_cannot_be_read_are_refused_under_the_name_of_their_setting(words, message):
    asked = problems(*words)
    with pytest.raises(UserError, match=message):
        _ = asked.evaluation


def test_a_set_of_heldout_has_columns_of_its_own(tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"frage": "What is 3 + 4?", "gold": "7"}\n')
    entry = {"data": str(tmp_path / "odd.jsonl")}
    words = ("--eval_n", "0", *EVERY, "--heldout")
    with pytest.raises(UserError, match="in heldout columns: problem=frage;"):
        _ = problems(*words, json.dumps(entry)).evaluation
    (one,) = problems(*words, json.dumps({**entry, "columns": {"problem": "frage"}})).evaluation.during
    assert names(one.rows) == {"What is 3 + 4?"}


def test_a_recipe_names_its_sets():
    sets = ['{"data": "generated:sums", "n": 3}', '{"data": "generated:products", "samples": 4, "temperature": 1}']
    asked = problems("--dataset", "generated:sums", "--eval_n", "8", "--heldout", *sets, *EVERY)
    whole, (first, second), _ = asked.evaluation
    assert (len(first.rows), first.samples, len(second.rows), second.samples, second.temperature) == (3, None, 41, 4, 1)
    assert not names(first.rows) & names(whole.rows)
    assert asked.overlap["n"] == 8
    assert problems("--heldout", *sets).evaluation.during == []


BEST = {"metric_for_best_model": "eval_generated_accuracy"}
STEPS = {"eval_strategy": "steps", "eval_steps": 5, "num_generations_eval": 1}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (EVERY, STEPS),
        (["--keep_best", *EVERY], STEPS | BEST),
        (
            ["--keep_best", "--dataset", "generated:sums", *EVERY],
            STEPS | {"metric_for_best_model": "eval_generated_sums_accuracy"},
        ),
        (["--keep_best", "--save_total_limit", "1", *EVERY], STEPS | BEST | {"save_total_limit": 2}),
        (["--keep_best", "--save_total_limit", "3", *EVERY], STEPS | BEST),
        (["--save_total_limit", "1", *EVERY], STEPS),
        (["--load_best_model_at_end", *EVERY], STEPS | BEST),
        (
            ["--save_strategy", "best", "--eval_dataset", "gsm8k", *EVERY],
            STEPS | {"metric_for_best_model": "eval_gsm8k_accuracy"},
        ),
        (["--lr_scheduler_type", "reduce_lr_on_plateau", *EVERY], STEPS | BEST),
        (["--eval_strategy", "steps", "--keep_best", "--metric_for_best_model", "x"], {"num_generations_eval": 1}),
        (["--eval_on_start"], {"num_generations_eval": 1}),
    ],
)
def test_heldout_every_and_keep_best_are_short_forms_of_transformers_settings(words, expected):
    # TRL requires whole groups in a batch of its own evaluation, and makes none: num_generations_eval.
    assert evaluation_settings(problems(*words).settings) == expected
