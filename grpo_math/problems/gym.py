"""Problems that the package reasoning-gym generates: ``reasoning_gym:NAME``, or with parameters of the generator
``reasoning_gym:NAME {min_terms: 2, size: 2000, seed: 1}``.

The held-out problems have another seed, and no training problem is among them. A generator whose problems have several
right answers is refused, because the grader compares with one.

The package is imported when a recipe asks for it.
"""

from contextlib import suppress
from fractions import Fraction
from typing import Any

import yaml

from grpo_math.errors import ConfigError, as_config_error, require_choice

PREFIX = "reasoning_gym:"
SIZE, HELDOUT_SIZE = 2000, 500
# A generator makes problem i from the seed plus i, so nearby seeds share most problems.
HELDOUT_SEED = 2**31


def generate(dataset: str, split: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a split, train or heldout. Raises `ConfigError`."""
    name, _, text = dataset.removeprefix(PREFIX).partition("{")
    remedy = "write reasoning_gym:chain_sum {min_terms: 2, size: 2000}"
    with as_config_error("dataset", dataset, "has parameters that cannot be read", remedy):
        parameters = dict(yaml.safe_load(f"{{{text}") if text else {})
        size, seed = parameters.pop("size", SIZE), parameters.pop("seed", seed)
        heldout_size = min(size, HELDOUT_SIZE)
    name = name.strip()
    require_choice("split", split, ("train", "heldout"))
    heldout = _once(dataset, name, parameters, heldout_size, HELDOUT_SEED)
    if split == "heldout":
        return list(heldout.values())
    rows = _once(dataset, name, parameters, size, seed)
    return [row for problem, row in rows.items() if problem not in heldout]


def _once(dataset: str, name: str, parameters: dict[str, Any], size: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the row of each different problem."""
    remedy = "pip install 'grpo_math[gym]' (one of its packages, pycosat, needs a C compiler)"
    with as_config_error("dataset", dataset, "needs the package reasoning-gym, which cannot be imported", remedy):
        import reasoning_gym
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS
    require_choice("dataset", name, tuple(DATASETS))
    with as_config_error("dataset", dataset, "cannot be generated", "check its parameters, or leave them out"):
        generator = reasoning_gym.create_dataset(name, **parameters, size=size, seed=seed)
        rows = {
            entry["question"]: {
                "id": f"{name}/{seed}/{i}",
                "problem": entry["question"],
                "answer": str(entry["answer"]),
            }
            for i, entry in enumerate(generator)
        }
    # A generator scores answers itself if it takes several forms of a number, or if several answers are right.
    if type(generator).score_answer is not ProceduralDataset.score_answer:
        for row in rows.values():
            if not _is_number(row["answer"]):
                reason = f"has problems with several right answers, such as {row['answer'][:40]!r}"
                raise ConfigError("dataset", dataset, reason, "use a generator of numbers, such as chain_sum")
    return rows


def _is_number(answer: str) -> bool:
    """Return True for a decimal or a fraction.

    >>> [_is_number(answer) for answer in ("-1,024", "5/6", "0.25", "36 + 29", "[1, 2]", "")]
    [True, True, True, False, False, False]
    """
    with suppress(ValueError):
        return Fraction(answer.replace(",", "")) is not None
    return False
