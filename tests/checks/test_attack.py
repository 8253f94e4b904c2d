"""The attack: reward functions with a hole are found, honest ones pass, within the time."""

import json
import re
from itertools import count

import pytest

from grpo_math.checks import attack
from grpo_math.checks.attack import Attacked
from grpo_math.checks.setup import Setup
from grpo_math.cli import main
from grpo_math.settings.recipe import read

# Each function is (completions, answer) -> rewards, as users write them.
FUNCTIONS = r"""
import random
import re
text = lambda completion: completion[0]["content"]
last = lambda text: text.split("####")[-1].strip()
tagged = lambda text: text.split("<answer>")[-1].split("</answer>")[0].strip()
def each(f):
    def reward(completions, answer, **columns):
        return [float(f(text(c), a)) for c, a in zip(completions, answer)]
    return reward
exact = each(lambda t, a: last(t) == a)
signed = each(lambda t, a: 1 if last(t) == a else -1)
concise = each(lambda t, a: (last(t) == a) * (1 - len(t) / 1e5))
own_tags = each(lambda t, a: "<OUT>" in t and t.split("<OUT>")[-1].split("</OUT>")[0].strip() == a)
anywhere = each(lambda t, a: a in t)
any_box = each(lambda t, a: a in re.findall(r"boxed\{(.*?)\}", t))
bonus = each(lambda t, a: 2 * (tagged(t) == a) + tagged(t).isdigit() / 2 + ("</think>" in t))
steps = each(lambda t, a: (last(t) == a) + min(1, len(re.findall("First|Next|Finally", t)) / 3))
length = each(lambda t, a: (last(t) == a) + min(1, len(t) / 5000))
empty = each(lambda t, a: last(t) in (a, ""))
nothing = each(lambda t, a: 0)
fails = each(lambda t, a: t.split("####")[1].strip() == a)
always_fails = each(lambda t, a: t.nothing)
noisy = each(lambda t, a: (last(t) == a) * (1 + random.random() / 1000))
def unknown(completions, answer, **columns):
    return [None if "box" in text(c) else float(last(text(c)) == a) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    rows = [
        {"problem": f"Tom has {n} apples and eats {n - 5}. How many apples are left of ${n}$?"} for n in range(9, 17)
    ]
    text = "".join(json.dumps({**row, "answer": str(1200 + 7 * i)}) + "\n" for i, row in enumerate(rows))
    (tmp_path / "mine.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def attacked(*rewards: str, seconds: float = 0.0) -> Attacked:
    """The result for rewards of which a call takes so long, with their weights and other words."""
    setup = Setup(read(["--rewards", *rewards, "--dataset", "mine.jsonl"]))
    return attack.attack(setup, count(0.0, seconds * attack.FEWEST).__next__)


@pytest.mark.parametrize("name", ["exact", "signed", "concise", "own_tags", "noisy", "unknown"])
def test_an_honest_reward_passes(name, here):
    tags = ["--system_prompt", "Think in <IN></IN>, answer in <OUT></OUT>."] if name == "own_tags" else []
    assert attacked(f"own_functions:{name}", *tags).messages("error") == []


@pytest.mark.parametrize("name", ["accuracy", "gsm8k", "r1_zero", "gated", "shaped"])
def test_the_rewards_of_the_shipped_recipes_pass(name, here, capsys):
    assert main(["attack", name, "--dataset", "mine.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("anywhere", "candidates"),
        ("any_box", "candidates in boxes"),
        ("bonus", "the same digit|another problem|number of the problem|gold answer"),
        ("steps", ""),
        ("length", "a very long text"),
        ("empty", "without an answer|nothing"),
    ],
)
def test_a_hole_is_found_with_its_text_and_its_share(name, found, here):
    result = attacked(f"own_functions:{name}").to_dict()
    worst = result["attacks"][0]
    assert not result["ok"]
    assert re.search(found, worst["name"]), worst
    assert worst["share"] > worst["allowed"]


def test_repeated_calculations_that_are_paid_on_most_problems_are_a_hole(capsys):
    words = ["--dataset", "generated:sums", "--dataset_limit", "8"]
    assert main(["attack", "accuracy", *words, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [one["restated"] for one in result["attacks"][:3]] == [True] * 3
    assert re.match(r"an answer that repeats the problem is paid on 100.0% of the problems", result["faults"][0])
    assert main(["attack", "accuracy", *words]) == 1
    assert "what to do: " in capsys.readouterr().out
    assert main(["attack", "gsm8k", *words, "--json"]) == 0
    one_number = json.loads(capsys.readouterr().out)
    assert one_number["rows"] == result["rows"]
    assert {one["share"] for one in one_number["attacks"] if one["restated"]} == {0}


@pytest.mark.parametrize(("answers", "ok", "chance"), [(1, True, True), (0, True, False), (6, False, False)])
def test_a_formula_that_is_the_answer_of_a_few_problems_is_a_warning(answers, ok, chance, here):
    rows = [{"problem": f"Let ${1200 + i}$ be a number.", "answer": str(1200 + i + (i >= answers))} for i in range(20)]
    (here / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = attacked("own_functions:exact").to_dict()
    assert (result["ok"], bool(result["chance"])) == (ok, chance)
    assert not chance or re.search("paid on 5.* of the problems .* a wrong answer gets 0%", result["chance"])


def test_rewards_below_0_are_measured_from_a_wrong_answer(here):
    attacks = attacked("own_functions:signed").attacks
    assert {one.share for one in attacks if not one.candidates} == {0, 1 / 8}  # one gold answer of 8


def test_the_weighted_sum_is_judged(here):
    sums = ["own_functions:exact", "format_strict", "--reward_weights", "1"]
    assert attacked(*sums, "1").messages("error")
    assert not attacked(*sums, "0.05").messages("error")


def test_a_reward_that_fails_on_some_texts_or_pays_nothing_is_not_ok(here, capsys):
    faults = attacked("own_functions:fails").messages("error")
    assert re.match(r"[a-z ]+, such as '.*': .*raised IndexError", faults[0])
    for name, fault in (
        ("nothing", "no form of a right answer"),
        ("always_fails", "gsm8k, such as .*: .* raised AttributeError"),
    ):
        assert main(["attack", f"own_functions:{name}", "--dataset", "mine.jsonl"]) == 1
        assert re.search(f"not ok: {fault}", capsys.readouterr().out)


def test_the_worst_three_are_printed_with_their_texts_and_then_the_verdict(here):
    first, *attacks, verdict = attack.lines(attacked("own_functions:exact"))
    assert first == "attacked: rewards own_functions:exact on 8 problems of mine.jsonl, train"
    assert [" of a right answer's reward, at most " in line for line in attacks] == [True, False] * 3
    assert verdict.startswith("ok: a blind guess gets 12% of a right answer's reward")


def test_a_slow_reward_is_attacked_on_fewer_problems(here):
    result = attacked("own_functions:exact", seconds=2 * attack.SLOW)
    assert (result.rows, result.left_out) == (attack.FEWEST, 0)


def test_a_very_slow_reward_is_attacked_less_often_which_is_no_fault(here):
    result = attacked("own_functions:exact", seconds=5 * attack.SLOWEST)
    assert result.messages("error") == []
    assert 0 < len(result.attacks) < result.left_out


def test_a_shipped_reward_is_never_slow(here):
    result = attacked("accuracy", seconds=5 * attack.SLOWEST)
    assert (result.rows > attack.FEWEST, result.left_out) == (True, 0)


@pytest.mark.parametrize(("template", "is_named"), [("gsm8k", True), ("boxed", False)])
def test_the_remedy_names_gsm8k_only_where_it_pays(template, is_named, here):
    words = ["--rewards", "accuracy", "--prompt_template", template, "--dataset", "mine.jsonl"]
    setup = Setup(read(words))
    assert ("rewards: [gsm8k]" in attack.remedy(setup, attack.gradable(setup, 4))) == is_named


@pytest.mark.parametrize(("reward", "level"), [("exact", "info"), ("bonus", "warning"), ("nothing", None)])
def test_doctor_prints_one_line_with_the_figure_of_attack(reward, level, here, monkeypatch):
    monkeypatch.setattr(attack, "SLOW", 600.0)  # a loaded machine does not make a function slow
    words = ["--rewards", f"own_functions:{reward}", "--dataset", "mine.jsonl", "--prompt_template", "think"]
    settings = read(words if reward == "bonus" else words[:-2])
    findings = [*attack.check(Setup(settings))]
    assert [finding.level for finding in findings] == ([level] if level else [])
    if level == "info":
        assert findings[0].message == f"attacked: {attacked(f'own_functions:{reward}').to_dict()['best']}"
