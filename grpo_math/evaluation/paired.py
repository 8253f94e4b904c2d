"""Two evaluations of the same problems -> the paired difference, and the problems that changed.

A completion is right if its answer is, in any form; ``in_format`` counts it only if it is also in the format. Problems
are paired: the score of a problem with several samples is their mean. Evaluations over different problems, prompts,
graders or sampling settings (`SAME`) are refused, because their difference does not measure the training.

tables.py prints a comparison, and report/ draws the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from grpo_math.evaluation.evaluation import Evaluation, ResultsError
from grpo_math.evaluation.stats import PairedDifference, mcnemar, paired_bootstrap
from grpo_math.evaluation.summary import Record
from grpo_math.run.metrics import IN_FORMAT, RIGHT

# The metrics of each evaluation in the JSON of a comparison.
COMPARED = ("model", "adapter", "accuracy", "ci95", "accuracy_in_format", "categories")

# The settings that two evaluations must share, besides the problems, and the remedy if they differ.
SAME = {
    "answer_format": "evaluate both with the same answer format to compare them",
    "backend": "vLLM and transformers round differently, evaluate both with one of them",
    "prompt_hash": "the template's text or the tokenizer's chat template is another, evaluate both with the same",
    "grader": "the verdicts of two graders may differ, evaluate both with one version of grpo_math",
    "samples": "evaluate both with as many samples to compare them",
    "temperature": "evaluate both at the same temperature to compare them",
    "max_new_tokens": "evaluate both with the same limit to compare them",
}

Pairs = list[tuple[list[Record], list[Record]]]  # the records of each problem, before and after


class Change(NamedTuple):
    """A problem whose answer changed, with a completion of each side."""

    id: Any
    problem: str
    gold: Any
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same problems, the differences in accuracy (any form, in format), and the changes."""

    before: Evaluation
    after: Evaluation
    accuracy: PairedDifference
    in_format: PairedDifference
    improvements: Sequence[Change]
    regressions: Sequence[Change]

    @property
    def test(self) -> str:
        """Return the test of `p`.

        With one sample per problem, this is McNemar's exact test. With several samples it is the sign test: the same
        test on the problems whose share of right answers rose or fell.
        """
        return "sign" if any(record.sample for record in self.before.records) else "mcnemar"

    @property
    def p(self) -> float:
        return mcnemar(self.accuracy.gained, self.accuracy.lost)

    def to_dict(self, examples: int | None = 3) -> dict[str, Any]:
        """Return the comparison for ``--json``, with the first ``examples`` changes of each kind."""
        sides = {}
        for name, side in (("before", self.before), ("after", self.after)):
            metrics = side.to_dict(records=False)
            sides[name] = {metric: metrics.get(metric) for metric in COMPARED}
        return {
            "n": self.accuracy.n,
            **sides,
            "difference": self.accuracy.difference,
            "ci95": self.accuracy.ci95,
            "difference_in_format": self.in_format.difference,
            "ci95_in_format": self.in_format.ci95,
            "gained": self.accuracy.gained,
            "lost": self.accuracy.lost,
            "test": self.test,
            "p": self.p,
            "improvements": [change._asdict() for change in self.improvements[:examples]],
            "regressions": [change._asdict() for change in self.regressions[:examples]],
        }


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Return the comparison of two evaluations. Raises `ResultsError` unless `SAME` and the problems are equal."""
    pairs = by_problem(before, after)
    accuracy, in_format = (
        paired_bootstrap([_score(old, right) for old, _ in pairs], [_score(new, right) for _, new in pairs])
        for right in (RIGHT, IN_FORMAT)
    )
    return Comparison(before, after, accuracy, in_format, _changes(pairs, lost=False), _changes(pairs, lost=True))


def by_problem(before: Evaluation, after: Evaluation) -> Pairs:
    """Return the records of each problem, before and after, in the same order of samples.

    Raises `ResultsError` that names what differs.
    """
    _refuse_other_settings(before, after)
    old, new = ({record.key: record for record in side.records} for side in (before, after))
    texts = [{(*key, record.problem, record.gold) for key, record in records.items()} for records in (old, new)]
    if alone := sorted(texts[0] ^ texts[1], key=str):
        counts = f"before {len(old)}, after {len(new)}, in one only {len(alone)}, such as {alone[0][0]!r}"
        raise ResultsError(
            f"the problems differ ({counts}): evaluate both on the same data, n and seed to compare them"
        )
    problems: dict[str, tuple[list[Record], list[Record]]] = {}
    for key, record in old.items():
        both = problems.setdefault(key[0], ([], []))
        both[0].append(record)
        both[1].append(new[key])
    return list(problems.values())


def _refuse_other_settings(before: Evaluation, after: Evaluation) -> None:
    requests = [side.settings.get("request") or {} for side in (before, after)]
    # An older file has no request, or lacks a field of it.
    shared = [name for name in requests[0] if name in requests[1] and name not in SAME]
    remedies = dict.fromkeys(shared, "evaluate both with the same settings to compare them")
    # The request comes first: its system prompt says more than the hash of the prompts.
    for name, remedy in {**remedies, **SAME}.items():
        both = requests if name in remedies else (before.settings, after.settings)
        was, now = (settings.get(name) for settings in both)
        if was != now:
            field = f"request.{name}" if name in remedies else name
            raise ResultsError(f"{field} differs (before {was!r}, after {now!r}): {remedy}")


def _changes(pairs: Pairs, lost: bool) -> list[Change]:
    """Return the problems that went from wrong to right, or with ``lost`` from right to wrong.

    With several samples, these are the problems that are right more often, each with a completion that was wrong before
    and one that is right after. With ``lost`` it is the reverse.
    """
    changes = []
    for old, new in pairs:
        if (_score(new) - _score(old)) * (-1 if lost else 1) > 0:
            # Both exist: if the share of right answers rose, one was wrong before and one is right after.
            was = next(record for record in old if record.right == lost)
            now = next(record for record in new if record.right != lost)
            changes.append(Change(now.id, now.problem, now.gold, was.completion, now.completion))
    return changes


def _score(records: Sequence[Record], right: Sequence[str] = RIGHT) -> float:
    return fmean(record.category in right for record in records)
