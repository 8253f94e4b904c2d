"""An evaluation with tools: the turns are those of training, results name the tools, and are compared with the same."""

import pytest
from small_model import byte_tokenizer
from small_trainers import make

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.errors import UserError
from grpo_math.evaluation.toolbox import toolbox, trainer_toolbox
from grpo_math.generation.completions import batch_seed, token_ids
from grpo_math.problems.datasets import load_problems
from grpo_math.tools import sandbox

# By problem: what the model says in its first turn, and after each result.
TURNS = {
    "What is 4 + 13?": ["```python\nprint(4 + 13)\n```", "#### 17"],
    "What is 23 + 28?": ["#### 51"],
    "What is": ["```python\n1 / 0\n```", "```python\nprint(0)\n```", "#### 1"],
}


@pytest.fixture(scope="module")
def rows():
    return load_problems("generated:sums", "heldout", template="python", limit=3)


def test_results_hold_the_turns_and_what_became_of_the_calls(small, rows, script):
    batches = script(TURNS)
    results = evaluate(small, rows, tools=["python"], max_new_tokens=240, progress=False)
    called = next(row for row in results["rows"] if row["problem"] == "What is 4 + 13?")
    assert [message["role"] for message in called["turns"]] == ["assistant", "tool", "assistant"]
    assert called["turns"][1]["content"] == "17"
    assert (called["completion"], called["category"], called["calls"]) == ("#### 17", "correct", 1)
    assert called["tokens"] == sum(len(turn) + 1 for turn in TURNS["What is 4 + 13?"])  # with the end of each
    (other,) = (row for row in results["rows"] if row["problem"] not in TURNS)
    assert (other["calls"], other["failures"], other["timeouts"]) == (2, 1, 0)
    assert other["turns"][1]["content"].endswith("ZeroDivisionError: division by zero")
    assert other["category"] == "wrong_answer"
    assert results["tools"]["names"] == ["python"]
    assert [seed for _, seed in batches] == [
        batch_seed(0, 0),
        batch_seed(batch_seed(0, 0), 1),
        batch_seed(batch_seed(0, 0), 2),
    ]
    limited = evaluate(small, rows, tools=toolbox(["python"], rounds=1), max_new_tokens=240, progress=False)
    assert max(row["calls"] for row in limited["rows"]) == 1


def test_tools_that_cannot_be_sandboxed_are_refused_before_weights_load(rows, monkeypatch):
    monkeypatch.setattr(sandbox, "layers", lambda: {"landlock": 0, "seccomp": 1})
    with pytest.raises(UserError, match=r"cannot be sandboxed here \(no Landlock"):
        evaluate("no/model", rows, tools=["python"], progress=False)


def test_a_trainer_is_evaluated_with_its_tools_and_reads_the_same_prompts(small, rows, script, tmp_path, monkeypatch):
    script(TURNS)
    box = toolbox(["python"])
    tokenizer, tools = byte_tokenizer(), list(box.functions)
    trainer = make(MathGRPOTrainer, MathGRPOConfig, small, tokenizer, tmp_path, "accuracy", rows, tools=tools)
    results = evaluate(trainer, rows, max_new_tokens=240, progress=False)
    assert results["tools"] == trainer_toolbox(trainer).settings == box.settings
    assert box.settings["python"]["wall_seconds"] == box.functions[0]._limits.wall_seconds
    assert sum(row["calls"] for row in results["rows"]) > 0
    ids = token_ids(tokenizer, [row["prompt"] for row in rows], trainer.grpo_math.tools.conversation)
    assert trainer._tokenize_prompts(list(trainer.train_dataset["prompt"]))[0] == ids
    trainer.grpo_math.tools.conversation.max_rounds = 3
    assert trainer_toolbox(trainer).rounds == 3
    trainer.grpo_math.tools = None
    for argument, attribute in (("environment_factory", "environment_factories"), ("rollout_func", "rollout_func")):
        monkeypatch.setattr(trainer, attribute, [object])
        with pytest.raises(UserError, match=f"{argument}: an evaluation would not ask as training does"):
            trainer_toolbox(trainer)
        monkeypatch.undo()
