"""The arithmetic of a batch, against brute force and against TRL's own checks."""

import itertools

import pytest

from grpo_math.errors import ConfigError
from grpo_math.settings.batch import Batch, divides, resolve_batch, solve
from grpo_math.settings.run_settings import RunSettings


def planned(processes=1, **given) -> Batch:
    return resolve_batch(RunSettings(given), processes)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 4, 7, 64])
def test_a_solution_makes_the_step_with_the_most_rows_that_the_limit_allows(processes, limit):
    for prompts, generations in itertools.product(range(1, 20), (2, 5, 8)):
        total = prompts * generations
        possible = [
            (rows, steps)
            for rows in range(1, limit + 1)
            for steps in range(1, total + 1)
            if processes * rows * steps == total
        ]
        if possible:
            assert solve(prompts, generations, processes, limit) == max(possible)
        else:
            with pytest.raises(ConfigError) as refused:
                solve(prompts, generations, processes, limit)
            offered = int(refused.value.remedy.removeprefix("use ").partition(",")[0])
            solve(offered, generations, processes, limit)
            nearer = range(prompts - abs(offered - prompts) + 1, prompts + abs(offered - prompts))
            assert not any(p * generations % processes == 0 for p in nearer if p > 0)


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({"processes": 2, "prompts_per_step": 16, "gradient_accumulation_steps": 4}, (8, 2, 16, 4, 128)),
        ({"processes": 2, "prompts_per_step": 16, "gradient_accumulation_steps": 1}, (8, 2, 64, 1, 128)),
        ({"prompts_per_step": 6, "per_device_train_batch_size": 10}, (8, 1, 8, 6, 48)),
        ({"per_device_train_batch_size": 16}, (8, 1, 16, 1, 16)),
        ({"steps_per_generation": 3, "processes": 2}, (8, 2, 8, 1, 48)),
        ({"prompts_per_step": 4, "steps_per_generation": 8}, (8, 1, 8, 4, 64)),
        ({"prompts_per_step": 4, "steps_per_generation": 2}, (8, 1, 8, 4, 16)),
        ({"generation_batch_size": 24}, (8, 1, 8, 1, 24)),
    ],
)
def test_stated_accumulation_is_kept_and_rows_at_a_time_are_a_limit_only_with_prompts_per_step(given, batch):
    assert planned(**given) == batch


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"processes": 2, "prompts_per_step": 16, "gradient_accumulation_steps": 5},
            "gradient_accumulation_steps=5 cannot make 16 prompts .* use 4, or leave",
        ),
        (
            {
                "processes": 2,
                "prompts_per_step": 16,
                "gradient_accumulation_steps": 8,
                "per_device_train_batch_size": 4,
            },
            "2 processes x at most 4 rows: use 16, or leave it out",
        ),
        ({"prompts_per_step": 4, "generation_batch_size": 40}, "is not a whole number of steps: use 32"),
        ({"prompts_per_step": 4, "steps_per_generation": 5}, "optimizer steps of 4 micro-batches: use 4"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "say the same twice: give one"),
        ({"generation_batch_size": 20}, "micro-batches of 1 x 8 and groups of 8: use 24"),
        ({"per_device_train_batch_size": 4}, "no whole|not a whole number of groups of 8: use 8, or gradient_.*=2"),
        ({"per_device_train_batch_size": 3, "steps_per_generation": 2}, "use 4, or steps_per_generation=8"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_choice(given, message):
    with pytest.raises(ConfigError, match=message) as refused:
        planned(**given)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_what_is_let_through_and_what_is_refused_is_what_trl_lets_through_and_refuses(tmp_path):
    """TRL's fields alone, over a grid, on one process: the same verdict, and the same sizes."""
    from trl import GRPOConfig

    for rows, steps, rollout, per_rollout in itertools.product((3, 4, 8), (1, 2), (None, 8, 24, 32), (None, 2, 3)):
        fields = {
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": steps,
            "generation_batch_size": rollout,
            "steps_per_generation": per_rollout,
        }
        try:
            config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=8, **fields)
        except ValueError:
            with pytest.raises(ConfigError):
                planned(**fields)
        else:
            assert planned(**fields) == Batch(8, 1, rows, steps, config.generation_batch_size)


def test_some_numbers_of_processes_divide_a_step():
    settings = RunSettings({"prompts_per_step": 3})  # of 24 completions
    assert [n for n in range(1, 10) if divides(settings, n)] == [1, 2, 3, 4, 6, 8]


def test_problems_that_do_not_fill_a_rollout_are_refused():
    whole = Batch(generations=4, processes=1, rows=8, steps=2, rollout=32)
    whole.refuse_few(8, "dataset", "sums")
    with pytest.raises(ConfigError, match="dataset='sums' leaves 7 problems, and a step takes 8: train on more"):
        whole.refuse_few(7, "dataset", "sums")
