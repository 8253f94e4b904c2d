"""Every reward by numbers that can be worked out on paper, and the ways in which a reward function can fail."""

import asyncio
import inspect
import math
import signal
import sys

import pytest
import torch
from waiting import until

from grpo_math.errors import ConfigError, RewardError
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.grading.formats import FORMATS, made_up
from grpo_math.rewards import REWARDS, columns, guard, load_reward
from grpo_math.rewards.columns import text_of
from grpo_math.rewards.guard import RewardContext, checked
from grpo_math.rewards.rules import gated, make_overlong, make_repetition, make_shaped
from grpo_math.run.signals import Stop, Stopped

GOOD_R1 = "easy </think> <answer>7</answer>"
GOOD_XML = "<reasoning>\n3 + 4\n</reasoning>\n<answer>\n7\n</answer>"


def call(name, completions, **columns):
    return REWARDS[name](prompts=["p"] * len(completions), completions=completions, **columns)


def test_every_key_names_a_function_of_that_name():
    wanted = "accuracy r1_zero gsm8k format_strict format_soft xml_count integer_only proximity number_match shaped"
    wanted += " overlong repetition llm_judge tool_use gated"
    assert set(REWARDS) == set(wanted.split())
    assert all(function.__name__ == key for key, function in REWARDS.items())


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


def test_accuracy_counts_a_right_answer_in_any_form_and_leaves_out_what_cannot_be_graded():
    completions = ["#### 7", r"\boxed{7}", "It is 8.", "", "#### 7"]
    assert call("accuracy", completions, answer=["7", "7", "7", "7", ""]) == [1.0, 1.0, 0.0, 0.0, None]


@pytest.mark.parametrize("verdict", [Verdict.CRASH, Verdict.BAD_GOLD])
def test_an_ungradable_verdict_is_none_and_never_zero(verdict):
    grades = [Grade(verdict, "9^9^9"), Grade(Verdict.CORRECT, "7")]
    for name in ("accuracy", "proximity", "number_match", "shaped"):
        first, second = call(name, ["x", "#### 7"], answer=["7", "7"], grade=grades)
        assert first is None, name
        assert second > 0, name


def test_an_answer_that_cannot_be_checked_is_rewarded_like_a_wrong_one():
    """Otherwise a policy could leave its bad answers out of the group's mean."""
    for verdict in (Verdict.UNCHECKABLE, Verdict.WRONG):
        grades = [Grade(verdict, "9^9^9^9"), Grade(verdict, "9!!!")]
        for name in ("accuracy", "proximity", "number_match", "gsm8k"):
            columns = {"answer": ["7", "7"], "answer_format": ["gsm8k"] * 2, "grade": grades}
            assert call(name, ["#### 9^9^9^9", "#### 9!!!"], **columns) == [0.0, 0.0], name


def test_grades_at_hand_are_used_and_nothing_is_graded_again(monkeypatch):
    monkeypatch.setattr(columns, "grade_batch", lambda *a, **k: pytest.fail("graded again"))
    assert call("accuracy", ["x", "y"], grade=[Grade(Verdict.CORRECT, "1"), Grade(Verdict.WRONG, "2")]) == [1.0, 0.0]


def test_without_grades_at_hand_the_runs_time_limit_holds(monkeypatch):
    limits = []

    def graded(golds, texts, timeout, **settings):
        limits.append(timeout)
        return grade_batch(golds, texts, timeout=timeout, **settings)

    monkeypatch.setattr(columns, "grade_batch", graded)
    for settings in ({"grade_timeout": 0.5}, {}):
        assert call("accuracy", ["#### 7"], answer=["7"], **settings) == [1.0]
    assert limits == [0.5, 5.0]


def test_trls_own_columns_do_no_harm():
    columns = {"completion_ids": [[1, 2]], "trainer_state": object(), "log_extra": print, "log_metric": print}
    assert call("accuracy", ["#### 7"], solution=["7"], **columns) == [1.0]


def test_r1_zero_counts_an_answer_only_within_the_format():
    completions = [
        GOOD_R1,
        "<answer>7</answer>",
        "so </think> <answer>8</answer>",
        r"so \boxed{7}",
        GOOD_R1 + " and more",
    ]
    assert call("r1_zero", completions, answer=["7"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_an_answer_is_graded_again_where_a_grade_at_hand_is_of_another_format():
    completion, formats = "<answer>8</answer>\n#### 7", ["xml", "gsm8k"]
    other = grade_batch(["7"] * 2, [completion] * 2, answer_format=formats)
    assert [grade.verdict for grade in other] == [Verdict.WRONG, Verdict.CORRECT]
    columns = {"answer": ["7"] * 2, "answer_format": formats, "grade": other}
    assert call("gsm8k", [completion] * 2, **columns) == [1.0, 1.0]


def test_a_broken_format_is_zero_even_where_the_answer_cannot_be_graded_but_a_bad_gold_is_none():
    crashes = [Grade(Verdict.CRASH, "9"), Grade(Verdict.CRASH, "9"), Grade(Verdict.BAD_GOLD, None)]
    completions = ["no tags", GOOD_R1, "no tags"]
    columns = {"answer": ["7", "7", ""], "answer_format": ["r1_zero"] * 3, "grade": crashes}
    assert call("r1_zero", completions, **columns) == [0.0, None, None]


def test_gsm8k_wants_one_closing_line():
    completions = ["3 + 4\n#### 7", "It is 7.", "#### 7\nor so", "#### 8", "#### 1,000"]
    assert call("gsm8k", completions, answer=["7", "7", "7", "7", "1000"]) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_the_strict_format_is_the_rows_own():
    completions = ["so\n#### 7", GOOD_R1, GOOD_XML, r"so \boxed{7}", GOOD_XML]
    formats = ["gsm8k", "r1_zero", "xml", "boxed", "gsm8k"]
    assert call("format_strict", completions, answer_format=formats) == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", FORMATS)
def test_two_answers_are_not_in_the_format_whichever_is_right(name):
    for first, second in (("7", "8"), ("8", "7"), ("7", "7")):
        for joint in ("\n", " or ", ", "):
            completion = made_up(first, name) + joint + made_up(second, name)
            assert call("format_strict", [completion], answer_format=[name]) == [0.0]
            if name in ("gsm8k", "r1_zero"):
                assert call(name, [completion], answer=["7"]) == [0.0]


def test_the_soft_format_wants_the_tags_in_order_only():
    completions = [
        f"Well: {GOOD_XML} done",
        "<answer>7</answer><reasoning>x</reasoning>",
        "<reasoning></reasoning>",
        GOOD_XML,
    ]
    assert call("format_soft", completions) == [1.0, 0.0, 0.0, 1.0]


def test_xml_count_gives_a_quarter_a_tag_less_a_thousandth_a_trailing_character():
    completions = [GOOD_XML, "<reasoning>x</reasoning>", GOOD_XML + "ten chars!", "", "<answer>7</answer>" + "x" * 900]
    assert call("xml_count", completions) == pytest.approx([1.0, 0.5, 0.99, 0.0, 0.0])


def test_a_tag_written_twice_earns_nothing():
    assert call("xml_count", ["<reasoning>" * 50 + "</reasoning><answer>7</answer>"]) == [0.75]


def test_integer_only_looks_at_the_answer_and_not_at_its_truth():
    completions = ["#### 8", "#### 1,200", "#### 7.5", "#### seven-ish", r"\boxed{\frac{8}{2}}"]
    assert call("integer_only", completions, answer=["7"] * 5) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_proximity_is_half_of_one_minus_the_relative_distance():
    completions = ["#### 100", "#### 90", "#### 50", "#### -100", "#### 10000", "#### x"]
    expected = [1.0, 0.45, 0.25, 0.0, 0.005, 0.0]  # 0.5 * (1 - 10/100), 0.5 * (1 - 50/100), .., 0.5 * (1 - 9900/10000)
    assert call("proximity", completions, answer=["100"] * 6) == pytest.approx(expected)


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


def test_number_match_is_three_for_right_one_for_a_number_zero_for_none():
    assert call("number_match", ["#### 7", "#### 8", "#### lots", ""], answer=["7"] * 4) == [3.0, 1.0, 0.0, 0.0]


def test_shaped_adds_one_a_tenth_and_a_twentieth():
    # right, in format, 50 of 100 tokens: 1 + 0.1 + 0.05 * (1 - 50/100) = 1.125; wrong and out of format, 100 tokens: 0
    ids = [[0] * 50, [0] * 100, [0] * 100]
    completions = ["#### 7", "It is 8.", "It is 7."]
    columns = {"answer": ["7"] * 3, "answer_format": ["gsm8k"] * 3, "completion_ids": ids, "max_completion_length": 100}
    assert call("shaped", completions, **columns) == pytest.approx([1.125, 0.0, 1.0])
    assert make_shaped(2, 0, 0)(["p"] * 3, completions, **columns) == pytest.approx([2.0, 0.0, 2.0])


def test_overlong_falls_from_zero_to_minus_one_over_the_cache():
    ids = [[0] * n for n in (0, 80, 85, 100, 120)]
    assert make_overlong(100, 20)(["p"] * 5, [""] * 5, completion_ids=ids) == pytest.approx([0, 0, -0.25, -1, -1])
    assert call("overlong", [""] * 5, completion_ids=ids, max_completion_length=100) == pytest.approx(
        [0, 0, -0.25, -1, -1]
    )


def test_the_trainers_columns_are_added_to_those_of_the_rows():
    def mine(prompts, completions, answer, grade, **columns):
        return [len(answer) + grade[0] + columns["max_completion_length"]]

    context = RewardContext({"max_completion_length": 100, "grade": [5]})
    assert checked(mine, context)(["p"], ["a"], answer=["7"]) == [106.0]


def test_repetition_is_minus_the_share_of_repeated_ngrams():
    # "a b a b a": ab ba ab ba -> 2 of 4 distinct
    assert make_repetition(2, 1.0)(["p"] * 3, ["a b a b a", "a b c d", "a"]) == [-0.5, 0.0, 0.0]
    assert call("repetition", ["go " * 100])[0] == pytest.approx(-(1 - 1 / 98))


@pytest.mark.parametrize(
    ("make", "field"), [(lambda: make_repetition(0), "ngram"), (lambda: make_overlong(9, 0), "cache")]
)
def test_a_setting_that_makes_no_sense_is_named(make, field):
    with pytest.raises(ConfigError, match=field):
        make()


def test_gated_pays_the_format_only_with_a_right_answer():
    completions = [GOOD_XML, GOOD_XML, "7"]
    assert call("gated", completions, answer=["7", "8", "7"]) == [1.0, 0.0, 0.0]
    assert call("gated", [GOOD_XML], answer=[""]) == [None]
    assert gated(REWARDS["format_strict"]).__name__ == "format_strict_on_accuracy"


def test_a_missing_gold_column_is_one_clear_error():
    with pytest.raises(RewardError, match="reward function accuracy needs the column answer"):
        call("accuracy", ["#### 7"])


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ConfigError, match="'acuracy' is not known: did you mean 'accuracy'"):
        load_reward("acuracy")


def test_a_users_function_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text("def short(prompts, completions, **columns):\n    return [0.5]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_reward("my_own_rewards:short")([], []) == [0.5]
    with pytest.raises(ConfigError, match="names no function of my_own_rewards: use one of its functions: short"):
        load_reward("my_own_rewards:shrt")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_reward("no_such_module_here:f")


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
    ],
)
def test_a_reward_that_returns_something_else_is_one_clear_line(returned, message):
    def mine(prompts, completions, **columns):
        return returned

    with pytest.raises(RewardError, match=f"reward function mine {message}") as caught:
        checked(mine)(["p", "p"], ["a", "b"])
    assert "\n" not in str(caught.value)


def test_a_reward_that_raises_is_one_clear_line_with_its_cause():
    def mine(prompts, completions, **columns):
        raise KeyError("two\nlines")

    with pytest.raises(RewardError, match="reward function mine raised KeyError") as caught:
        checked(mine)(["p"], ["a"])
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_in_training_a_reward_that_raises_is_called_once_more_with_the_same_arguments():
    seen = []

    def mine(prompts, completions, fails, **columns):
        seen.append(completions)
        if len(seen) <= fails:
            raise OSError("away")
        return [1.0]

    context = RewardContext()
    assert checked(mine, context)(["p"], ["a"], fails=1) == [1.0]
    assert (context.retries, context.error, seen) == (1, None, [["a"], ["a"]])
    checked(mine, context := RewardContext())(["p"], ["a"], fails=9)
    assert (context.retries, len(seen)) == (1, 4)
    assert "reward function mine raised OSError" in str(context.error)
    assert f"twice in a row at {__file__}" in str(context.error)


def test_checked_keeps_the_name_and_passes_numbers_and_none():
    def mine(prompts, completions, **columns):
        return (True, None, 3)

    assert checked(mine).__name__ == "mine"
    assert checked(mine)(["p"] * 3, ["a"] * 3) == [1.0, None, 3.0]


def test_checked_holds_for_async_functions():
    async def mine(prompts, completions, **columns):
        return [math.nan]

    with pytest.raises(RewardError, match="reward function mine returned nan"):
        asyncio.run(checked(mine)(["p"], ["a"]))


def test_an_object_with_an_async_call_is_awaited():
    class Judge:
        async def __call__(self, prompts, completions, **columns):
            return [1.0]

    guarded = checked(Judge())
    assert inspect.iscoroutinefunction(guarded)  # so that TRL awaits it
    assert asyncio.run(guarded(["p"], ["a"])) == [1.0]


@pytest.mark.parametrize("exception", [SystemExit(0), SystemExit("no key")])
@pytest.mark.parametrize("kind", ["a function", "async"])
def test_a_reward_that_exits_is_a_failure_that_names_it(exception, kind):
    def mine(prompts, completions, **columns):
        raise exception

    async def later(prompts, completions, **columns):
        raise exception

    guarded = checked(mine if kind == "a function" else later, context := RewardContext())
    called = guarded(["p"], ["a"])
    assert (asyncio.run(called) if kind == "async" else called) == [0.0]
    assert context.retries == 1
    said = f"reward function {guarded.__name__} raised {type(exception).__name__}"
    assert str(context.error).startswith(said)


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


def test_a_reward_that_takes_long_is_named_and_not_ended(monkeypatch, capsys):
    monkeypatch.setattr(guard, "SLOW", 0.02)

    def mine(prompts, completions, **columns):
        until(lambda: "mine" in capsys.readouterr().err, 60)
        return [1.0]

    assert checked(mine)(["p"], ["a"]) == [1.0]


@pytest.mark.parametrize("kind", ["a function", "async"])
def test_what_a_reward_changes_in_torch_is_restored_and_the_random_state_is_not(kind, capsys):
    def change():
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return [float(torch.rand(()))]

    def mine(prompts, completions, **columns):
        return change()

    async def later(prompts, completions, **columns):
        return change()

    torch.manual_seed(0)
    called = checked(mine if kind == "a function" else later)(["p"], ["a"])
    first = asyncio.run(called) if kind == "async" else called
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)
    (line,) = capsys.readouterr().err.splitlines()
    assert "changed torch's grad mode or default dtype" in line
    assert checked(mine)(["p"], ["a"]) != first
