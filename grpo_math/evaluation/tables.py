"""Evaluations and comparisons as tables for the terminal."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from grpo_math.errors import escaped
from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.paired import Comparison, by_problem
from grpo_math.evaluation.stats import PairedDifference, SeedsDifference, paired_bootstrap
from grpo_math.evaluation.summary import Share
from grpo_math.run.metrics import CATEGORIES

Difference = PairedDifference | SeedsDifference


def metrics_table(evaluation: Evaluation) -> str:
    """Return the metrics as a compact table. A category that does not occur has no row.

    >>> from grpo_math.evaluation.summary import Record, summarize
    >>> records = [Record("a", category="correct", answer="7", level=1)]
    >>> print(metrics_table(Evaluation({"samples": 1, "temperature": 0.0}, summarize(records), records)))
    1 problem, greedy
                            n   share     95% interval
    accuracy                1  100.0%  20.7% to 100.0%
    accuracy in format      1  100.0%
    <BLANKLINE>
    correct, in the format  1  100.0%
    level 1                 1  100.0%  20.7% to 100.0%
    """
    summary, samples, temperature = evaluation.summary, evaluation.samples, evaluation.temperature
    drawn = f"{samples} samples each at temperature {temperature:g}" if temperature else "greedy"
    rows = [
        ["", "n", "share", "95% interval"],
        _share_row("accuracy", summary.accuracy),
        *([["accuracy in format", str(summary.n), in_format, ""]] if (in_format := _in_format(evaluation)) else []),
        # pass@1 equals the accuracy, and maj@1 nearly does.
        *(_share_row(f"pass@{k}", share) for k, share in summary.pass_at_k.items() if k > 1),
        *(_share_row(f"maj@{k}", share) for k, share in summary.maj_at_k.items() if k > 1),
        [""] * 4,
        *(
            [CATEGORIES[name], str(count), f"{count / (summary.n * samples):.1%}", ""]
            for name, count in summary.categories.items()
            if count
        ),
        *(
            _share_row(escaped(f"{name} {part}" if name == "level" else part), share)
            for name, by_part in summary.parts.items()
            for part, share in by_part.items()
        ),
    ]
    return f"{summary.n} problem{'' if summary.n == 1 else 's'}, {drawn}\n{aligned(rows)}"


def _share_row(label: str, share: Share) -> list[str]:
    return [label, str(share.n), f"{share.value:.1%}", f"{share.ci95[0]:.1%} to {share.ci95[1]:.1%}"]


def _in_format(evaluation: Evaluation) -> str:
    """Return the accuracy in format; "" if the prompt asks for no format."""
    return f"{evaluation.summary.accuracy_in_format:.1%}" if evaluation.requires_format else ""


def sets_table(evaluations: Mapping[str, Evaluation]) -> str:
    """Return a line for each set: accuracy (mean@n if there are several samples) with its 95% interval.

    The last column is the share of all completions that the length limit has cut, right ones included.

    >>> from grpo_math.evaluation.summary import Record, summarize
    >>> records = [Record(i, category="correct" if i < 3 else "truncated", truncated=i > 1) for i in range(10)]
    >>> print(sets_table({"sums": Evaluation({"samples": 1}, summarize(records), records)}))
                   n  mean@  accuracy   95% interval  in format    cut
    sums          10      1     30.0%  10.8 to 60.3%      30.0%  80.0%
    """
    rows = [["", "n", "mean@", "accuracy", "95% interval", "in format", "cut"]]
    for name, one in evaluations.items():
        accuracy, (low, high), n = one.summary.accuracy
        shares = [f"{accuracy:.1%}", f"{100 * low:.1f} to {high:.1%}", _in_format(one)]
        rows.append([name, str(n), str(one.samples), *shares, f"{cut_share(one):.1%}"])
    if len(evaluations) > 1:
        mean = fmean(one.summary.accuracy.value for one in evaluations.values())
        rows.append([f"mean of {len(evaluations)}", "", "", f"{mean:.1%}", "", "", ""])
    return aligned(rows)


def cut_share(evaluation: Evaluation) -> float:
    """Return the share of completions that the length limit has cut."""
    return fmean(record.cut for record in evaluation.records)


def comparisons_table(comparisons: Mapping[str, Comparison]) -> str:
    """Return a line for each set: base, trained, and the paired difference with its interval, in points."""
    rows = [["", "n", "mean@", "base", "trained", "difference", "95% paired interval"]]
    for name, one in comparisons.items():
        shares = [f"{side.summary.accuracy.value:.1%}" for side in (one.before, one.after)]
        rows.append([name, str(one.accuracy.n), str(one.before.samples), *shares, *in_points(one.accuracy)])
    return aligned(rows)


def comparison_table(comparison: Comparison) -> str:
    """Return the table that ends a run: before, after, and the difference with its 95% paired interval."""
    return f"{aligned(comparison_rows(comparison))}\n{moved(comparison)}"


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """Return the rows of `comparison_table`, the header first."""
    before, after = comparison.before.summary, comparison.after.summary
    rows = [["", "before", "after", "difference", "95% paired interval"]]
    shares = [f"{side.accuracy.value:.1%}" for side in (before, after)]
    rows.append(["accuracy", *shares, *in_points(comparison.accuracy)])
    if all(in_format := [_in_format(side) for side in (comparison.before, comparison.after)]):
        rows.append(["accuracy in format", *in_format, *in_points(comparison.in_format)])
    for category, old in before.categories.items():
        new = after.categories[category]
        if old or new:
            rows.append([CATEGORIES.get(category, category), str(old), str(new), f"{new - old:+d}", ""])
    return rows


def moved(comparison: Comparison) -> str:
    """Return a sentence with the numbers of problems gained and lost, and the significance test."""
    several, changed = comparison.test == "sign", comparison.accuracy
    words = "are correct more often, {} less often" if several else "went from wrong to correct, {} back"
    test = f"{'sign test' if several else 'McNemar'}: p = {comparison.p:.2g}"
    return f"{changed.n} problems: {changed.gained} {words.format(changed.lost)} ({test})"


def skill_or_form(comparison: Comparison) -> list[str]:
    """Return a sentence: how much of the difference in format is skill, and how much is form. Return no sentence if the
    prompt asks for no format."""
    before, after, skill = comparison.before, comparison.after, comparison.accuracy
    if not (before.requires_format and after.requires_format):
        return []
    # Right or wrong: a run that is rewarded for the form alone writes it around wrong answers, too.
    kept, now_kept = (
        [fmean(bool(record.in_format) for record in pair[side]) for pair in by_problem(before, after)]
        for side in (0, 1)
    )
    is_form = skill.lo <= 0 < paired_bootstrap(kept, now_kept).lo
    in_format = comparison.in_format.difference
    return [
        f"{'the run has learned the form, and no skill that shows: ' if is_form else ''}"
        f"in the format {100 * in_format:+.1f} points: {points(skill)} from answers that were wrong in any form "
        f"(skill), and {100 * (in_format - skill.difference):+.1f} points from answers that were right in another "
        f"form (form); {fmean(kept):.1%} of all answers kept the format before and {fmean(now_kept):.1%} after, and "
        f"the length limit cut {cut_share(before):.1%} and {cut_share(after):.1%}"
    ]


def in_points(difference: Difference) -> list[str]:
    """Return a difference in points, and its interval.

    >>> from grpo_math.evaluation.stats import PairedDifference
    >>> in_points(PairedDifference(0.1, -0.02, 0.22, 50, 8, 3))
    ['+10.0 points', '[-2.0, +22.0]']
    """
    low, high = difference.ci95
    return [f"{100 * difference.difference:+.1f} points", f"[{100 * low:+.1f}, {100 * high:+.1f}]"]


def points(difference: Difference) -> str:
    """Return a difference with its interval, in points."""
    return " ".join(in_points(difference))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for the terminal: the first column begins on the left, the others end on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(widths[0], 12)
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
