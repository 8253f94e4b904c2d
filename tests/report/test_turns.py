"""The turns of a completion with tools in the report's viewer: what is said, code and output."""

from __future__ import annotations

import pytest

from grpo_math.report.viewer import turns_of


def call(name="python", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_code_and_output_are_told_apart_and_a_failure_is_named():
    completion = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call(code="1 / 0")], "name": None},
        {"role": "tool", "content": "division by zero", "status": "failed"},
        {"role": "assistant", "content": "", "tool_calls": [call("add", a=1, b=None)]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "#### 1", "tool_calls": None},
    ]
    assert turns_of(completion) == [
        ("said", "Let me see."),
        ("code", "1 / 0"),
        ("output, failed", "division by zero"),
        ("code", '{"name": "add", "arguments": {"a": 1, "b": null}}'),
        ("output", "1"),
        ("said", "#### 1"),
    ]


@pytest.mark.parametrize("completion", [None, "text", [], [{"role": "assistant", "content": "one turn"}]])
def test_one_turn_has_no_turns(completion):
    assert turns_of(completion) == []
