"""The progress of a run, the time that is left, and the time of each phase."""

from statistics import fmean
from typing import NamedTuple

from grpo_math.report.run_dir import RunDir
from grpo_math.run import metrics

NEWEST = 10  # lines whose pace gives the time left
PHASES = {
    metrics.SECONDS_GENERATE: "generation",
    metrics.SECONDS_SYNC: "weights to vLLM",
    metrics.SECONDS_GRADE: "grading",
    metrics.SECONDS_SCORE: "scoring",
    metrics.SECONDS_UPDATE: "update",
}


class Progress(NamedTuple):
    """``total`` steps are None if neither max_steps nor an epoch gives them; ``left`` are seconds of training."""

    step: int
    total: int | None
    left: float | None

    @property
    def words(self) -> str:
        """Return the progress in words.

        >>> Progress(6, 60, 700.0).words, Progress(6, None, None).words
        ('step 6 of 60, about 12 min left', 'step 6')
        """
        of = f" of {self.total}" if self.total else ""
        return f"step {self.step}{of}" + (f", about {duration(self.left)} left" if self.left else "")


def progress(run: RunDir) -> Progress:
    """Return the last step, the number of steps, and the time left at the pace of the newest steps.

    >>> from pathlib import Path
    >>> history = [{"step": s, "step_time": 10.0} for s in (1, 2, 3)]
    >>> progress(RunDir(Path("x"), config={"max_steps": 9}, history=history))
    Progress(step=3, total=9, left=60.0)
    """
    last = run.history[-1] if run.history else {metrics.STEP: 0}
    step, total = int(last[metrics.STEP]), run.config.get("max_steps", -1)
    # transformers' default for max_steps is -1: the number of steps then follows from the epochs.
    if total < 1:
        epoch = last.get(metrics.EPOCH)
        total = round(step * run.config.get("num_train_epochs", 0) / epoch) if epoch else None
    pace = [row[metrics.SECONDS_STEP] for row in run.history[-NEWEST:] if metrics.SECONDS_STEP in row]
    left = fmean(pace) * (total - step) if pace and total and total > step else None
    # With logging_steps above 1, the last steps of a run may have no line.
    return Progress(run.finished or step, total, left)


def spent(run: RunDir) -> dict[str, float]:
    """Return the seconds of each phase of the steps, of the remaining time of the steps, and of the evaluations.

    >>> from pathlib import Path
    >>> from grpo_math.evaluation.evaluation import Evaluation
    >>> from grpo_math.evaluation.summary import Record, summarize
    >>> line = {"step": 4, "step_time": 10.0, "seconds/generate": 6.0, "seconds/update": 3.0}  # means over four steps
    >>> history = [{**line, "eval_math500_runtime": 2.5}]
    >>> before = Evaluation({"samples": 1}, summarize([Record("a")]), [], seconds=5.0)
    >>> spent(RunDir(Path("x"), history=history, before=before))
    {'generation': 24.0, 'update': 12.0, 'other': 4.0, 'evaluation': 7.5}
    """
    seconds = {name: total(run, key) for key, name in PHASES.items()}
    seconds["other"] = max(0.0, total(run, metrics.SECONDS_STEP) - sum(seconds.values()))
    during = sum(value for row in run.history for name, value in row.items() if name.endswith("_runtime"))
    seconds["evaluation"] = during + sum(evaluation.seconds for evaluation in run.sides.values())
    return {name: value for name, value in seconds.items() if value > 0}


def total(run: RunDir, key: str) -> float:
    """Return the sum of a metric over the steps of a run. A line has the mean of the steps since the last line."""
    rows = [row for row in run.history if metrics.SECONDS_STEP in row]
    steps = [0, *(row[metrics.STEP] for row in rows)]
    return sum((row[metrics.STEP] - before) * row.get(key, 0.0) for row, before in zip(rows, steps, strict=False))


def duration(seconds: float) -> str:
    """Return seconds in words.

    >>> duration(41), duration(700), duration(5940), duration(6000), duration(200_000)
    ('41 s', '12 min', '99 min', '1 h 40 min', '55 h 33 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
