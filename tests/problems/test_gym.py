"""Problems of the package reasoning-gym, by a stand-in for it, and by the package itself if it is installed."""

import importlib.util
import sys

import pytest

from grpo_math.errors import ConfigError
from grpo_math.problems.datasets import load_problems
from grpo_math.problems.sources import listed
from grpo_math.settings.recipe import check

# As in the package: problem i of a seed is drawn from their sum, and some generators score answers themselves.
PACKAGE = """
from reasoning_gym.dataset import ProceduralDataset
class Words(ProceduralDataset):
    def __init__(self, size, seed, largest=40):
        self.size, self.seed, self.largest = size, seed, largest
        assert largest > 0, "largest must be positive"
    def __getitem__(self, i):
        if i >= self.size:
            raise IndexError
        a = (self.seed + i) * 7 % self.largest
        return {"question": f"How much is {a}?", "answer": self.form.format(a=a)}
    form = "{a} apples"
class Numbers(Words):
    form = "{a}/3"
    def score_answer(self, answer, entry): ...
class Sums(Numbers):
    form = "0+{a}"

def create_dataset(name, size=500, seed=0, **parameters):
    return {"words": Words, "numbers": Numbers, "sums": Sums}[name](size, seed, **parameters)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in with three generators. Its own modules are gone afterwards."""
    folder = tmp_path / "site/reasoning_gym"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "dataset.py").write_text("class ProceduralDataset:\n    def score_answer(self, answer, entry): ...")
    (folder / "factory.py").write_text('DATASETS = {"words": None, "numbers": None, "sums": None}')
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("reasoning_gym", "reasoning_gym.dataset", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


def test_the_seed_and_the_parameters_choose_the_problems_and_none_is_held_out_and_trained_on(package):
    def problems(dataset, split, **options):
        return [row["problem"] for row in load_problems(dataset, split, template="direct", **options)]

    name = "reasoning_gym:numbers {largest: 10000, size: 30}"
    train, held_out = problems(name, "train", seed=3), problems(name, "test")
    assert (len(train), len(held_out)) == (30, 30)
    assert problems(name, "train", seed=3) == train != problems(name, "train", seed=4)
    assert problems("reasoning_gym:numbers {largest: 10000, size: 30, seed: 3}", "train", seed=4) == train
    assert problems(name, "heldout", seed=9) == held_out
    # 40 problems in all, and 11 of them are held out.
    few = "reasoning_gym:numbers {largest: 40, size: 11}"
    assert not {*problems(few, "train", seed=2**31 - 5)} & {*problems(few, "heldout")}
    assert len(problems("reasoning_gym:numbers {largest: 900}", "train")) == 400  # of 900, without the 500 held out
    assert len(problems(name, "train", limit=7)) == 7


def test_a_recipe_may_give_the_parameters_as_a_mapping(package):
    name = check("dataset", {"reasoning_gym:numbers": {"largest": 9, "size": 4}})
    assert load_problems(name, "heldout") == load_problems("reasoning_gym:numbers {largest: 9, size: 4}", "heldout")
    assert listed(f"gsm8k, {name}") == ["gsm8k", name]


@pytest.mark.parametrize(
    ("dataset", "split", "message"),
    [
        ("reasoning_gym:number", "train", "did you mean 'numbers'"),
        ("reasoning_gym:numbers {larges: 3}", "train", "cannot be generated .*unexpected keyword argument 'larges'"),
        ("reasoning_gym:numbers {largest: 0}", "train", "largest must be positive"),
        ("reasoning_gym:numbers {largest", "train", "parameters that cannot be read"),
        ("reasoning_gym:numbers {size: many}", "train", "parameters that cannot be read"),
        ("reasoning_gym:numbers", "train[5:]", "split="),
        ("reasoning_gym:numbers {largest: 3}", "train", "has no rows"),  # all are held out
        ("reasoning_gym:sums", "train", r"several right answers, such as '0\+\d+': use a generator of numbers"),
    ],
)
def test_a_name_or_a_parameter_that_the_package_does_not_have_is_one_line(dataset, split, message, package):
    with pytest.raises(ConfigError, match=message) as error:
        load_problems(dataset, split)
    assert "\n" not in str(error.value)


def test_an_answer_is_a_number_or_the_only_one(package):
    assert load_problems("reasoning_gym:numbers {size: 1, seed: 4}", limit=1)[0]["answer"] == "28/3"
    assert load_problems("reasoning_gym:words {size: 1, seed: 4}", limit=1)[0]["answer"] == "28 apples"


def test_a_missing_package_is_one_line_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym.*grpo_math\[gym\]"):
        load_problems("reasoning_gym:numbers")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="reasoning-gym is not installed")
def test_the_package_itself():
    sums = load_problems("reasoning_gym:chain_sum {max_terms: 2, max_digits: 1, size: 20}", template="direct")
    assert all(eval(row["problem"].rpartition(": ")[2].removesuffix(" =")) == int(row["answer"]) for row in sums)
    with pytest.raises(ConfigError, match="has problems with several right answers"):
        load_problems("reasoning_gym:countdown")
