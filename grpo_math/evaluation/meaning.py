"""The meaning of an improvement: skill or form, at equal tokens, memorised problems, chance of the seed.

probe_results.py computes it, and this file puts it into words. docs/evaluation.md has the formulas and papers.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from grpo_math.evaluation.paired import Comparison, by_problem
from grpo_math.evaluation.probe_results import Budget, Memory, Probe, Seeds, pair_of
from grpo_math.evaluation.tables import cut_share, points
from grpo_math.grading import Grade, Verdict

# The protocol of Wu et al. 2025 (arXiv 2507.10532): 60% of a problem are shown.
SHOWN, LEFT = 0.6, 12
TEMPERATURE = 0.6  # of the samples, if the evaluation is greedy: AIME's
SEEDS = "the interval is over problems, not over seeds: another seed may give another difference"
EVALUATE = "grpo-math evaluate --run RUN --data DATA"


class Line(NamedTuple):
    """A line of "What this number means". ``command`` measures it, if it was not measured."""

    title: str
    text: str
    command: str = ""


def beginnings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that ask for the end of each problem: the prompt is the first `SHOWN` of its words, as plain text.

    Leaves out problems with fewer than `LEFT` words in their end.

    >>> rows = [{"id": n, "problem": " ".join(map(str, range(n)))} for n in (27, 29, 30)]
    >>> [(row["id"], row["prompt"][-5:], row["answer"]) for row in beginnings(rows)]
    [(29, '15 16', '17 18 19 20 21 22 23 24 25 26 27 28'), (30, '16 17', '18 19 20 21 22 23 24 25 26 27 28 29')]
    """
    end_rows = []
    for row in rows:
        words = [*re.finditer(r"\S+", row["problem"])]
        shown = int(SHOWN * len(words))
        if len(words) - shown >= LEFT:
            text, end = row["problem"][: words[shown - 1].end()], row["problem"][words[shown].start() :]
            end_rows.append({"id": row["id"], "problem": text, "prompt": text, "answer": end})
    return end_rows


def reproduced(rows: Sequence[Mapping[str, Any]], completions: Sequence[Any]) -> list[Grade]:
    """Return `Verdict.CORRECT` for each completion that begins with the end of its problem, word by word.

    Compares words of letters and digits, without case.

    >>> from types import SimpleNamespace
    >>> texts = ["He pays $5, in all: 7.", "He pays $6"]
    >>> rows = [{"answer": "he pays 5"}] * 2
    >>> [str(grade.verdict) for grade in reproduced(rows, [SimpleNamespace(text=text) for text in texts])]
    ['correct', 'wrong']
    """
    grades = []
    for row, completion in zip(rows, completions, strict=True):
        end, words = (re.findall(r"[^\W_]+", text.casefold()) for text in (row["answer"], completion.text))
        is_known = bool(end) and words[: len(end)] == end
        grades.append(Grade(Verdict.CORRECT if is_known else Verdict.WRONG, None))
    return grades


def meaning(
    data: str | None, comparison: Comparison | None, probe: Probe | None = None, seeds: Seeds | None = None
) -> list[Line]:
    """Return the four lines of "What this number means". ``data``: the set of the trained model's evaluation."""
    # Without the folders of this machine: a card is published.
    of_data = f" ({Path(probe.data).name})" if probe and probe.data != data else ""
    short = ": the problems are too short" if probe and not probe.memory else ""
    lines = {
        "Skill or form": (_form(comparison) if comparison else "", "", EVALUATE),
        f"Same token budget{of_data}": (_budget(probe.budget) if probe else "", "", f"{EVALUATE} --probe"),
        f"Known by heart{of_data}": (
            _memory(probe.memory) if probe and probe.memory else "",
            short,
            "" if short else f"{EVALUATE} --probe",
        ),
        "Other seeds": (
            f"{points(seeds)} over {seeds.n} seeds" if seeds else "",
            f"; {SEEDS}",
            "grpo-math report RUN RUN RUN",
        ),
    }
    return [
        Line(title, text or f"not measured{reason}", "" if text else command)
        for title, (text, reason, command) in lines.items()
    ]


def _form(comparison: Comparison) -> str:
    """Return how much of a difference is skill, how much form, and how many answers were cut."""
    before, after, in_format = comparison.before, comparison.after, comparison.in_format.difference
    # Right or wrong: a run that is rewarded for the form alone writes it around wrong answers, too.
    kept = pair_of(
        *([fmean(bool(one.in_format) for one in pair[side]) for pair in by_problem(before, after)] for side in (0, 1))
    )
    is_form = comparison.accuracy.lo <= 0 < kept.ci95[0]
    return (
        f"{'the run has learned the form, and no skill that shows: ' if is_form else ''}"
        f"in the format {100 * in_format:+.1f} points: {points(comparison.accuracy)} from answers that were wrong in "
        f"any form (skill), and {100 * (in_format - comparison.accuracy.difference):+.1f} points from answers that "
        f"were right in another form (form); {kept.base:.1%} of all answers kept the format before and "
        f"{kept.trained:.1%} after, and the length limit cut {cut_share(before):.1%} and {cut_share(after):.1%}"
    )


def _budget(budget: Budget) -> str:
    equal, passes = budget.equal_tokens, budget.pass_at_k[budget.samples]
    return (
        f"the trained model is right in {equal.trained:.1%} with {equal.trained_tokens:.0f} tokens a problem, the "
        f"base's maj@{equal.k} in {equal.base:.1%} with {equal.base_tokens:.0f}: {points(equal)}; "
        f"pass@{budget.samples} is {passes.base:.1%} and {passes.trained:.1%}"
    )


def _memory(memory: Memory) -> str:
    base, (low, high), n = memory.problems["base"]
    return (
        f"the base continues {base:.1%} of {n} problems word by word (95% interval {low:.1%} to {high:.1%}), the "
        f"trained model {memory.problems['trained'].value:.1%}; of problems that nobody can know, the base continues "
        f"{memory.control['base'].value:.1%}"
    )
