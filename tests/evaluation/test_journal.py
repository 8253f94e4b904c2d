"""The file that grows: cut at every byte it reads back whole lines, and what is not one is refused untouched."""

from __future__ import annotations

import pytest

from grpo_math.errors import ConfigError
from grpo_math.evaluation import journal
from grpo_math.reading import Unreadable

ABOUT = {"model": "m", "seed": 0}
LINES = [{"id": i, "text": "½ of a line\n" * i} for i in range(3)]


def test_a_file_that_was_cut_at_any_byte_goes_on(tmp_path):
    path = tmp_path / "made" / "a.jsonl"
    assert journal.resume(path, ABOUT, "output") == []
    journal.append(path, LINES)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[0], len(whole) + 1):  # the first line is written whole
        path.write_bytes(whole[:cut])
        kept = max(0, sum(end <= cut for end in ends) - 1)
        assert journal.resume(path, ABOUT, "output") == LINES[:kept]
        journal.append(path, LINES[kept:])
        assert path.read_bytes() == whole


def test_another_way_of_measuring_is_named(tmp_path):
    journal.resume(tmp_path / "a", ABOUT, "output")
    with pytest.raises(
        ConfigError, match=r"output='.*a' was measured with seed=0, not 1: name another file"
    ) as refused:
        journal.resume(tmp_path / "a", {**ABOUT, "seed": 1}, "output")
    with pytest.raises(ConfigError, match=r"was measured with template=None, not 'gsm8k'"):
        journal.resume(tmp_path / "a", {**ABOUT, "template": "gsm8k"}, "output")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]\n", "notes", '{"measured": 3}\n'])
def test_something_else_is_refused_and_left_alone(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(Unreadable, match="a cannot be read"):
        journal.resume(tmp_path / "a", ABOUT, "output")
    assert (tmp_path / "a").read_text() == text
