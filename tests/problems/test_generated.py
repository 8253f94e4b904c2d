"""The generated problems: the same bytes everywhere, disjoint splits and right answers."""

import json
import re
from collections import Counter
from hashlib import sha256

import pytest

from grpo_math.problems.generated import LEVELS, SPLITS, generate, problems

SMALL = ("sums", "differences", "products")


def test_the_same_seed_gives_the_same_bytes_on_every_platform():
    made = [generate(split, 200, seed, SMALL) for split in SPLITS for seed in (0, 7)]
    digest = sha256(json.dumps(made).encode()).hexdigest()
    assert digest == "8786bf0d644fcf90da74fb979db093ff3ac0d4907f3f30a35c77297ff7305b4e"


@pytest.mark.parametrize("level", LEVELS)
def test_every_answer_is_right_and_no_arithmetic_is_in_both_splits(level):
    seen = {}
    for split in SPLITS:
        for p in generate(split, len(problems(level, split)), 0, (level,)):
            a, sign, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", p["problem"]).groups()
            assert int(p["answer"]) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] >= 0
            content = (a, b) if sign == "-" else tuple(sorted((a, b)))
            assert seen.setdefault(content, split) == split
    assert set(seen.values()) == set(SPLITS)


def test_levels_are_mixed_evenly_and_shuffled():
    made = generate("heldout", 122, 0, SMALL)
    assert Counter(p["level"] for p in made) == {1: 41, 2: 41, 3: 40}
    assert len({p["level"] for p in made[:20]}) == 3
