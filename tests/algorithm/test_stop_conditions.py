"""Completions that a stop string ends: which are truncated, and the lengths that are logged of them."""

from types import SimpleNamespace

import pytest
import torch

from grpo_math.algorithm.stop_conditions import StopConditions
from grpo_math.generation.request import Request
from grpo_math.run import metrics

END, STOP = "\x02", "\x07"
# A token is a letter.
LETTERS = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
STOPS = StopConditions(LETTERS, Request(stop=["</a>"], stop_token_ids=[ord(STOP)]), [ord(END)])


@pytest.mark.parametrize(
    ("masks", "lengths"), [([[1] * n for n in (3, 8, 5)], (3, 5)), ([[1, 0, 1], [1], [1, 1]], (2, 2))]
)
def test_the_lengths_of_ended_completions_have_no_tokens_of_tools_as_with_trl(masks, lengths):
    here = SimpleNamespace(device="cpu", gather=lambda tensor: tensor)
    values = STOPS.gather_metrics(masks, [False, True, False], here)
    assert (values[metrics.ENDED_MIN], values[metrics.ENDED_MAX]) == lengths
    assert values[metrics.TRUNCATED] == pytest.approx(1 / 3)


def test_the_length_is_0_if_no_completion_has_ended_and_trls_metrics_stay_without_stop_strings():
    here = SimpleNamespace(device="cpu", gather=lambda tensor: tensor)
    values = STOPS.gather_metrics([[1, 1]], [True], here)
    assert (values[metrics.TRUNCATED], values[metrics.ENDED_MEAN], values[metrics.ENDED_MAX]) == (1, 0, 0)
    assert StopConditions(LETTERS, Request(), [ord(END)]).gather_metrics([[1, 1]], [True], here) == {}


@pytest.mark.parametrize(
    "turns", [["7</a>"], ["</a>"], ["7</a>\n"], ["7" + END], ["7" + STOP], ["1", "tool", "7</a>"], ["1", END]]
)
def test_an_end_token_or_a_stop_string_of_the_last_turn_ends_a_completion(turns):
    assert not is_truncated(turns)


@pytest.mark.parametrize("turns", [["7"], [""], [END + "7"], ["1</a>", "tool", "7"], ["1</a>", "tool"]])
def test_a_completion_that_nothing_else_has_ended_is_truncated(turns):
    assert is_truncated(turns)


def is_truncated(turns):
    """``turns``: the texts of the model and of its tools, in turn."""
    ids = [ord(letter) for turn in turns for letter in turn]
    return STOPS.is_truncated(ids, [1 - number % 2 for number, turn in enumerate(turns) for _ in turn])


def test_a_truncated_completion_is_masked_and_the_tokens_of_the_others_are_counted_over_all_ranks():
    rows = {
        "completion_ids": torch.tensor(
            [[*map(ord, "7</a>")], [*map(ord, "7</a.")], [ord("1"), ord("2"), ord(END), 0, 0]]
        ),
        "completion_mask": torch.tensor([[1] * 5, [1] * 5, [1, 1, 1, 0, 0]]),
        "tool_mask": torch.tensor([[1] * 5, [1] * 5, [1, 0, 1, 1, 1]]),
    }
    two_ranks = SimpleNamespace(gather=lambda tokens: torch.stack([tokens, tokens]))
    masked = STOPS.gather_masked(rows, two_ranks)
    assert masked["completion_mask"].tolist() == [[1] * 5, [0] * 5, [1, 1, 1, 0, 0]]
    assert masked["num_items_in_batch"] == 2 * (5 + 2)
    assert StopConditions(LETTERS, Request(), [ord(END)]).gather_masked(rows, two_ranks) is rows
