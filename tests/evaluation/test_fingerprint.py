"""What changes a hash, and what does not."""

from __future__ import annotations

import os
from types import SimpleNamespace

from grpo_math.evaluation.fingerprint import problems_hash, prompt_hash, weights_hash
from grpo_math.problems.datasets import load_problems


def test_the_prompt_is_the_template_and_the_chat_template_and_not_the_problems():
    rows, others = (load_problems("generated", "heldout", limit=3, seed=seed) for seed in (0, 1))
    chatty, other = SimpleNamespace(chat_template="{{ messages }}"), SimpleNamespace(chat_template="<s>{{ messages }}")
    assert prompt_hash(rows, chatty) == prompt_hash(others, chatty) != prompt_hash(rows, other)
    assert problems_hash(rows) != problems_hash(others)
    assert problems_hash(rows) != problems_hash([*rows[:2], {**rows[2], "answer": "0"}])
    plain = load_problems("generated", "heldout", limit=3, template="r1_zero")
    assert prompt_hash(plain, chatty) == prompt_hash(plain, other), "a plain text goes through no chat template"
    assert prompt_hash(plain, chatty) != prompt_hash(rows, chatty)


def test_weights_that_were_written_again_are_others_and_a_file_beside_them_is_not(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    first = weights_hash("some/model", str(tmp_path))
    (tmp_path / "results.json").write_text("{}")
    assert weights_hash("some/model", str(tmp_path)) == first
    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))
    assert len({first, weights_hash("some/model", str(tmp_path)), weights_hash("some/model", None)}) == 3
