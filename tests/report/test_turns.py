"""The turns of a completion with tools in the report's viewer: what is said, code and output, each as such."""

from __future__ import annotations

import pytest

from grpo_math.report.viewer import safe_json, turns_of


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
        ["said", "Let me see."],
        ["code", "1 / 0"],
        ["output, failed", "division by zero"],
        ["code", '{"name": "add", "arguments": {"a": 1, "b": null}}'],
        ["output", "1"],
        ["said", "#### 1"],
    ]


def test_what_is_hostile_is_text():
    code, output = "</script><img src=x onerror=alert(1)>", "\x1b[2J\u202e</pre>"
    completion = [{"role": "assistant", "tool_calls": [call(code=code)]}, {"role": "tool", "content": output}]
    page = safe_json(turns_of(completion))
    assert "<" not in page
    assert turns_of(completion) == [["code", code], ["output", "␛[2J⟨U+202E⟩</pre>"]]


@pytest.mark.parametrize("completion", [None, "text", [], [1], [{"role": "tool"}], [{"content": "one turn"}]])
def test_one_turn_and_none_are_shown_as_before(completion):
    assert turns_of(completion) == []


@pytest.mark.parametrize("calls", [1, [1], [{"function": 1}], [{"function": {"arguments": [1]}}], [None]])
def test_calls_that_are_none_do_not_end_the_report(calls):
    assert all(kind == "code" for kind, _ in turns_of([{"role": "assistant", "tool_calls": calls}]))
