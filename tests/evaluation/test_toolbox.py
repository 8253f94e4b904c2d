"""An evaluation with tools: the turns are those of training, results name the tools, and are compared with the same."""

from __future__ import annotations

import pytest
from datasets import Dataset
from small_model import byte_tokenizer

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.errors import UserError
from grpo_math.evaluation import backends
from grpo_math.evaluation.toolbox import toolbox, toolbox_of
from grpo_math.generation.completions import batch_seed, read_off, token_ids
from grpo_math.problems.datasets import load_problems

END = "<|im_end|>"


def block(code):
    return f"```python\n{code}\n```{END}"


# By problem: what the model says in its first turn, and after each result.
SAID = {
    "What is 4 + 13?": [block("print(4 + 13)"), f"#### 17{END}"],
    "What is 23 + 28?": [f"#### 51{END}"],
    "else": [block("1 / 0"), block("print(0)"), f"#### 1{END}"],
}


@pytest.fixture(scope="module")
def rows():
    return load_problems("generated:sums", "heldout", template="python", limit=3)


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    """The backend gives the turns of `SAID`; the seeds with which it was asked."""
    asked = []

    def generator(model, sampling):
        def generate(prompts, seed):
            asked.append(seed)
            made = []
            for prompt in prompts:
                text = model.tokenizer.decode(prompt)
                problem, _, after = text.rpartition("user\n")[2].partition(END)
                turns = SAID.get(problem, SAID["else"])
                ids = model.tokenizer.encode(turns[min(after.count("<|im_start|>tool"), len(turns) - 1)])
                made.append(read_off(model.tokenizer, ids[: sampling.max_new_tokens], [ids[-1]]))
            return made

        return generate

    monkeypatch.setattr(backends.Model, "generator", generator)
    return asked


def test_results_hold_the_turns_and_what_became_of_the_calls(small, rows, seeds):
    results = evaluate(small, rows, tools=["python"], max_new_tokens=240, progress=False)
    by = {row["problem"]: row for row in results["rows"]}
    called = by["What is 4 + 13?"]
    assert [message["role"] for message in called["turns"]] == ["assistant", "tool", "assistant"]
    assert called["turns"][1]["content"] == "17"
    assert (called["completion"], called["category"], called["calls"]) == ("#### 17", "correct", 1)
    written = "".join(SAID["What is 4 + 13?"]).replace(END, "$")  # the end is one token
    assert called["tokens"] == len(written)
    (other,) = (row for row in results["rows"] if row["problem"] not in SAID)
    assert (other["calls"], other["failures"], other["timeouts"]) == (2, 1, 0)
    assert other["turns"][1]["content"].endswith("ZeroDivisionError: division by zero")
    assert other["category"] == "wrong_answer"
    assert results["tools"]["names"] == ["python"]
    assert seeds == [batch_seed(0, 0), *(batch_seed(batch_seed(0, 0), turn) for turn in (1, 2))]
    limited = evaluate(small, rows, tools=toolbox(["python"], rounds=1), max_new_tokens=240, progress=False)
    assert limited["tools"]["max_tool_calling_iterations"] == 1
    assert max(row["calls"] for row in limited["rows"]) == 1


def test_a_trainer_is_evaluated_with_its_tools_and_reads_the_same_prompts(small, rows, tmp_path):
    box = toolbox(["python"])
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}
    trainer = MathGRPOTrainer(
        small,
        "accuracy",
        MathGRPOConfig(str(tmp_path), num_generations=2, **settings),
        Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
        tools=list(box.functions),
    )
    results = evaluate(trainer, rows, max_new_tokens=240, progress=False)
    assert results["tools"] == toolbox_of(trainer).stated == box.stated
    assert box.stated["python"]["wall_seconds"] == box.functions[0]._limits.wall_seconds
    assert sum(row["calls"] for row in results["rows"]) > 0
    prompts = [row["prompt"] for row in Dataset.from_list(rows)]
    ids = token_ids(trainer.processing_class, [row["prompt"] for row in rows], trainer.turns.conversation)
    assert trainer._tokenize_prompts(prompts)[0] == ids
    trainer.turns.conversation.most = 3
    assert toolbox_of(trainer).rounds == 3
    trainer.turns, trainer.environment_factories = None, [object]
    with pytest.raises(UserError, match="environment_factory cannot be evaluated"):
        toolbox_of(trainer)
