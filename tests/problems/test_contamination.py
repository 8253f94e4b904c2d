"""The overlap against brute force, on made-up copies, and on GSM8K and MATH."""

import random

import pytest

from grpo_math.errors import ConfigError
from grpo_math.problems.contamination import against, overlap, text_of
from grpo_math.problems.datasets import load_problems

STORY = "Nora has 12 red marbles and 30 blue ones, and gives 5 of them to each of her 3 friends. How many are left?"


def row(problem: str, name: str = "x") -> dict:
    return {"id": name, "problem": problem}


TWELVE = "one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize(
    ("problem", "training", "ngram", "expected"),
    [
        (STORY, STORY.upper().replace(" ", "  "), 13, (1, 1)),  # other case, spaces and marks
        (STORY, STORY.rstrip("?") + " now?", 13, (1, 0)),
        (STORY, STORY.replace("12", "13").replace("30", "31").replace("5", "6"), 13, (0, 0)),
        (f"Alpha {TWELVE} omega", f"Beta {TWELVE} psi", 13, (0, 0)),
        (f"Alpha {TWELVE} thirteen omega", f"Beta {TWELVE} thirteen psi", 13, (1, 0)),
        (f"Alpha {TWELVE} omega", f"Beta {TWELVE} psi", 8, (1, 0)),
        ("What is 1 + 2?", "What is 1 + 2 + 3?", 13, (0, 0)),  # a short problem is the whole training problem
        ("What is 1 + 2?", "what is $1+2$", 13, (1, 1)),
        ("What is 4 + 13?", "What is 4 - 13?", 13, (0, 0)),
        (r"Compute $\tan 22.5^\circ.$", r"Compute $\tan 225^\circ$.", 13, (0, 0)),
    ],
)
def test_thirteen_words_in_a_row_overlap_and_equal_words_are_equal(problem, training, ngram, expected):
    results = overlap([row(problem)], [row(training)], ngram)
    assert (results["overlapping"], results["equal"]) == expected


def test_the_overlap_is_that_of_comparing_every_window_with_every_window():
    rng = random.Random(0)
    problems, training = (
        [row(" ".join(rng.choices("abcdefgh", k=rng.randint(3, 14))), f"{name}{i}") for i in range(60)] for name in "pt"
    )
    for n in (3, 4, 5):
        results = overlap(problems, training, n)
        windows = [t["problem"].split()[i : i + n] for t in training for i in range(len(t["problem"].split()) - n + 1)]
        equal = {p["id"] for p in problems if any(p["problem"] == t["problem"] for t in training)}
        shared = {
            p["id"]
            for p in problems
            if any(p["problem"].split()[i : i + n] in windows for i in range(len(p["problem"].split()) - n + 1))
        }
        assert (results["overlapping"], results["equal"]) == (len(shared | equal), len(equal))
        assert 0 < len(shared) < 60


def test_the_text_counts_overlapping_and_equal_problems():
    near = STORY.replace("How many are left", "How many has she now")
    far = "Omar has 12 red marbles and 30 blue ones, and gives 5 of them to each of her 3 sons. Who is he?"
    results = overlap([row(far), row(STORY)], [row(near), row(STORY), row("Why?")])
    assert "2 of 2 (100.0%) problems overlap with the 3 of training by 13 words in a row, 1 is equal" in text_of(
        results
    )


def test_a_training_set_goes_by_name_and_split():
    rows = load_problems("generated:sums", "heldout", limit=5)
    assert against(rows, "generated:sums")["overlapping"] == 0, "held-out problems are never trained on"
    results = against(rows, "generated:sums:heldout")
    assert (results["training_data"], results["training_split"], results["equal"]) == ("generated:sums", "heldout", 5)
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        against(rows, "gsm9k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "training", "overlapping", "equal"),
    [("gsm8k", "test", "gsm8k", 3, 0), ("math500", "test", "math", 88, 0)],
)
def test_the_published_sets_against_their_training_sets(data_dir, name, split, training, overlapping, equal):
    results = against(load_problems(name, split), training)
    print(f"{name}/{split}: {text_of(results)}")
    assert (results["overlapping"], results["equal"]) == (overlapping, equal)
