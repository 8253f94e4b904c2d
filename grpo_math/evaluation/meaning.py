"""The meaning of an improvement: skill or form, at equal tokens, memorised problems, chance of the seed.

`grpo-math evaluate --run --probe` measures, and this file computes. docs/evaluation.md has the formulas and papers.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from grpo_math.evaluation.paired import Results, by_problem
from grpo_math.evaluation.stats import PairedDifference, maj_at_k, paired_bootstrap, pass_at_k
from grpo_math.evaluation.suite import cut_share, in_points
from grpo_math.grading import Grade, Verdict
from grpo_math.problems.sources import SOURCES
from grpo_math.run.metrics import RIGHT

PROBE = "trained.probe.json"  # next to trained.json
SEEDS_FILE = "trained.seeds.json"
# The protocol of Wu et al. 2025 (arXiv 2507.10532): 60% of a problem are shown.
SHOWN, LEFT = 0.6, 12
KNOWN = 0.05  # a smaller share is no finding
TEMPERATURE = 0.6  # of the samples, if the evaluation is greedy: AIME's
# The 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
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


def reproduced(rows: Sequence[Mapping[str, Any]], completions: Sequence[Any], timeout: float | None) -> list[Grade]:
    """Return `Verdict.CORRECT` for each completion that begins with the end of its problem, word by word.

    Compares words of letters and digits, without case. ``timeout`` is an argument of graders, and is not used here.

    >>> from types import SimpleNamespace
    >>> texts = ["He pays $5, in all: 7.", "He pays $6"]
    >>> rows = [{"answer": "he pays 5"}] * 2
    >>> [str(grade.verdict) for grade in reproduced(rows, [SimpleNamespace(text=text) for text in texts], None)]
    ['correct', 'wrong']
    """
    grades = []
    for row, completion in zip(rows, completions, strict=True):
        end, words = (re.findall(r"[^\W_]+", text.casefold()) for text in (row["answer"], completion.text))
        is_known = bool(end) and words[: len(end)] == end
        grades.append(Grade(Verdict.CORRECT if is_known else Verdict.WRONG, None))
    return grades


def budget(base: Results, trained: Results) -> dict[str, Any]:
    """Return pass@k and maj@k of both models, and the trained model's accuracy against the base's maj@k at as many
    tokens: k is the largest number of the base's samples that have no more tokens than one of the trained model's, and
    at least 1. Tokens are means over all samples.
    """
    problems, n = by_problem(base, trained), base["samples"]
    right = [[[row["category"] in RIGHT for row in side] for side in pair] for pair in problems]

    def votes(side: int, k: int) -> list[float]:
        return [
            maj_at_k([row.get("answer") for row in pair[side]], flags[side], k)
            for pair, flags in zip(problems, right, strict=True)
        ]

    table = {}
    for k in base["pass@k"]:
        passes = [[pass_at_k(n, sum(flags[side]), int(k)) for flags in right] for side in (0, 1)]
        table[k] = {"pass@k": _pair(*passes), "maj@k": _pair(votes(0, int(k)), votes(1, int(k)))}
    tokens = [fmean(row["tokens"] for row in results["rows"]) for results in (base, trained)]
    k = min(n, max(1, int(tokens[1] / max(tokens[0], 1e-9))))
    equal = {"k": k, "base_tokens": k * tokens[0], "trained_tokens": tokens[1]}
    equal |= _pair(votes(0, k), [fmean(flags[1]) for flags in right])
    return {"samples": n, "temperature": base["temperature"], "k": table, "equal_tokens": equal}


def _pair(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    paired: PairedDifference = paired_bootstrap(before, after)
    ends = [paired.lo, paired.hi]
    return {"base": fmean(before), "trained": fmean(after), "difference": paired.difference, "ci95": ends}


def memory(sides: Mapping[str, Results], control: Mapping[str, Results]) -> dict[str, Any]:
    """Return the shares of problems that base and trained model continue word by word, with Wilson's intervals.

    ``finding`` names a share above `KNOWN` and above the interval of the ``control``, which nobody can know.
    """
    parts = {"problems": sides, "control": control}
    shares = {
        part: {side: {"n": one["n"], "share": one["accuracy"], "ci95": one["ci95"]} for side, one in results.items()}
        for part, results in parts.items()
    }
    known = [
        f"the {side} model continues {one['share']:.1%} of {one['n']} problems word by word from their first 60%"
        for side, one in shares["problems"].items()
        if one["share"] > max(KNOWN, shares["control"][side]["ci95"][1])
    ]
    dated = sorted((name for name in SOURCES if name[-4:].isdigit()), key=lambda name: name[-4:])
    later = ", ".join(f"{name} ({name[-4:]})" for name in dated)
    finding = f"{' and '.join(known)}: it has read them, so that accuracy on them is partly memory" if known else None
    return {**shares, "finding": finding, "remedy": f"evaluate on a set that is newer than the model: {later}"}


def over_seeds(differences: Sequence[float]) -> dict[str, Any]:
    """Return the mean difference of runs that differ in the seed alone, with Student's 95% t interval over seeds.

    >>> over_seeds([0.1, 0.2, 0.3])["ci95"]  # 0.2 +- 4.303 * 0.1 / sqrt(3)
    [-0.0484..., 0.4484...]
    """
    n, mean = len(differences), fmean(differences)
    half = T_QUANTILES[n - 2] * stdev(differences) / math.sqrt(n)
    return {"n": n, "difference": mean, "ci95": [mean - half, mean + half]}


def meaning(
    before: Results | None, after: Results | None, comparison: Mapping[str, Any] | None, probe: Mapping[str, Any]
) -> list[Line]:
    """Return the four lines of "What this number means". ``comparison``: of before and after, if there is one."""
    data, short = probe.get("data"), "memory" in probe and not probe["memory"]
    # Without the folders of this machine: a card is published.
    of_data = f" ({Path(data).name})" if data and data != (after or {}).get("data") else ""
    lines = [
        ("Skill or form", _form(before, after, comparison) if before and after and comparison else "", EVALUATE),
        (f"At as many tokens{of_data}", _budget(probe["budget"]) if "budget" in probe else "", f"{EVALUATE} --probe"),
        (f"Known by heart{of_data}", _memory(probe["memory"]) if probe.get("memory") else "", f"{EVALUATE} --probe"),
        ("Other seeds", _seeds(probe["seeds"]) if "seeds" in probe else "", "grpo-math report RUN RUN RUN"),
    ]
    reasons = {f"Known by heart{of_data}": ": the problems are too short" if short else "", "Other seeds": f"; {SEEDS}"}
    return [
        Line(title, text or f"not measured{reasons.get(title, '')}", "" if text else command)
        for title, text, command in lines
    ]


def _form(before: Results, after: Results, comparison: Mapping[str, Any]) -> str:
    """Return how much of a difference is skill, how much form, and how many answers were cut."""
    in_format, both = comparison["difference_in_format"], by_problem(before, after)
    # Right or wrong: a run that is rewarded for the form alone writes it around wrong answers, too.
    in_format_shares = _pair(
        *([fmean(bool(row.get("in_format")) for row in pair[side]) for pair in both] for side in (0, 1))
    )
    is_form = comparison["ci95"][0] <= 0 < in_format_shares["ci95"][0]
    return (
        f"{'the run has learned the form, and no skill that shows: ' if is_form else ''}"
        f"in the format {100 * in_format:+.1f} points: {points(comparison)} from answers that were wrong in any form "
        f"(skill), and {100 * (in_format - comparison['difference']):+.1f} points from answers that were right in "
        f"another form (form); {in_format_shares['base']:.1%} of all answers kept the format before and "
        f"{in_format_shares['trained']:.1%} "
        f"after, and the length limit cut {cut_share(before):.1%} and {cut_share(after):.1%}"
    )


def _budget(budget: Mapping[str, Any]) -> str:
    equal, samples = budget["equal_tokens"], budget["samples"]
    return (
        f"the trained model is right in {equal['trained']:.1%} with {equal['trained_tokens']:.0f} tokens a "
        f"problem, the base's maj@{equal['k']} in {equal['base']:.1%} with {equal['base_tokens']:.0f}: "
        "{}; pass@{} is {base:.1%} and {trained:.1%}".format(
            points(equal), samples, **budget["k"][str(samples)]["pass@k"]
        )
    )


def _memory(memory: Mapping[str, Any]) -> str:
    base, trained = memory["problems"]["base"], memory["problems"]["trained"]
    return (
        f"the base continues {base['share']:.1%} of {base['n']} problems word by word (95% interval "
        f"{base['ci95'][0]:.1%} to {base['ci95'][1]:.1%}), the trained model {trained['share']:.1%}; of problems that "
        f"nobody can know, the base continues {memory['control']['base']['share']:.1%}"
    )


def _seeds(seeds: Mapping[str, Any]) -> str:
    return f"{points(seeds)} over {seeds['n']} seeds"


def points(paired: Mapping[str, Any]) -> str:
    """Return a difference with its interval, in points."""
    return " ".join(in_points(paired))
