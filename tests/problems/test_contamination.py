"""The overlap against brute force, on made-up copies, and on GSM8K and MATH."""

from __future__ import annotations

import random

import pytest

from grpo_math.errors import ConfigError
from grpo_math.problems.contamination import against, overlap, text_of, words
from grpo_math.problems.datasets import load_problems

STORY = "Nora has 12 red marbles and 30 blue ones, and gives 5 of them to each of her 3 friends. How many are left?"


def row(problem: str, name: str = "x") -> dict:
    return {"id": name, "problem": problem}


def counts(problem: str, training: str, ngram: int = 13) -> tuple[int, int]:
    found = overlap([row(problem)], [row(training)], ngram)
    return found["overlapping"], found["equal"]


def test_the_overlap_is_that_of_comparing_every_window_with_every_window():
    rng = random.Random(0)
    problems, training = (
        [row(" ".join(rng.choices("abcdefgh", k=rng.randint(3, 14))), f"{name}{i}") for i in range(60)] for name in "pt"
    )
    for n in (3, 4, 5):
        found = overlap(problems, training, n)
        windows = [t["problem"].split()[i : i + n] for t in training for i in range(len(t["problem"].split()) - n + 1)]
        equal = {p["id"] for p in problems if any(p["problem"] == t["problem"] for t in training)}
        shared = {
            p["id"]
            for p in problems
            if any(p["problem"].split()[i : i + n] in windows for i in range(len(p["problem"].split()) - n + 1))
        }
        assert (found["overlapping"], found["equal"]) == (len(shared | equal), len(equal))
        assert 0 < len(shared) < 60


def test_a_copy_in_other_case_spaces_and_marks_is_equal_and_one_word_more_is_an_overlap():
    assert counts(STORY, STORY.upper().replace(" ", "  ")) == (1, 1)
    assert counts(STORY, STORY.rstrip("?") + " now?") == (1, 0)
    assert counts(STORY, STORY.replace("12", "13").replace("30", "31").replace("5", "6")) == (0, 0)


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not():
    shared = "one two three four five six seven eight nine ten eleven twelve"
    assert counts(f"Alpha {shared} omega", f"Beta {shared} psi") == (0, 0)
    assert counts(f"Alpha {shared} thirteen omega", f"Beta {shared} thirteen psi") == (1, 0)
    assert counts(f"Alpha {shared} omega", f"Beta {shared} psi", ngram=8) == (1, 0)


def test_a_short_problem_has_to_be_the_whole_training_problem():
    assert counts("What is 1 + 2?", "What is 1 + 2 + 3?") == (0, 0)
    assert counts("What is 1 + 2?", "what is $1+2$") == (1, 1)


def test_signs_and_decimal_points_are_part_of_the_problem():
    assert counts("What is 4 + 13?", "What is 4 - 13?") == (0, 0)
    assert counts(r"Compute $\tan 22.5^\circ.$", r"Compute $\tan 225^\circ$.") == (0, 0)
    assert words("1,200 miles in 3.5 hours") == ["1200", "miles", "in", "3.5", "hours"]


def test_the_examples_are_the_worst_and_name_the_nearest_training_problem():
    near = STORY.replace("How many are left", "How many has she now")
    far = "Omar has 12 red marbles and 30 blue ones, and gives 5 of them to each of her 3 sons. Who is he?"
    found = overlap([row(far, "far"), row(STORY, "copy")], [row(near, "near"), row(STORY, "same"), row("Why?", "no")])
    copy, other = found["examples"]
    assert (copy["id"], copy["training_id"], copy["share_of_ngrams"]) == ("copy", "same", 1.0)
    assert other["id"] == "far"
    assert 0 < other["share_of_ngrams"] < 1
    assert (found["overlapping"], found["equal"], found["share"], found["training_problems"]) == (2, 1, 1.0, 3)
    assert "2 of 2 (100.0%) problems overlap with the 3 of training by 13 words in a row, 1 is equal" in text_of(found)


def test_no_training_problem_and_no_overlap():
    found = overlap([row(STORY)], [])
    assert (found["overlapping"], found["share"], found["examples"]) == (0, 0.0, [])


def test_a_training_set_goes_by_name_and_split():
    rows = load_problems("generated:sums", "heldout", limit=5)
    assert against(rows, "generated:sums")["overlapping"] == 0, "held-out problems are never trained on"
    found = against(rows, "generated:sums:heldout")
    assert (found["training_data"], found["training_split"], found["equal"]) == ("generated:sums", "heldout", 5)
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        against(rows, "gsm9k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "training", "overlapping", "equal"),
    # MATH repeats its figures' code and its phrases: of its 688, three are copies (one letter for letter).
    [("gsm8k", "test", "gsm8k", 3, 0), ("math500", "test", "math", 88, 0), ("math", "test", "math", 688, 3)],
)
def test_the_published_sets_against_their_training_sets(data_dir, name, split, training, overlapping, equal):
    found = against(load_problems(name, split), training)
    print(f"{name}/{split}: {text_of(found)}")
    assert (found["overlapping"], found["equal"]) == (overlapping, equal)
