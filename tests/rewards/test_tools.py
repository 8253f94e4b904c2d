"""`tool_use`: a call without effect pays nothing, whatever is written around it."""

import itertools

import pytest

from grpo_math.grading import Grade, Verdict, grade_batch
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


def paid(*messages, reward=REWARDS["tool_use"], **columns):
    return reward([PROMPT], [list(messages)], answer=[GOLD], answer_format=["python"], **columns)[0]


LONG = "9" * 6000
FAILED = [calls("1/0"), result("division by zero", status="failed")]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((calls("print(17 * 23)"), result("391"), says("#### 391")), 1.0),
        ((calls("print(17 * 23)"), result("so\n391.0"), says("#### 391")), 1.0),
        ((calls(f"print(17 * 23)  # {LONG}.{LONG}e999"), result("391"), says("#### 391")), 1.0),
        ((*FAILED, calls("17*23"), result("391"), says("#### 391")), 1.0),
        ((calls("print(391)"), result("391"), says("#### 391")), 0.0),
        ((calls("print(17 * 23)", content="It is 391."), result("391"), says("#### 391")), 0.0),
        ((calls("print(782-391)"), result("391"), says("#### 391")), 0.0),
        ((calls("print(3.91e2)"), result("391.0"), says("#### 391")), 0.0),
        ((calls("print(17 * 23)"), result("391"), says("#### 392")), 0.0),
        ((calls("print(17 * 23)"), result("391\nand more"), says("#### 391")), 0.0),
        ((calls("print(2)"), result("2"), says("#### 391")), 0.0),
        ((calls("print()"), result(""), says("#### 391")), 0.0),
        ((calls("print(17 * 23)"), result("391")), 0.0),
        ((calls("raise ValueError(17 * 23)"), result("391", status="failed"), says("#### 391")), 0.0),
        ((says("#### 391"),), 0.0),
        ((says("#### 17 * 23"),), 0.0),
        ((calls("print(17 * 23)"), result("391"), calls("print(17 * 23)"), result("391"), says("#### 391")), 1.0),
    ],
)  # fmt: skip
def test_a_right_answer_that_a_call_gave_is_paid_once_and_nothing_else(messages, expected):
    assert paid(*messages) == expected


@pytest.mark.parametrize(
    ("written", "output", "repeated"),
    [
        ("print(391)", " 391\n", True),
        ("print(-391)", "391", True),
        ("print(1_234)", "1,234", True),
        ("f(12, 34)", "12", True),
        ("f(12,345)", "12345", True),
        ("f(12,345)", "12", True),
        ("print(17 * 23)", "391", False),
        ("x391 = 3910", "391", False),
        ("3.5", "5", False),
        ("print('so')", "so", True),
        ("print('s' + 'o')", "so", False),
        ("print()", "", False),
        (f"print({LONG})", "7", False),
    ],
)
def test_a_result_that_the_model_had_written_is_an_echo(written, output, repeated):
    assert echoed([calls(written), result(output)]) == [repeated]


def test_each_result_comes_with_all_that_was_written_before_it():
    as_text = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"arguments": '{"code": "c"}'}}]}
    one, two = result("1"), result("2")
    assert results_of([calls("x", "y", content="a"), one, as_text, two, says("d")]) == [
        ("a\nx\ny", one),
        ('a\nx\ny\nb\n{"code": "c"}', two),
    ]
    assert results_of("a text") == []


def test_failed_calls_can_cost():
    reward = make_tool_use(effect=0.5, failed=0.2)
    gave = (calls("17*23"), result("391"), says("#### 391"))
    assert paid(*FAILED, *FAILED, *gave, reward=reward) == pytest.approx(0.1)
    assert paid(*FAILED, says("#### 391"), reward=reward) == pytest.approx(-0.2)
    assert paid(*FAILED, *gave, reward=make_tool_use(effect=0)) == 0.0
    assert paid(*gave, reward=reward, grade=[Grade(Verdict.CRASH, "391")]) is None


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
    golds, texts = [GOLD] * len(conversations), [text_of(one) for one in conversations]
    grades = grade_batch(golds, texts, answer_format="python")
    rewards = REWARDS["tool_use"]([PROMPT] * len(conversations), conversations, answer=golds, grade=grades)
    assert set(rewards) == {0.0, 1.0}
    for completion, grade in [(c, g) for c, g, reward in zip(conversations, grades, rewards, strict=True) if reward]:
        assert grade.verdict is Verdict.CORRECT
        gave = [written for written, one in results_of(completion) if one["content"] == "391"]
        assert any("391" not in written for written in gave)
        assert paid(*[one for one in completion if one["role"] != "tool" or one["content"] == "391"]) == 1.0
