"""The generated problems: the same bytes everywhere, disjoint splits and right answers."""

import json
import re
from collections import Counter
from hashlib import sha256

import pytest

from grpo_math.problems.generated import LEVELS, SPLITS, count, generate

SMALL = ("sums", "differences", "products")


def test_the_same_seed_gives_the_same_bytes_on_every_platform():
    made = [generate(split, 200, seed, SMALL) for split in SPLITS for seed in (0, 7)]
    digest = sha256(json.dumps(made).encode()).hexdigest()
    assert digest == "8786bf0d644fcf90da74fb979db093ff3ac0d4907f3f30a35c77297ff7305b4e"


@pytest.mark.parametrize("level", LEVELS)
def test_every_answer_is_right_and_no_arithmetic_is_in_both_splits(level):
    seen = {}
    for split in SPLITS:
        for p in generate(split, count(level, split), 0, (level,)):
            a, sign, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", p["problem"]).groups()
            assert int(p["answer"]) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] >= 0
            content = (a, b) if sign == "-" else tuple(sorted((a, b)))
            assert seen.setdefault(content, split) == split
    assert set(seen.values()) == set(SPLITS)


def test_levels_are_mixed_evenly_and_shuffled():
    made = generate("heldout", 120, 0, SMALL)
    assert Counter(p["level"] for p in made) == {1: 40, 2: 40, 3: 40}
    assert len({p["level"] for p in made[:20]}) == 3
    assert {p["id"] for p in made} != {p["id"] for p in generate("heldout", 120, 1, SMALL)}
    assert Counter(p["level"] for p in generate("train", 5)) == {1: 3, 2: 2}
