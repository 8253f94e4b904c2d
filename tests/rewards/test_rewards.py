"""Every reward by numbers that can be worked out on paper, and the ways in which a reward function can fail."""

import asyncio
import inspect
import math
import signal
import sys

import pytest
import torch

from grpo_math.errors import ConfigError, RewardError
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.rewards import REWARDS, load_reward
from grpo_math.rewards.columns import text_of
from grpo_math.rewards.guard import RewardContext, checked
from grpo_math.rewards.rules import make_overlong, make_repetition, make_shaped
from grpo_math.run.signals import Stop, Stopped

GOOD_R1 = "easy </think> <answer>7</answer>"
GOOD_XML = "<reasoning>\n3 + 4\n</reasoning>\n<answer>\n7\n</answer>"


def call(name, completions, **columns):
    return REWARDS[name](prompts=["p"] * len(completions), completions=completions, **columns)


def reward(kind, returns):
    """Return a reward function of a kind, called mine, that returns or raises what ``returns`` gives."""

    def value():
        results = returns()
        if isinstance(results, BaseException):
            raise results
        return results

    def mine(prompts, completions, **columns):
        return value()

    async def later(prompts, completions, **columns):
        return value()

    class Judge:
        __name__ = "mine"

        async def __call__(self, prompts, completions, **columns):
            return value()

    later.__name__ = "mine"
    return {"a function": mine, "async": later, "an object": Judge()}[kind]


def called(guarded, completions):
    rewards = guarded(["p"] * len(completions), completions)
    return asyncio.run(rewards) if inspect.isawaitable(rewards) else rewards


def test_a_completion_is_a_text_or_the_last_assistant_message():
    chat = [
        {"role": "assistant", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "3"},
    ]
    assert text_of(chat) == "3"
    assert (
        text_of([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
        == "ab"
    )
    assert text_of([]) == ""
    assert call("accuracy", [[{"role": "assistant", "content": "#### 7"}], "#### 8"], answer=["7", "7"]) == [1.0, 0.0]


BY_HAND = [
    ("accuracy", ["#### 7", r"\boxed{7}", "It is 8.", ""], {}, [1.0, 1.0, 0.0, 0.0]),
    ("accuracy", ["#### 7"], {"answer": [""]}, [None]),
    (
        "accuracy",
        ["x", "y"],
        {"answer": None, "grade": [Grade(Verdict.CORRECT, "1"), Grade(Verdict.WRONG, "2")]},
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
    (
        "format_strict",
        ["so\n#### 7", GOOD_R1, GOOD_XML, r"so \boxed{7}", GOOD_XML],
        {"answer_format": ["gsm8k", "r1_zero", "xml", "boxed", "gsm8k"]},
        [1.0, 1.0, 1.0, 1.0, 0.0],
    ),
    (  # the tags in order
        "format_soft",
        [f"Well: {GOOD_XML} done", "<answer>7</answer><reasoning>x</reasoning>", "<reasoning></reasoning>", GOOD_XML],
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
    ("number_match", ["#### 7", "#### 8", "#### lots", ""], {}, [3.0, 1.0, 0.0, 0.0]),
    ("gated", [GOOD_XML, GOOD_XML, "7"], {"answer": ["7", "8", "7"]}, [1.0, 0.0, 0.0]),
    ("gated", [GOOD_XML], {"answer": [""]}, [None]),
    (  # a broken format is zero even if the answer cannot be graded, but a bad gold answer is None
        "r1_zero",
        ["no tags", GOOD_R1, "no tags"],
        {
            "answer_format": ["r1_zero"] * 3,
            "grade": [Grade(Verdict.CRASH, "9"), Grade(Verdict.CRASH, "9"), Grade(Verdict.BAD_GOLD, None)],
        },
        [0.0, None, None],
    ),
]


@pytest.mark.parametrize(("name", "completions", "columns", "expected"), BY_HAND)
def test_rewards_are_those_worked_out_by_hand(name, completions, columns, expected):
    golds = {} if "solution" in columns else {"answer": ["7"] * len(completions)}
    rewards = call(name, completions, **golds | columns)
    assert rewards == [None if value is None else pytest.approx(value) for value in expected]


@pytest.mark.parametrize("name", ["accuracy", "proximity", "number_match", "shaped"])
@pytest.mark.parametrize("verdict", Verdict)
def test_only_a_crash_and_a_bad_gold_are_none_and_any_other_answer_is_right_or_wrong(verdict, name):
    """Otherwise a policy could leave its bad answers out of the group's mean."""
    grades = [Grade(verdict, "9^9^9^9"), Grade(Verdict.CORRECT, "7")]
    first, second = call(name, ["x", "#### 7"], answer=["7", "7"], grade=grades)
    assert second > 0
    if verdict in (Verdict.CRASH, Verdict.BAD_GOLD):
        assert first is None
    elif name != "shaped":  # which also pays for the length
        assert first == second * (verdict is Verdict.CORRECT)


def test_proximity_of_a_wrong_answer_never_reaches_the_right_ones():
    golds = ["0", "1", "-3", "1/3", "1000000"]
    answers = ["0", "0.000001", "1.0000001", "-3.0001", "0.333333", "999999", "9" * 300]
    for gold in golds:
        for reward, g in zip(
            call("proximity", [f"#### {a}" for a in answers], answer=[gold] * len(answers)),
            grade_batch([gold] * len(answers), [f"#### {a}" for a in answers]),
            strict=True,
        ):
            assert reward == 1.0 if g.verdict is Verdict.CORRECT else 0.0 <= reward <= 0.5


def test_shaped_adds_one_a_tenth_and_a_twentieth():
    # right, in format, 50 of 100 tokens: 1 + 0.1 + 0.05 * (1 - 50/100) = 1.125; wrong and out of format, 100 tokens: 0
    ids = [[0] * 50, [0] * 100, [0] * 100]
    completions = ["#### 7", "It is 8.", "It is 7."]
    columns = {"answer": ["7"] * 3, "answer_format": ["gsm8k"] * 3, "completion_ids": ids, "max_completion_length": 100}
    assert call("shaped", completions, **columns) == pytest.approx([1.125, 0.0, 1.0])
    assert make_shaped(2, 0, 0)(["p"] * 3, completions, **columns) == pytest.approx([2.0, 0.0, 2.0])


def test_overlong_falls_from_zero_to_minus_one_over_the_cache():
    ids = [[0] * n for n in (0, 80, 85, 100, 120)]
    assert call("overlong", [""] * 5, completion_ids=ids, max_completion_length=100) == pytest.approx(
        [0, 0, -0.25, -1, -1]
    )


def test_a_name_or_a_setting_that_makes_no_sense_and_a_missing_column_are_one_clear_error():
    assert all(function.__name__ == key for key, function in REWARDS.items())
    with pytest.raises(ConfigError, match="'acuracy' is not known: did you mean 'accuracy'"):
        load_reward("acuracy")
    with pytest.raises(ConfigError, match="ngram"):
        make_repetition(0)
    with pytest.raises(ConfigError, match="cache"):
        make_overlong(9, 0)
    with pytest.raises(RewardError, match="reward function accuracy needs the column answer"):
        call("accuracy", ["#### 7"])


def test_a_users_function_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text("def short(prompts, completions, **columns):\n    return [0.5]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_reward("my_own_rewards:short")([], []) == [0.5]


@pytest.mark.parametrize("kind", ["a function", "async", "an object"])
def test_a_reward_keeps_its_name_and_passes_numbers_and_none(kind):
    guarded = checked(reward(kind, lambda: (True, None, 3)))
    assert guarded.__name__ == "mine"
    assert inspect.iscoroutinefunction(guarded) == (kind != "a function")  # so that TRL awaits it
    assert called(guarded, ["a"] * 3) == [1.0, None, 3.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, math.nan], "returned nan for row 1"),
        ([math.inf, 0.0], "returned inf for row 0"),
        ([-1e30, 0.0], "returned -1e\\+30 for row 0"),
        ([1.0, "0"], "returned a str for row 1"),
        (None, "returned NoneType"),
        (0.5, "returned float"),
        (KeyError("two\nlines"), "raised KeyError"),
    ],
)
@pytest.mark.parametrize("kind", ["a function", "async"])
def test_a_reward_that_returns_something_else_or_raises_is_one_clear_line(returned, message, kind):
    guarded = checked(reward(kind, lambda: returned))
    with pytest.raises(RewardError, match=f"reward function mine {message}") as caught:
        called(guarded, ["a", "b"])
    assert "\n" not in str(caught.value)


def test_in_training_an_error_is_kept_for_the_end_of_all_ranks_and_names_the_line():
    def mine(prompts, completions, **columns):
        raise OSError("away")

    context = RewardContext()
    assert checked(mine, context)(["p"], ["a"]) == [0.0]
    line = mine.__code__.co_firstlineno + 1
    assert f"reward function mine raised OSError: away at {__file__}:{line}: " in str(context.error)


@pytest.mark.parametrize("exception", [SystemExit(0), SystemExit("no key")])
@pytest.mark.parametrize("kind", ["a function", "async"])
def test_a_reward_that_exits_is_a_failure_that_names_it(exception, kind):
    guarded = checked(reward(kind, lambda: exception), context := RewardContext())
    assert called(guarded, ["a"]) == [0.0]
    assert str(context.error).startswith(f"reward function mine raised {type(exception).__name__}")


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_that_comes_within_a_reward_is_no_failure_of_it(number, raised):
    def mine(prompts, completions, **columns):
        signal.raise_signal(number)
        return [1.0]

    before = signal.getsignal(signal.SIGINT)
    with Stop(), pytest.raises(raised):
        checked(mine, RewardContext())(["p"], ["a"])
    assert signal.getsignal(signal.SIGINT) == before
    with Stop() as stop:
        stop.begin()  # a step is under way, which is finished
        assert checked(mine, RewardContext())(["p"], ["a"]) == [1.0]
        assert stop.code
        stop.heeded = True
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("kind", ["a function", "async"])
def test_what_a_reward_changes_in_torch_is_restored_and_the_random_state_is_not(kind, capsys):
    def change():
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return [float(torch.rand(()))]

    torch.manual_seed(0)
    guarded = checked(reward(kind, change))
    first = called(guarded, ["a"])
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)
    (line,) = capsys.readouterr().err.splitlines()
    assert "changed torch's grad mode or default dtype" in line
    assert called(guarded, ["a"]) != first
