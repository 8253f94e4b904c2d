"""vLLM in the process that trains, for real on the CPU, in the environment that `tests/vllm_environment.sh` makes.

On the CPU a sleeping engine pauses as on a GPU, but frees no memory. tests/gpu/test_vllm.py sleeps on a GPU.
"""

import json
from itertools import pairwise
from pathlib import Path

import launching
import pytest
from vllm_process import CPU

PROGRAM = str(Path(__file__).parents[1] / "processes/colocated.py")
ROUNDING = 1e-4  # nats a token, in float32: 1e-5 were seen

pytestmark = pytest.mark.full


def records(folder, ranks, command):
    launching.run(command, **CPU)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_arrived(rollouts):
    """The engine samples what is trained: before an update, after each of two updates, and in a second turn."""
    assert all(rollout["apart"] < ROUNDING for rollout in rollouts)
    before, *after = rollouts
    assert len(after) == 3
    assert before["moved"] == 0
    assert all(rollout["moved"] > 100 * ROUNDING for rollout in after)


def assert_evaluated(record):
    """The engine evaluates, with the trained weights: its greedy answers are those of transformers."""
    assert record["backend"] == "vllm"
    assert record["answers"][0] == record["answers"][1]


def test_an_adapter_and_all_weights_reach_the_engine(vllm_python, smollm, tmp_path):
    (record,) = records(tmp_path, 1, [vllm_python, PROGRAM, smollm, str(tmp_path)])
    assert_arrived(record["all_weights"]["rollouts"])
    for kind in ("all_weights", "adapter"):
        assert_evaluated(record[kind])
    adapter = record["adapter"]["rollouts"]
    assert_arrived(adapter)
    assert record["adapter"]["agreed"] == 2
    _, _, turn, next_turn = adapter
    turns = [["wake_up", ["kv_cache"]], ["generate", None], ["sleep", 1]]  # the sync before had woken the weights
    assert (turn["told"], next_turn["told"]) == (turns, [["wake_up", ["weights"]], *turns])
    assert turn["sent"] == next_turn["sent"]


def test_ranks_that_share_an_engine_wait_for_each_other_before_it_samples(vllm_python, tiny, tmp_path):
    """Without the barrier the engine may hang on GPUs, in the canary as in a rollout (huggingface/trl#3671)."""
    command = [vllm_python, *launching.TORCHRUN[1:], PROGRAM, tiny("served"), str(tmp_path)]
    for rank, record in enumerate(records(tmp_path, 2, command)):
        assert_arrived(record["adapter"]["rollouts"])
        assert_evaluated(record["adapter"])
        calls = [call for rollout in record["adapter"]["rollouts"] for call in rollout["told"]]
        before = [before for before, (call, _) in pairwise(calls) if call == "generate"]
        assert len(before) > 4  # the rollouts, and the canary's
        assert before == [["barrier", [rank]]] * len(before)
