"""What the evaluations of a run say: before and after compared, the findings, the meaning, the other data sets."""

from dataclasses import dataclass
from typing import NamedTuple

from grpo_math.checks import Finding
from grpo_math.checks.diagnosis import diagnose
from grpo_math.checks.series import evaluation_line
from grpo_math.evaluation.evaluation import Evaluation, ResultsError
from grpo_math.evaluation.meaning import Line, meaning
from grpo_math.evaluation.paired import Comparison, compare
from grpo_math.evaluation.probe_results import Probe
from grpo_math.report.run_dir import History, RunDir
from grpo_math.run import metrics


class SetRow(NamedTuple):
    """The evaluations of a run on one data set, and their comparison, if they can be compared."""

    data: str | None
    n: int
    before: Evaluation | None
    after: Evaluation | None
    comparison: Comparison | None


@dataclass(frozen=True)
class Outcome:
    """What the files of a run say together. ``history`` has the evaluations as its first and last lines.

    ``meaning`` are the lines of "What this number means", if there is a number. ``sets`` has a row for each data set,
    if the run was evaluated on several.
    """

    comparison: Comparison | None
    history: History
    findings: list[Finding]
    meaning: list[Line]
    sets: list[SetRow]


def outcome(run: RunDir) -> Outcome:
    """Compare and diagnose a run. Evaluations that cannot be compared become a note of the run."""
    comparison = None
    try:
        comparison = _compared(run.before, run.after)
    except ResultsError as error:
        shares = [f"{evaluation.summary.accuracy.value:.1%}" for evaluation in run.sides.values()]
        run.notes.append(f"accuracy {' before and '.join(shares)} after training are not compared: {error}")
    # Two points that cannot be compared would look like the effect of training, so neither is drawn.
    before, after = (run.before, run.after) if comparison else (None if run.after else run.before, None)
    last = run.finished or (int(run.history[-1][metrics.STEP]) if run.history else 1)
    ends = [evaluation_line(step, one.summary.accuracy if one else None) for step, one in ((0, before), (last, after))]
    history = [*ends[0], *run.history, *ends[1]]
    checkpoints = [path.name for path in run.directory.glob("checkpoint-*")]
    return Outcome(
        comparison,
        history,
        findings=[*probe_findings(run.probe), *diagnose(history, run.config, checkpoints)],
        meaning=meaning(run.after.data, comparison, run.probe, run.seeds) if run.after else [],
        sets=_set_rows(run),
    )


def probe_findings(probe: Probe | None) -> list[Finding]:
    """Return a list with the probe's finding that the model knows problems by heart, or an empty list."""
    memory = probe.memory if probe else None
    return [Finding("warning", memory.finding, memory.remedy, "known_by_heart")] if memory and memory.finding else []


def _compared(before: Evaluation | None, after: Evaluation | None) -> Comparison | None:
    """Return the comparison of two evaluations; None if one is missing. Raises `ResultsError`."""
    return compare(before, after) if before and after else None


def _set_rows(run: RunDir) -> list[SetRow]:
    rows = []
    for before, after in run.sets:
        comparison, (one, *_) = None, [side for side in (after, before) if side]
        try:
            comparison = _compared(before, after)
        except ResultsError as error:
            run.notes.append(f"base and trained model on {one.data} are not compared: {error}")
        rows.append(SetRow(one.data, one.summary.n, before, after, comparison))
    return rows
