"""Problems that the package reasoning-gym generates: ``reasoning_gym:NAME``, or with parameters of the generator
``reasoning_gym:NAME {min_terms: 2, size: 2000, seed: 1}``.

The held-out problems have another seed, and no training problem is among them. The column ``reasoning_gym`` has what
the package needs to score an answer (rewards/gym.py).

The package is imported when a recipe asks for it.
"""

import base64
import pickle  # noqa: TID251 - it is read in the sandbox of rewards/gym.py alone
from typing import Any

import yaml

from grpo_math.errors import as_config_error, require_choice

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
        from reasoning_gym.factory import DATASETS
    require_choice("dataset", name, tuple(DATASETS))
    with as_config_error("dataset", dataset, "cannot be generated", "check its parameters, or leave them out"):
        entries = reasoning_gym.create_dataset(name, **parameters, size=size, seed=seed)
        return {
            entry["question"]: _row(f"{name}/{seed}/{i}", name, parameters, entry) for i, entry in enumerate(entries)
        }


def _row(identity: str, name: str, parameters: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    # A pickle, because JSON would change the numbers, tuples and keys that some generators score with.
    scored_with = base64.b64encode(pickle.dumps((name, parameters, entry))).decode()
    return {"id": identity, "problem": entry["question"], "answer": str(entry["answer"]), "reasoning_gym": scored_with}
