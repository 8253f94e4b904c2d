"""`tool_use`: a call without effect pays nothing, whatever is written around it."""

import itertools

import pytest

from grpo_math.errors import ConfigError
from grpo_math.grading import Verdict, grade_batch
from grpo_math.rewards import REWARDS, make_tool_use, text_of
from grpo_math.rewards.tools import echoed, results_of

PROMPT = [{"role": "user", "content": "What is 17 * 23?"}]
GOLD = "391"


def calls(*codes, content=""):
    made = [{"type": "function", "function": {"name": "python", "arguments": {"code": code}}} for code in codes]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(text, **status):
    return {"role": "tool", "name": "python", "content": text, **status}


def says(text):
    return {"role": "assistant", "content": text}


def paid(*messages, reward=None):
    reward = reward or REWARDS["tool_use"]
    return reward([PROMPT], [list(messages)], answer=[GOLD], answer_format=["python"])[0]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((calls("print(17 * 23)"), result("391"), says("#### 391")), 1.0),
        ((calls("print(17 * 23)"), result("so\n391.0"), says("#### 391")), 1.0),
        ((calls("1/0"), result("no", status="failed"), calls("17*23"), result("391"), says("#### 391")), 1.0),
        ((calls("print(391)"), result("391"), says("#### 391")), 0.0),
        ((calls("print(17 * 23)", content="It is 391."), result("391"), says("#### 391")), 0.0),
        ((calls("print(782-391)"), result("391"), says("#### 391")), 0.0),
        ((calls("print(3.91e2)"), result("391.0"), says("#### 391")), 0.0),
        ((calls("print(17 * 23)"), result("391"), says("#### 392")), 0.0),
        ((calls("print(2)"), result("2"), says("#### 391")), 0.0),
        ((calls("print(17 * 23)"), result("391")), 0.0),
        ((calls("raise ValueError(17 * 23)"), result("391", status="failed"), says("#### 391")), 0.0),
        ((says("#### 391"),), 0.0),
        ((says("#### 17 * 23"),), 0.0),
        ((calls("print(17 * 23)"), result("391"), calls("print(17 * 23)"), result("391"), says("#### 391")), 1.0),
    ],
)  # fmt: skip
def test_a_right_answer_that_a_call_gave_is_paid_once_and_nothing_else(messages, expected):
    assert paid(*messages) == expected


def test_a_number_of_any_length_is_read_or_passed_over():
    long = "9" * 6000
    wrong = (calls(f"print({long})"), result("7"), says("#### 7"))
    assert paid(*wrong) == 0.0
    assert echoed([*wrong[:2], says(long)]) == [False]
    assert paid(calls(f"print(17 * 23)  # {long}.{long}e999"), result("391"), says("#### 391")) == 1.0


def test_failed_calls_can_cost():
    failed = [calls("1/0"), result("division by zero", status="failed")]
    reward = make_tool_use(effect=0.5, failed=0.2)
    assert paid(*failed, *failed, calls("17*23"), result("391"), says("#### 391"), reward=reward) == pytest.approx(0.1)
    for bad in ({"effect": -1}, {"failed": -1}):
        with pytest.raises(ConfigError, match="is negative"):
            make_tool_use(**bad)


# Everything that a policy could put together of these, up to three turns: 8 kinds of turn, 585 completions.
TURNS = [
    [calls("print(17 * 23)"), result("391")],
    [calls("print(391)"), result("391")],
    [calls("print(int('3' + '91'))"), result("391")],
    [calls("print(2)"), result("2")],
    [calls("1/0"), result("ZeroDivisionError: division by zero", status="failed")],
    [says("It is 391.")],
    [says("#### 391")],
    [says("#### 392")],
]


def test_no_completion_earns_more_by_calls_than_by_its_right_answer():
    """The search of docs/tools.md: 0 or 1, never without a right answer, and never more for further calls."""
    conversations = [[*itertools.chain(*turns)] for n in (1, 2, 3) for turns in itertools.product(TURNS, repeat=n)]
    columns = {"answer": [GOLD] * len(conversations), "answer_format": ["python"] * len(conversations)}
    grades = grade_batch(
        columns["answer"], [text_of(one) for one in conversations], answer_format=columns["answer_format"]
    )
    rewards = REWARDS["tool_use"]([PROMPT] * len(conversations), conversations, grade=grades, **columns)
    assert sum(rewards) > 0
    for completion, reward, grade in zip(conversations, rewards, grades, strict=True):
        assert reward in (0.0, 1.0)
        if not reward:
            continue
        assert grade.verdict is Verdict.CORRECT
        gave = [output for output, one in results_of(completion) if one["content"] == "391"]
        assert any("391" not in output for output in gave)
        idle = [message for message in completion if message["role"] == "tool" and message["content"] != "391"]
        without = [message for message in completion if message not in idle]
        assert REWARDS["tool_use"]([PROMPT], [without], answer=[GOLD], answer_format=["python"]) == [1.0]
