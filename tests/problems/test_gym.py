"""Problems of the package reasoning-gym, by a stand-in for it, and by the package itself if it is installed."""

import importlib.util
import sys

import pytest

from grpo_math.errors import ConfigError, RewardError
from grpo_math.problems.datasets import load_problems
from grpo_math.problems.sources import listed
from grpo_math.rewards import REWARDS
from grpo_math.settings.recipe import check
from grpo_math.tools import python

# As in the package: problem i of a seed is drawn from their sum, and some generators evaluate an answer as Python.
PACKAGE = """
class Sums:
    def __init__(self, size, seed, largest=40):
        self.size, self.seed, self.largest = size, seed, largest
        assert largest > 0, "largest must be positive"
    def __getitem__(self, i):
        if i >= self.size:
            raise IndexError
        a = (self.seed + i) * 7 % self.largest
        return {"question": f"Write {a} as a sum.", "answer": f"0+{a}", "metadata": {"a": a, (0, 1): None}}
    def score_answer(self, answer, entry):
        return 1.0 if eval(answer) == entry["metadata"]["a"] else 0.25

def create_dataset(name, size=500, seed=0, **parameters):
    return Sums(size, seed, **parameters)
"""

CONSTANTS = "[c for c in __import__('sys')._getframe(2).f_code.co_consts if len(str(c)) == 32]"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in with one generator. Its own modules and the server of the Python tool are gone afterwards."""
    folder = tmp_path / "site/reasoning_gym"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "factory.py").write_text('DATASETS = {"sums": None}')
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(python, "_servers", {})
    yield
    for server in python._servers.values():
        server.calls.close()


def test_the_seed_and_the_parameters_choose_the_problems_and_none_is_held_out_and_trained_on(package):
    def problems(dataset, split, **options):
        return [row["problem"] for row in load_problems(dataset, split, template="direct", **options)]

    name = "reasoning_gym:sums {largest: 10000, size: 30}"
    train, held_out = problems(name, "train", seed=3), problems(name, "test")
    assert (len(train), len(held_out)) == (30, 30)
    assert problems(name, "train", seed=3) == train != problems(name, "train", seed=4)
    assert problems("reasoning_gym:sums {largest: 10000, size: 30, seed: 3}", "train", seed=4) == train
    assert problems(name, "heldout", seed=9) == held_out
    # 40 problems in all, and 11 of them are held out.
    few = "reasoning_gym:sums {largest: 40, size: 11}"
    assert not {*problems(few, "train", seed=2**31 - 5)} & {*problems(few, "heldout")}
    assert len(problems("reasoning_gym:sums {largest: 900}", "train")) == 400  # of 900, without the 500 held out
    assert len(problems(name, "train", limit=7)) == 7


def test_a_recipe_may_give_the_parameters_as_a_mapping(package):
    name = check("dataset", {"reasoning_gym:sums": {"largest": 9, "size": 4}})
    assert load_problems(name, "heldout") == load_problems("reasoning_gym:sums {largest: 9, size: 4}", "heldout")
    assert listed(f"gsm8k, {name}") == ["gsm8k", name]


@pytest.mark.parametrize(
    ("dataset", "split", "message"),
    [
        ("reasoning_gym:sum", "train", "did you mean 'sums'"),
        ("reasoning_gym:sums {larges: 3}", "train", "cannot be generated .*unexpected keyword argument 'larges'"),
        ("reasoning_gym:sums {largest: 0}", "train", "largest must be positive"),
        ("reasoning_gym:sums {largest", "train", "parameters that cannot be read"),
        ("reasoning_gym:sums {size: many}", "train", "parameters that cannot be read"),
        ("reasoning_gym:sums", "train[5:]", "split="),
        ("reasoning_gym:sums {largest: 3}", "train", "has no rows"),  # all are held out
    ],
)
def test_a_name_or_a_parameter_that_the_package_does_not_have_is_one_line(dataset, split, message, package):
    with pytest.raises(ConfigError, match=message) as error:
        load_problems(dataset, split)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_line_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym.*grpo_math\[gym\]"):
        load_problems("reasoning_gym:sums")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")
def test_each_right_answer_is_paid_and_an_answer_is_evaluated_in_the_sandbox_only(package, tmp_path):
    [row] = load_problems("reasoning_gym:sums {largest: 10000, size: 1, seed: 4}", template="boxed")
    touched = tmp_path / "touched"
    answers = {
        "0+28": 1.0,
        "28": 1.0,
        "20+8": 1.0,
        "20+9": 0.25,
        "28+": 0.0,  # no Python
        f"open('{touched}', 'w')": 0.0,
        "print(1.0) or exit()": 0.0,
        "\uff50rint(1.0) or \uff45xit()": 0.0,
        "print(28, flush=True) or __import__('os')._exit(0)": 0.0,
        # The secret is a constant of the program that scores.
        f"print({CONSTANTS}[0] + ' 1.0', flush=True) or __import__('os')._exit(0)": 0.0,
    }
    columns = {name: [row[name]] * (len(answers) + 1) for name in ("answer", "answer_format", "reasoning_gym")}
    completions = [*(rf"\boxed{{{answer}}}" for answer in answers), "I do not know."]
    assert REWARDS["reasoning_gym"]([""] * len(completions), completions, **columns) == [*answers.values(), 0.0]
    assert not touched.exists()


def test_the_reward_needs_problems_of_the_package():
    with pytest.raises(RewardError, match="set dataset: reasoning_gym:NAME"):
        REWARDS["reasoning_gym"]([""], ["7"], answer=["7"])


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="reasoning-gym is not installed")
def test_the_package_itself():
    sums = load_problems("reasoning_gym:chain_sum {max_terms: 2, max_digits: 1, size: 20}", template="direct")
    assert all(eval(row["problem"].rpartition(": ")[2].removesuffix(" =")) == int(row["answer"]) for row in sums)
    [row] = load_problems("reasoning_gym:countdown {size: 1}", template="boxed")
    columns = {name: [row[name]] * 3 for name in ("answer", "answer_format", "reasoning_gym")}
    completions = [rf"\boxed{{{answer}}}" for answer in (row["answer"], f"0+({row['answer']})", "print(1)")]
    right, other, wrong = REWARDS["reasoning_gym"]([""] * 3, completions, **columns)
    assert (right, other) == (1.0, 1.0)
    assert wrong < 0.1
