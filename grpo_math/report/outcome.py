"""The outcome of a run: before and after compared, the findings, the other data sets."""

from dataclasses import dataclass

from grpo_math.checks.diagnosis import diagnose_whole
from grpo_math.errors import Finding
from grpo_math.evaluation.evaluation import Evaluation, ResultsError
from grpo_math.evaluation.paired import Comparison, compare
from grpo_math.evaluation.tables import skill_or_form
from grpo_math.report.run_dir import History, RunDir
from grpo_math.run import metrics
from grpo_math.run.checkpoints import checkpoints


@dataclass(frozen=True)
class Outcome:
    """The conclusions from the files of a run. ``ends``: the evaluations before and after training, with their steps.

    ``skill_or_form`` is a sentence about the comparison, if there is one. ``sets`` has the evaluations of each
    data set with their comparison, if the run was evaluated on several.
    """

    comparison: Comparison | None
    ends: list[tuple[int, Evaluation]]
    findings: list[Finding]
    skill_or_form: list[str]
    sets: list[tuple[Evaluation | None, Evaluation | None, Comparison | None]]


def outcome(run: RunDir) -> Outcome:
    """Compare and diagnose a run. Evaluations that cannot be compared become a note of the run."""
    shares = [f"{evaluation.summary.accuracy.value:.1%}" for evaluation in run.sides.values()]
    comparison = _compared(run, run.before, run.after, f"accuracy {' before and '.join(shares)} after training")
    # Two points that cannot be compared would look like the effect of training, so neither is drawn.
    before, after = (run.before, run.after) if comparison else (None if run.after else run.before, None)
    last = run.finished or (int(run.history[-1][metrics.STEP]) if run.history else 1)
    ends = [(step, one) for step, one in ((0, before), (last, after)) if one]
    history = [*_logged(0, before), *run.history, *_logged(last, after)]
    saved = [folder.name for _, folder in checkpoints(run.directory)]
    return Outcome(
        comparison,
        ends,
        findings=diagnose_whole(history, run.config, saved),
        skill_or_form=skill_or_form(comparison) if comparison else [],
        sets=[
            (before, after, _compared(run, before, after, f"base and trained model on {after and after.data}"))
            for before, after in run.sets
        ],
    )


def _logged(step: int, evaluation: Evaluation | None) -> History:
    return [{metrics.STEP: step, **evaluation.summary.logged()}] if evaluation else []


def _compared(run: RunDir, before: Evaluation | None, after: Evaluation | None, subject: str) -> Comparison | None:
    """Return the comparison of two evaluations. If they cannot be compared, add a note that names ``subject``."""
    try:
        return compare(before, after) if before and after else None
    except ResultsError as error:
        run.notes.append(f"{subject} are not compared: {error}")
        return None
