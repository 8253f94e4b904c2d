"""An evaluation with tools: the turns are those of training, results name the tools, and are compared with the same."""

from __future__ import annotations

from copy import deepcopy

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.evaluation import backends
from grpo_math.evaluation.toolbox import toolbox, toolbox_of
from grpo_math.generation.completions import read_off, token_ids
from grpo_math.problems.datasets import load_problems

END = "<|im_end|>"


def block(code):
    return f"```python\n{code}\n```{END}"


# By problem: what the model says in its first turn, and after each result.
SAID = {
    "What is 4 + 13?": [block("print(4 + 13)"), f"#### 17{END}"],
    "What is 23 + 28?": [f"#### 51{END}"],
    "else": [block("1 / 0"), block("print(0)"), "#### 1 and on"],
}


@pytest.fixture(scope="module")
def rows():
    return load_problems("generated:sums", "heldout", template="python", limit=3)


@pytest.fixture(autouse=True)
def output(rows, tokenizer, monkeypatch):
    """The backend gives the turns of `SAID`; what it was asked for."""
    asked = []

    def generator(model, sampling):
        def generate(prompts, seed):
            asked.append((prompts, seed))
            made = []
            for prompt in prompts:
                text = tokenizer.decode(prompt)
                problem, _, after = text.rpartition("user\n")[2].partition(END)
                turns = SAID.get(problem, SAID["else"])
                ids = tokenizer.encode(turns[min(after.count("<|im_start|>tool"), len(turns) - 1)])
                made.append(read_off(tokenizer, ids[: sampling.max_new_tokens], [tokenizer.eos_token_id]))
            return made

        return generate

    monkeypatch.setattr(backends.Model, "generator", generator)
    return asked


def evaluated(tiny, tokenizer, rows, **settings):
    model = AutoModelForCausalLM.from_pretrained(tiny())
    settings = {"tools": ["python"], "max_new_tokens": 90, "progress": False, **settings}
    return evaluate(model, rows, tokenizer=deepcopy(tokenizer), **settings)


def test_results_hold_the_turns_and_what_became_of_the_calls(tiny, tokenizer, rows, output):
    results = evaluated(tiny, tokenizer, rows)
    by = {row["problem"]: row for row in results["rows"]}
    called = by["What is 4 + 13?"]
    assert [message["role"] for message in called["turns"]] == ["assistant", "tool", "assistant"]
    assert called["turns"][1]["content"] == "17"
    assert (called["completion"], called["category"], called["calls"]) == ("#### 17", "correct", 1)
    assert called["tokens"] == len(tokenizer.encode("".join(SAID["What is 4 + 13?"])))
    (other,) = (row for row in results["rows"] if row["problem"] not in SAID)
    assert (other["calls"], other["failures"], other["timeouts"]) == (2, 1, 0)
    assert other["truncated"]
    assert other["turns"][1]["content"].endswith("ZeroDivisionError: division by zero")
    assert results["tools"]["names"] == ["python"]
    assert len({seed for _, seed in output}) == len(output), "two turns share a seed"


def test_a_trainer_is_evaluated_with_its_tools_and_reads_the_same_prompts(tiny, tokenizer, rows, tmp_path):
    box = toolbox(["python"])
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}
    trainer = MathGRPOTrainer(
        tiny(),
        "accuracy",
        MathGRPOConfig(str(tmp_path), num_generations=2, **settings),
        Dataset.from_list(rows),
        processing_class=deepcopy(tokenizer),
        tools=list(box.functions),
    )
    results = evaluate(trainer, rows, max_new_tokens=90, progress=False)
    assert results["tools"] == toolbox_of(trainer).stated == box.stated
    assert sum(row["calls"] for row in results["rows"]) > 0
    prompts = [row["prompt"] for row in Dataset.from_list(rows)]
    ids = token_ids(trainer.processing_class, [row["prompt"] for row in rows], trainer.turns.conversation)
    assert trainer._tokenize_prompts(prompts)[0] == ids
