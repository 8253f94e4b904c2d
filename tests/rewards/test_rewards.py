"""Every reward by numbers that can be worked out on paper, and the ways in which a reward function can fail."""

import asyncio
import functools
import inspect
import json
import math
import signal
import threading
from decimal import Decimal

import pytest
import torch
from datasets import Dataset

from grpo_math.errors import ConfigError, RewardError, UserError
from grpo_math.grading import Grade, Verdict
from grpo_math.rewards import REWARDS, guard, load_reward
from grpo_math.rewards.inputs import GRADE, GRADE_TIMEOUT, MAX_LENGTH, completion_text, read_gold_answers
from grpo_math.system.signals import Stopped, stopping
from grpo_math.system.user_functions import start

GOOD_R1 = "easy </think> <answer>7</answer>"
GOOD_XML = "<reasoning>\n3 + 4\n</reasoning>\n<answer>\n7\n</answer>"


def call(name, completions, **columns):
    return REWARDS.get(name, name)(prompts=["p"] * len(completions), completions=completions, **columns)


def of_kind(kind, function):
    """Return a reward function of a kind, called mine, that does what ``function`` does."""

    async def mine(*arguments, **columns):
        return function(*arguments, **columns)

    function.__name__ = "mine"
    judge = type("Judge", (), {"__name__": "mine", "__call__": staticmethod(mine)})
    return {"a function": function, "async": mine, "an object": judge()}[kind]


def called(guarded, completions, **columns):
    rewards = guarded(["p"] * len(completions), completions, **columns)
    return start(rewards).result() if inspect.isawaitable(rewards) else rewards


def test_an_async_reward_has_one_loop_for_all_its_calls():
    alone = asyncio.Semaphore(1)  # belongs to the loop in which somebody waits for it first

    async def one(completion):
        async with alone:
            await asyncio.sleep(0)
            return float(completion)

    async def mine(completions, **columns):
        return await asyncio.gather(*map(one, completions))

    for _ in range(2):
        assert called(guard.guarded(mine), ["1", "2"]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("completion", "role", "text"),
    [
        ("a text", "assistant", "a text"),
        ([{"role": role, "content": role} for role in ("assistant", "user", "tool")], "assistant", "assistant"),
        ([{"content": text} for text in ("one", "two")], "user", "two"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {}, {"text": "b"}]}], "assistant", "ab"),
        ([{"role": "assistant", "content": None}], "assistant", ""),
        ([{"role": "tool", "content": "two"}], "assistant", ""),
        ([], "assistant", ""),
    ],
)
def test_the_text_of_a_completion_is_that_of_the_last_message_with_a_role(completion, role, text):
    assert completion_text(completion, role) == text


@pytest.mark.parametrize(
    ("name", "completions", "columns", "expected"),
    [
        ("accuracy", ["#### 7", r"\boxed{7}", "It is 8.", ""], {}, [1.0, 1.0, 0.0, 0.0]),
        ("accuracy", ["#### 7"], {"answer": [""]}, [None]),
        ("accuracy", [[{"role": "assistant", "content": "#### 7"}], "#### 8"], {}, [1.0, 0.0]),
        ("accuracy", ["#### 7", "#### 8"], {"answer": [7, True], "solution": ["8", "8"]}, [1.0, 1.0]),
        ("accuracy", [r"\boxed{8}\n#### 7", r"\boxed{8}\n#### 7"], {"answer_format": ["gsm8k", "boxed"]}, [1.0, 0.0]),
        (
            "accuracy",
            ["x", "y"],
            {"answer": None, GRADE: [Grade(Verdict.CORRECT, "1"), Grade(Verdict.WRONG, "2")]},
            [1, 0],
        ),
        ("accuracy", ["#### 7"], {"solution": ["7"], "completion_ids": [[1]], "log_metric": print}, [1.0]),
        (
            "r1_zero",
            [GOOD_R1, "<answer>7</answer>", "so </think> <answer>8</answer>", r"so \boxed{7}", GOOD_R1 + " and more"],
            {},
            [1.0, 0.0, 0.0, 0.0, 0.0],
        ),
        ("gsm8k", ["3 + 4\n#### 7", "It is 7.", "#### 7\nor so", "#### 8"], {}, [1.0, 0.0, 0.0, 0.0]),
        (  # grades of another format are not used
            "gsm8k",
            ["<answer>8</answer>\n#### 7"] * 2,
            {"answer_format": ["xml", "gsm8k"], GRADE: [Grade(Verdict.WRONG, "8")] * 2},
            [1.0, 1.0],
        ),
        ("gsm8k", ["#### 7"], {"answer_format": "gsm8k", GRADE: [Grade(Verdict.WRONG, "8")]}, [0.0]),
        (
            "format_strict",
            ["so\n#### 7", GOOD_R1, GOOD_XML, r"so \boxed{7}", GOOD_XML],
            {"answer_format": ["gsm8k", "r1_zero", "xml", "boxed", "gsm8k"]},
            [1.0, 1.0, 1.0, 1.0, 0.0],
        ),
        (  # the tags in order
            "format_soft",
            [
                f"Well: {GOOD_XML} done",
                "<answer>7</answer><reasoning>x</reasoning>",
                "<reasoning></reasoning>",
                GOOD_XML,
            ],
            {},
            [1.0, 0.0, 0.0, 1.0],
        ),
        (  # a quarter for each tag, once, less a thousandth for each trailing character
            "xml_count",
            [GOOD_XML, "<reasoning>x</reasoning>", GOOD_XML + "ten chars!", "<answer>7</answer>" + "x" * 900],
            {},
            [1.0, 0.5, 0.99, 0.0],
        ),
        ("xml_count", ["<reasoning>" * 50 + "</reasoning><answer>7</answer>"], {}, [0.75]),
        ("xml_count", ["so\n#### 7 apples", "####" * 2], {"answer_format": "gsm8k"}, [1.0, 0.0]),
        (
            "integer_only",
            ["#### 8", "#### 1,200", "#### 7.5", "#### seven-ish", r"\boxed{\frac{8}{2}}"],
            {},
            [1.0, 1.0, 0.0, 0.0, 1.0],
        ),
        (  # 0.5 * (1 - 10/100), 0.5 * (1 - 50/100), .., 0.5 * (1 - 9900/10000)
            "proximity",
            ["#### 100", "#### 90", "#### 50", "#### -100", "#### 10000", "#### x"],
            {"answer": ["100"] * 6},
            [1.0, 0.45, 0.25, 0.0, 0.005, 0.0],
        ),
        ("proximity", ["#### -90", "#### 0", "#### 1/3"], {"answer": ["#### -100", "100", "2/3"]}, [0.45, 0.0, 0.25]),
        (  # a percentage is its number as well
            "proximity",
            ["#### 50%", "#### 45%", "#### 0.45", "#### 45%", "#### 0.5%", "#### $50"],
            {"answer": ["50", "50", "50%", "0.5", "50%", "50%"]},
            [1.0, 0.45, 0.45, 0.45, 0.005, 0.005],
        ),
        (  # a wrong answer gets at most half
            "proximity",
            ["#### 1.0000001", "#### 0.333333", "#### " + "9" * 300, "#### 0.000001"],
            {"answer": ["1", "1/3", "1", "0"]},
            [0.49999995, 0.4999995, 0.0, 0.0],
        ),
        ("number_match", ["#### 7", "#### 8", "#### lots", ""], {}, [3.0, 1.0, 0.0, 0.0]),
        (  # zero up to 80 tokens, then minus one twentieth for each, and at most minus one
            "overlong",
            [""] * 5,
            {"completion_ids": [[0] * n for n in (0, 80, 85, 100, 120)], MAX_LENGTH: 100},
            [0.0, 0.0, -0.25, -1.0, -1.0],
        ),
        ("overlong", ["a " * 820, "a " * 922], {}, [0.0, -0.5]),  # 1,024 words, of which 204 are the end
        ("repetition", ["a b c", "a A a a", "a b c a b c d", "", "好" * 6], {}, [0.0, -0.5, -0.2, 0.0, -0.75]),
        (  # right, in format and 50 of 100 tokens: 1 + 0.05 + 0.025 / 2; the length beyond the limit costs nothing
            "shaped",
            ["#### 7", "It is 8.", "#### 8", "#### 7"],
            {
                "answer": ["7", "7", "7", ""],
                "answer_format": ["gsm8k"] * 4,
                "completion_ids": [[0] * 50, [0] * 100, [0] * 200, []],
                MAX_LENGTH: 100,
            },
            [1.0625, 0.0, 0.05, None],
        ),
        (
            "brevity",
            ["#### 7", "#### 8", ""],
            {"answer": ["7", "7", ""], "completion_ids": [[0] * 50] * 3, MAX_LENGTH: 100},
            [-0.5, -0.5, None],
        ),
        ("gated", [GOOD_XML, GOOD_XML, "7"], {"answer": ["7", "8", "7"]}, [1.0, 0.0, 0.0]),
        ("gated", [GOOD_XML], {"answer": [""]}, [None]),
        (  # a broken format is zero even if the answer cannot be graded, but a bad gold answer is None
            "r1_zero",
            ["no tags", GOOD_R1, "no tags"],
            {
                "answer_format": ["r1_zero"] * 3,
                GRADE: [Grade(Verdict.CRASH, "9"), Grade(Verdict.CRASH, "9"), Grade(Verdict.BAD_GOLD, None)],
            },
            [0.0, None, None],
        ),
    ],
)
def test_rewards_are_those_worked_out_by_hand(name, completions, columns, expected):
    golds = {} if "solution" in columns else {"answer": ["7"] * len(completions)}
    rewards = call(name, completions, **golds | columns)
    assert rewards == [None if value is None else pytest.approx(value) for value in expected]


@pytest.mark.parametrize("reward", ["accuracy", "proximity", "number_match"])
@pytest.mark.parametrize("verdict", Verdict)
def test_only_a_crash_and_a_bad_gold_are_none_and_any_other_answer_is_right_or_wrong(verdict, reward):
    """Otherwise a policy could leave its bad answers out of the group's mean."""
    grades = [Grade(verdict, "9^9^9^9"), Grade(Verdict.CORRECT, "7")]
    first, second = call(reward, ["x", "#### 7"], answer=["7", "7"], **{GRADE: grades})
    assert second == (3.0 if reward == "number_match" else 1.0)
    assert first == (None if verdict in ("crash", "bad_gold") else second * (verdict == "correct"))


def test_each_reward_has_the_name_of_its_key_and_load_reward_takes_keys_and_functions():
    assert all(load_reward(key) is function and function.__name__ == key for key, function in REWARDS.items())
    assert load_reward("json:loads") is json.loads


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: load_reward("acuracy"), "'acuracy' is not known: did you mean 'accuracy'"),
        (lambda: load_reward("my_rewards.short"), "did you mean my_rewards:short"),
        (lambda: call("accuracy", ["#### 7"]), "reward function accuracy needs the column answer or solution"),
    ],
)
def test_a_name_or_a_setting_that_makes_no_sense_and_a_missing_column_are_one_clear_error(action, message):
    with pytest.raises(UserError, match=message):
        action()


@pytest.mark.parametrize("kind", ["a function", "async", "an object"])
def test_a_reward_keeps_its_name_and_gets_the_columns_and_passes_numbers_and_none(kind):
    columns = {}

    def mine(prompts, completions, **more):
        columns.update(more)
        return True, None, Decimal(3), torch.tensor(0.5)

    guarded = guard.guarded(of_kind(kind, mine), {GRADE: [1]})
    assert inspect.iscoroutinefunction(guarded) == (kind != "a function")  # so that TRL awaits it
    assert called(guarded, ["a"] * 4, answer=["7"], solution=["7"]) == [1.0, None, 3.0, 0.5]
    assert columns == {"answer": ["7"], "solution": ["7"]}, "TRL's alone: grade is passed only to a parameter"


def test_gold_answers_of_data_as_tensors_are_their_numbers():
    answers = Dataset.from_list([{"answer": 0.1}, {"answer": 70.0}]).with_format("torch")[:]["answer"]
    assert read_gold_answers("accuracy", {"answer": [*answers, torch.tensor(7)]}) == ["0.1", "70.0", "7"]


def test_a_value_of_the_trainer_goes_to_a_parameter_without_a_default_unless_the_data_have_that_column():
    added = {GRADE: ["ours"], GRADE_TIMEOUT: 5.0, MAX_LENGTH: 16}
    seen = []

    def bare(prompts, completions):
        return seen.append(()) or [1.0]

    def named(completions, grade, max_completion_length, grade_timeout=1, **columns):
        return seen.append((grade, max_completion_length, grade_timeout, columns)) or [1.0]

    guard.guarded(bare, added)(prompts=["p"], completions=["a"])
    guard.guarded(functools.partial(named), added)(prompts=["p"], completions=["a"])
    guard.guarded(named, added)(prompts=["p"], completions=["a"], grade=[3], max_completion_length=[99])
    assert seen == [(), (["ours"], 16, 1, {"prompts": ["p"]}), ([3], [99], 1, {"prompts": ["p"]})]


def test_a_reward_of_nan_is_none_with_one_warning(capsys):
    def sometimes(prompts, completions, **columns):
        return [math.nan, torch.tensor(math.nan), 1]

    for _ in range(2):
        assert guard.guarded(sometimes)(prompts=["p"] * 3, completions=["a"] * 3) == [None, None, 1.0]
    assert capsys.readouterr().err.count("reward function sometimes returned NaN") == 1


def needs_level(completions, level, **columns):
    return level


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions: return one number or None for each"),
        ([1.0, math.inf], "returned inf for row 1: return a finite number or None"),
        ([math.inf, 0.0], "returned inf for row 0"),
        ([-1e30, 0.0], "returned -1e\\+30 for row 0"),
        ([1.0, "0"], "returned a str for row 1"),
        (None, "returned NoneType: return a list with one number a completion"),
        (0.5, "returned float"),
        ("ab", "returned str"),
        (b"ab", "returned bytes"),
        (KeyError("two\nlines"), "raised KeyError"),
        (SystemExit(0), "raised SystemExit"),
        (ConfigError("seed", -1, "is negative", "give more"), None),
    ],
)
@pytest.mark.parametrize("kind", ["a function", "async"])
def test_a_reward_that_returns_something_else_raises_or_exits_is_one_clear_line(returned, message, kind):
    def mine(prompts, completions, **columns):
        if isinstance(returned, BaseException):
            raise returned
        return returned

    with pytest.raises(UserError, match=f"^reward function mine {message}" if message else "seed=-1") as caught:
        called(guard.guarded(of_kind(kind, mine)), ["a", "b"])
    assert "\n" not in str(caught.value)
    errors = []
    assert called(guard.guarded(of_kind(kind, mine), errors=errors), ["a", "b"]) == [0.0, 0.0]
    assert called(guard.guarded(REWARDS["accuracy"], errors=errors), ["a"]) == [0.0]
    assert str(errors[0]) == str(caught.value), "the first error is the reason"


def test_a_reward_that_needs_a_column_which_the_data_lack_names_it_and_those_that_exist():
    data = {"answer": ["7"], "id": ["a/1"], "trainer_state": None, GRADE: [None]}
    with pytest.raises(
        RewardError, match="needs_level needs the column level, and the data have answer, id: add the column, or"
    ):
        guard.guarded(needs_level)(["p"], ["a"], **data)
    with pytest.raises(
        RewardError, match=r"raised KeyError: 'level' at .*, and the data have answer, id: training stops"
    ):
        guard.guarded(lambda prompts, completions, **columns: columns["level"])(["p"], ["a"], **data)

    @functools.wraps(needs_level)
    def filled(**columns):
        return needs_level(level=[1.0], **columns)

    assert guard.guarded(filled)(["p"], ["a"], **data) == [1.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_names_the_line_of_the_reward_that_led_to_it(is_async):
    def plain(prompts, completions, **columns):
        json.loads("{")

    async def later(prompts, completions, **columns):
        json.loads("{")

    mine = later if is_async else plain
    position = f"{__file__}:{mine.__code__.co_firstlineno + 1}"
    with pytest.raises(RewardError, match=f" at {position}: training stops instead of assuming a reward of 0"):
        called(guard.guarded(mine), ["a"])
    with pytest.raises(RewardError, match="at its call: training stops"):
        guard.guarded(lambda completions: [1.0])(["p"], ["a"])


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_that_comes_within_a_reward_is_no_failure_of_it(number, raised):
    def mine(prompts, completions, **columns):
        signal.raise_signal(number)
        return [1.0]

    with stopping(), pytest.raises(raised):
        guard.guarded(mine, errors=[])(["p"], ["a"])


@pytest.mark.parametrize("kind", ["a function", "async"])
def test_a_slow_reward_is_named_and_what_it_changes_in_torch_but_the_random_state_is_restored(
    kind, capsys, monkeypatch
):
    monkeypatch.setattr(guard, "SLOW", 0.1)

    def timers():
        running = threading.enumerate()
        return [thread for thread in running if getattr(thread, "function", None) is guard._warn]

    def mine(prompts, completions, **columns):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        # A waiting thread must not keep an ending process alive.
        assert all(timer.daemon for timer in timers())
        for timer in timers() if columns["waits"] else ():
            timer.join()
        return [float(torch.rand(()))]

    torch.manual_seed(0)
    guarded = guard.guarded(of_kind(kind, mine))
    first = called(guarded, ["a"], waits=True)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)
    assert capsys.readouterr().err.splitlines() == [
        "warning: reward function mine has been running for 0.1 seconds",
        "warning: reward function mine changed torch's grad mode or default dtype: they are restored",
    ]
    monkeypatch.setattr(guard, "SLOW", 60.0)
    assert called(guarded, ["a"], waits=False) != first
    for timer in timers():
        timer.join(30)  # it was cancelled, and ends at once
    assert not timers()
    assert "running" not in capsys.readouterr().err
