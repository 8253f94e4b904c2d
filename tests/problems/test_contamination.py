"""The overlap against brute force, on made-up copies, and on GSM8K and MATH."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_math.errors import ConfigError
from grpo_math.problems.contamination import against, overlap, overlap_line
from grpo_math.problems.datasets import load_problems

STORY = "Nora has 12 red marbles and 30 blue ones, and gives 5 of them to each of her 3 friends. How many are left?"


def row(problem: str) -> dict:
    return {"id": "x", "problem": problem}


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


TEXT = st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map(" ".join)


@given(st.lists(TEXT, min_size=1), st.lists(TEXT), st.integers(1, 4))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
def test_the_overlap_is_that_of_comparing_every_window_with_every_window(problems, training, n):
    windows = {text: [text.split()[i:][:n] for i in range(len(text.split()) - n + 1)] for text in problems + training}
    known = [window for text in training for window in windows[text]]
    shared = [text for text in problems if text in training or any(window in known for window in windows[text])]
    assert overlap([row(text) for text in problems], [row(text) for text in training], n) == {
        "ngram": n,
        "n": len(problems),
        "training_problems": len(training),
        "overlapping": len(shared),
        "share": len(shared) / len(problems),
        "equal": sum(text in training for text in problems),
    }


def test_a_training_set_goes_by_name_and_split_and_the_result_is_one_line():
    rows = load_problems("generated:sums", "heldout", limit=5)
    assert against(rows, "generated:sums")["overlapping"] == 0, "held-out problems are never trained on"
    results = against([*rows, row(f"Alpha {TWELVE}")], "generated:sums:heldout")
    assert (results["training_data"], results["training_split"]) == ("generated:sums", "heldout")
    assert overlap_line(results) == (
        "contamination: 5 of 6 problems (83.3%) overlap with the 272 training problems: 5 equal, 0 by 13 words in a row"
    )
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        against(rows, "gsm9k")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "training", "overlapping"), [("gsm8k", "gsm8k", 3), ("math500", "math", 88)])
def test_the_published_sets_against_their_training_sets(data_dir, name, training, overlapping):
    results = against(load_problems(name, "test"), training)
    assert (results["overlapping"], results["equal"]) == (overlapping, 0), overlap_line(results)
