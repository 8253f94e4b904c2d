"""The measurements of the probe and of several seeds, and their files.

`grpo-math evaluate --run --probe` measures (probe.py), this file computes, and meaning.py puts them into words.
docs/evaluation.md has the formulas and papers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from grpo_math.errors import Finding
from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.paired import by_problem
from grpo_math.evaluation.stats import maj_at_k, paired_bootstrap, pass_at_k
from grpo_math.evaluation.summary import Share
from grpo_math.problems.sources import SOURCES
from grpo_math.run.files import write_json
from grpo_math.system.reading import read_json, reading

PROBE = "trained.probe.json"  # next to trained.json
SEEDS_FILE = "trained.seeds.json"
KNOWN = 0.05  # a smaller share is no finding
# The 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom. With more of them the last is an upper bound.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


class Pair(NamedTuple):
    """A mean over the problems for base and trained model, with the paired difference."""

    base: float
    trained: float
    difference: float
    ci95: Sequence[float]


class EqualTokens(NamedTuple):
    """The base's maj@k against the trained model's accuracy, with the tokens of a problem that each needs."""

    k: int
    base_tokens: float
    trained_tokens: float
    base: float
    trained: float
    difference: float
    ci95: Sequence[float]


class Budget(NamedTuple):
    """pass@k and maj@k of both models, and their comparison at the same token budget."""

    samples: int
    temperature: float
    pass_at_k: Mapping[int, Pair]
    maj_at_k: Mapping[int, Pair]
    equal_tokens: EqualTokens


class Memory(NamedTuple):
    """The shares of the problems, and of the control, that base and trained model continue word by word."""

    problems: Mapping[str, Share]
    control: Mapping[str, Share]

    @property
    def finding(self) -> Finding | None:
        """A warning about shares above `KNOWN` and above the interval of the control, which nobody can know."""
        known = [
            f"the {side} model continues {one.value:.1%} of {one.n} problems word by word from their first 60%"
            for side, one in self.problems.items()
            if one.value > max(KNOWN, self.control[side].ci95[1])
        ]
        dated = sorted((name for name in SOURCES if name[-4:].isdigit()), key=lambda name: name[-4:])
        later = ", ".join(f"{name} ({name[-4:]})" for name in dated)
        message = f"{' and '.join(known)}: it has read them, so that accuracy on them is partly memory"
        remedy = f"evaluate on a set that is newer than the model: {later}"
        return Finding("warning", message, remedy, "known_by_heart") if known else None

    def to_dict(self) -> dict[str, Any]:
        finding = self.finding
        shares = {
            name: {side: {"n": one.n, "share": one.value, "ci95": one.ci95} for side, one in sides.items()}
            for name, sides in self._asdict().items()
        }
        return {**shares, "finding": finding and finding.message, "remedy": finding and finding.remedy}


class Seeds(NamedTuple):
    """The mean difference of runs that differ in the seed alone, with Student's 95% t interval over ``n`` seeds."""

    n: int
    difference: float
    ci95: Sequence[float]


@dataclass(frozen=True)
class Probe:
    """The probe of a run on a data set. ``memory`` is None if the problems are too short."""

    data: str
    problems_hash: str | None  # also the mark of a file of a run (run/earlier.py)
    budget: Budget
    memory: Memory | None

    @property
    def findings(self) -> list[Finding]:
        """The finding that a model knows problems by heart, or none."""
        finding = self.memory and self.memory.finding
        return [finding] if finding else []

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        by_k = {
            str(k): {"pass@k": one._asdict(), "maj@k": self.budget.maj_at_k[k]._asdict()}
            for k, one in self.budget.pass_at_k.items()
        }
        return {
            "data": self.data,
            "problems_hash": self.problems_hash,
            "budget": {
                "samples": self.budget.samples,
                "temperature": self.budget.temperature,
                "k": by_k,
                "equal_tokens": self.budget.equal_tokens._asdict(),
            },
            "memory": self.memory and self.memory.to_dict(),
        }


def read_probe(path: Path) -> Probe:
    """Return the probe in a file. Raises `UserError`."""
    content = read_json(path)
    with reading(path):
        budget, memory = content["budget"], content["memory"]
        pass_at_k, maj_at_k = (
            {int(k): Pair(**both[name]) for k, both in budget["k"].items()} for name in ("pass@k", "maj@k")
        )
        problems, control = (
            {side: Share(one["share"], one["ci95"], one["n"]) for side, one in (memory or {}).get(name, {}).items()}
            for name in ("problems", "control")
        )
        return Probe(
            content["data"],
            content["problems_hash"],
            Budget(
                budget["samples"], budget["temperature"], pass_at_k, maj_at_k, EqualTokens(**budget["equal_tokens"])
            ),
            Memory(problems, control) if memory else None,
        )


def write_seeds(seeds: Seeds, problems_hash: str | None, folder: Path) -> None:
    write_json(folder / SEEDS_FILE, {"seeds": seeds._asdict(), "problems_hash": problems_hash})


def read_seeds(path: Path) -> Seeds:
    """Return the difference over seeds in a file. Raises `UserError`."""
    content = read_json(path)
    with reading(path):
        return Seeds(**content["seeds"])


def budget(base: Evaluation, trained: Evaluation) -> Budget:
    """Return pass@k and maj@k of both models, and the trained model's accuracy against the base's maj@k at as many
    tokens: k is the largest number of the base's samples that have no more tokens than one of the trained model's, and
    at least 1. Tokens are means over all samples.
    """
    pairs, n = by_problem(base, trained), base.samples
    right = [[[record.right for record in side] for side in pair] for pair in pairs]

    def passes(side: int, k: int) -> list[float]:
        return [pass_at_k(n, sum(flags[side]), k) for flags in right]

    def votes(side: int, k: int) -> list[float]:
        answers = [[record.answer for record in pair[side]] for pair in pairs]
        return [maj_at_k(some, flags[side], k) for some, flags in zip(answers, right, strict=True)]

    tokens = [fmean(record.tokens for record in side.records) for side in (base, trained)]
    k = min(n, max(1, int(tokens[1] / max(tokens[0], 1e-9))))
    return Budget(
        n,
        base.temperature,
        {of: pair_of(passes(0, of), passes(1, of)) for of in base.summary.pass_at_k},
        {of: pair_of(votes(0, of), votes(1, of)) for of in base.summary.pass_at_k},
        EqualTokens(k, k * tokens[0], tokens[1], *pair_of(votes(0, k), [fmean(flags[1]) for flags in right])),
    )


def pair_of(before: Sequence[float], after: Sequence[float]) -> Pair:
    paired = paired_bootstrap(before, after)
    return Pair(fmean(before), fmean(after), paired.difference, paired.ci95)


def memory(sides: Mapping[str, Evaluation], control: Mapping[str, Evaluation]) -> Memory:
    """Return the shares of problems that base and trained model continue word by word, with Wilson's intervals."""
    return Memory(*({side: one.summary.accuracy for side, one in part.items()} for part in (sides, control)))


def over_seeds(differences: Sequence[float]) -> Seeds:
    """Return the mean difference of runs that differ in the seed alone.

    >>> over_seeds([0.1, 0.2, 0.3]).ci95  # 0.2 +- 4.303 * 0.1 / sqrt(3)
    [-0.0484..., 0.4484...]
    """
    n, mean = len(differences), fmean(differences)
    half = T_QUANTILES[min(n, 10) - 2] * stdev(differences) / math.sqrt(n)
    return Seeds(n, mean, [mean - half, mean + half])
