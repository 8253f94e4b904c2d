"""The file that grows during an evaluation, and the hashes that must be equal for it to continue."""

import os
from types import SimpleNamespace

import pytest

from grpo_math.errors import ConfigError
from grpo_math.evaluation.evaluation import store, stored
from grpo_math.evaluation.fingerprint import problems_hash, prompt_hash, weights_hash
from grpo_math.evaluation.summary import Record
from grpo_math.problems.datasets import load_problems
from grpo_math.system.reading import Unreadable

ABOUT = {"model": "m", "seed": 0}
LINES = [Record(i, completion="½ of a line\n" * i) for i in range(3)]


def test_a_file_that_was_cut_at_any_byte_goes_on(tmp_path):
    path = tmp_path / "made" / "a.jsonl"
    assert stored(path, ABOUT) == []
    store(path, LINES)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0], len(whole) + 1):  # the first line is written whole
        path.write_bytes(whole[:cut])
        kept = max(0, sum(end <= cut for end in ends) - 1)
        assert stored(path, ABOUT) == LINES[:kept]
        store(path, LINES[kept:])
        assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["", "[]\n", "notes", '{"measured": 3}\n'])
def test_something_else_is_refused_and_left_alone(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(Unreadable, match="a cannot be read"):
        stored(tmp_path / "a", ABOUT)
    assert (tmp_path / "a").read_text() == text


def test_the_prompt_is_the_template_and_the_chat_template_and_not_the_problems():
    rows, others = (load_problems("generated", "heldout", limit=3, seed=seed) for seed in (0, 1))
    chatty, other = SimpleNamespace(chat_template="{{ messages }}"), SimpleNamespace(chat_template="<s>{{ messages }}")
    assert prompt_hash(rows, chatty) == prompt_hash(others, chatty) != prompt_hash(rows, other)
    assert problems_hash(rows) != problems_hash(others)
    assert problems_hash(rows) != problems_hash([*rows[:2], {**rows[2], "answer": "0"}])
    plain = load_problems("generated", "heldout", limit=3, template="r1_zero")
    assert prompt_hash(plain, chatty) == prompt_hash(plain, other), "a plain text goes through no chat template"
    assert prompt_hash(plain, chatty) != prompt_hash(rows, chatty)
    assert prompt_hash(rows[:1], chatty) == prompt_hash(rows, chatty)
    last = {**rows[2], "prompt": [*rows[2]["prompt"], {"role": "system", "content": "Be brief."}]}
    assert prompt_hash([*rows[:2], last], chatty) != prompt_hash(rows, chatty)


def test_weights_that_were_written_again_are_others_and_a_file_beside_them_is_not(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    first = weights_hash("some/model", str(tmp_path))
    (tmp_path / "results.json").write_text("{}")
    assert weights_hash("some/model", str(tmp_path)) == first
    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))
    others = [weights_hash("some/model", str(tmp_path)), weights_hash("some/model", None), weights_hash("a/b", None)]
    assert len({first, *others}) == 4


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
def test_the_same_weights_with_another_configuration_are_others(name, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    hashes = []
    for alpha in (16, 32, 16):
        (tmp_path / name).write_text(f'{{"lora_alpha": {alpha}}}')
        hashes.append(weights_hash(str(tmp_path)))
    assert hashes[0] == hashes[2] != hashes[1]


def test_answers_of_another_format_or_weights_are_not_mixed_in(tmp_path):
    now = {**ABOUT, "weights_hash": "abcdef123456", "request": {"top_k": 0, "dtype": "float32"}}
    assert stored(tmp_path / "new", now) == []
    for changed in ({"request": {"top_k": 0, "dtype": "bfloat16"}}, {"weights_hash": "abcdef654321"}):
        with pytest.raises(ConfigError, match=f"was measured with {next(iter(changed))}="):
            stored(tmp_path / "new", {**now, **changed})
