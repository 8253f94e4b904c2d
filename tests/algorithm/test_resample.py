"""Uniform groups are replaced, on the second of two ranks that have the same rows."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from grpo_math.algorithm.resample import Resampler
from grpo_math.algorithm.rollout import Rollout
from grpo_math.errors import ConfigError, RewardError
from grpo_math.grading import Verdict
from grpo_math.run import metrics

RIGHT, WRONG = Verdict.CORRECT, Verdict.WRONG
DATA = [{"prompt": name, "answer": "1"} for name in "abc"]


def rollout(ids, rewards, verdicts, **columns):
    tensors = {
        "completion_ids": torch.tensor(ids)[:, None],
        "completion_mask": torch.ones(len(ids), 1, dtype=torch.long),
        "advantages": torch.zeros(len(ids)),
    }
    columns = {("", name): list(column) for name, column in columns.items()}
    return Rollout(tensors, torch.tensor(rewards)[:, None], torch.zeros(len(rewards)), verdicts, columns, {"a": [1.0]})


def resampler(rank=0, data=DATA, size=2):
    ranks = SimpleNamespace(num_processes=2, process_index=rank, gather=lambda rows: torch.cat([rows, rows]))
    return Resampler(2, data, seed=0, group_size=size, ranks=ranks)


@pytest.mark.parametrize(("rank", "ids"), [(0, [7, 7]), (1, [1, 2])])
def test_a_mixed_group_replaces_a_uniform_one_with_all_that_belongs_to_it(rank, ids):
    sampled = []

    def sample(rows, number):
        sampled.append((rows, number))
        return rollout([7], [0.5, 0.0], [RIGHT, WRONG], advantages=[0.25, -0.25], note="xy")

    first = rollout([1, 2], [1.0, 1.0, 1.0, 0.0], [RIGHT, RIGHT, RIGHT, WRONG], advantages=[0.0, 0.0, 1.0, -1.0])
    first.columns["", "short"] = ["one"]
    kept, counts = resampler(rank).gather_replaced(first, [DATA[0], DATA[1]], sample)
    # The prompts of the step are avoided; each rank samples one of the two completions of the third group.
    assert sampled == [([DATA[2]], 2)]
    assert kept.tensors["completion_ids"].flatten().tolist() == ids
    assert kept.tensors["num_items_in_batch"] == 4
    assert kept.rewards.flatten().tolist() == [0.5, 0.0, 1.0, 0.0]
    assert kept.advantages.tolist() == [0.25, -0.25, 1.0, -1.0]
    assert kept.columns == {("", "advantages"): [0.25, -0.25, 1.0, -1.0], ("", "note"): ["x", "y", None, None]}
    assert kept.metrics == {"a": [1.0]}
    assert counts == {metrics.PROMPTS_DRAWN: 3, metrics.PROMPTS_RETAINED: 2, metrics.PROMPTS_DISCARDED: 1}


def test_the_rounds_end_although_all_groups_stay_uniform():
    def sample(rows, number):
        numbers.append(number)
        return rollout([7, 7], [0.0] * 4, [WRONG] * 4, advantages=[0.0] * 4)

    numbers = []
    first = rollout([1, 2], [0.0] * 4, [WRONG, WRONG, Verdict.CRASH, WRONG], advantages=[0.0] * 4)
    counts = resampler().gather_replaced(first, DATA[:2], sample)[1]
    assert numbers == [2, 4]
    assert counts == {metrics.PROMPTS_DRAWN: 6, metrics.PROMPTS_RETAINED: 0, metrics.PROMPTS_DISCARDED: 4}


def test_a_round_avoids_the_prompts_of_earlier_rounds_too():
    def sample(rows, number):
        drawn.append(rows[0]["prompt"])
        return rollout([7], [0.0] * 2, [WRONG] * 2, advantages=[0.0] * 2)

    drawn, two_rounds = [], resampler()
    two_rounds.position = 8  # c, and then c is the first row of the next pass
    two_rounds.gather_replaced(rollout([1], [0.0] * 2, [WRONG] * 2, advantages=[0.0] * 2), DATA[1:2], sample)
    assert drawn == ["c", "a"]


def test_ranks_sample_equally_many_completions_although_they_share_a_group():
    """Two ranks with groups of three: two fresh groups replace one, and each rank samples three completions."""
    sampled = []

    def sample(rows, number):
        sampled.append(len(rows))
        return rollout([7] * 3, [1.0] * 6, [RIGHT, WRONG, WRONG] * 2, advantages=[0.0] * 6)

    first = rollout([1] * 3, [1.0] * 6, [RIGHT] * 4 + [WRONG] * 2, advantages=[0.0] * 6)
    resampler(size=3).gather_replaced(first, [DATA[0]] * 3, sample)
    assert sampled == [3]


def test_without_gold_answers_there_is_nothing_to_judge_by():
    with pytest.raises(RewardError, match="no row of a step has a gold answer"):
        resampler().gather_replaced(rollout([1, 2], [0.0] * 4, None), DATA[:2], None)
    for data in (Dataset.from_list([{"prompt": "x"}]), iter(DATA)):
        with pytest.raises(ConfigError, match="resample_groups=2 needs a train_dataset"):
            resampler(data=data)
