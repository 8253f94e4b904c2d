"""A problem's completions on the page: what each was paid, why a right number got nothing, and the turns of tools."""

from pathlib import Path

from grpo_math.report.run_dir import RunDir
from grpo_math.report.viewer import sources, turn_pieces, why


def row(text, verdict, reward, **more):
    return {
        "step": 4,
        "group": 2,
        "problem_id": "sum-1",
        "gold": "17",
        "prompt": "What is 9 + 8?",
        "answer_length": 0.5,
        "completion": text,
        "verdict": verdict,
        "reward": reward,
        "gsm8k": reward - 0.5,
        "advantage": 0.0,
        "in_format": "####" in text,
        "tokens": len(text),
        "truncated": False,
        **more,
    }


TABLE = [
    row("9 + 8 = 17\n#### 17", "correct", 1.5, extracted="17"),
    row("It is 17.", "correct", 0.5, extracted="17"),
    row("9 + 8 = 17\n#### 18", "wrong", 0.5, extracted="18"),
    row("17 apples and more and", "no_answer", 0.5, extracted=None, truncated=True),
    row("#### 117", "wrong", 0.5, extracted="117"),
    row("#### 0", "crash", 0.5, extracted="0"),
]


def test_a_group_is_a_row_that_says_what_came_of_each_completion():
    [shown] = sources(RunDir(Path("run"), completions=TABLE), compared=False)[0].rows
    assert shown["title"] == {"step": 4, "problem": "sum-1", "gold": "17", "correct": "2 of 6", "rewards": "0.5 to 1.5"}
    assert [one["badge"] for one in shown["completions"]][:4] == ["correct", "correct", "wrong", "no_answer"]
    assert shown["completions"][1]["facts"] == {
        "answer_length": 0.5,
        "reward": 0.5,
        "gsm8k": 0.0,
        "advantage": 0.0,
        "extracted": "17",
        "in_format": False,
        "tokens": 9,
        "truncated": False,
    }
    assert [one["note"] for one in shown["completions"]] == [
        "",
        "correct, but outside the format",
        "contains the gold answer, but another was extracted",
        "cut at the length limit",
        "",  # 117 is not 17
        "not graded, so it is left out of its group",
    ]
    assert why({"verdict": "wrong", "answer": "3", "gold": "(x.*"}, "(x.* 3") != "", "a gold answer is not a pattern"


def test_calls_and_their_output_are_told_apart():
    def call(**arguments):
        return {"type": "function", "function": {"name": "add", "arguments": arguments}}

    completion = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call(a=1)], "name": None},
        {"role": "tool", "content": "b is missing"},
        {"role": "assistant", "content": "", "tool_calls": [call(a=1, b=None)]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "#### 1", "tool_calls": None},
    ]
    assert turn_pieces(completion) == [
        ("text", "Let me see."),
        ("call", '{"name": "add", "arguments": {"a": 1}}'),
        ("output", "b is missing"),
        ("call", '{"name": "add", "arguments": {"a": 1, "b": null}}'),
        ("output", "1"),
        ("text", "#### 1"),
    ]
