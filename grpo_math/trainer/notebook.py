"""The table of a training run in a notebook: a row for each log entry, under a progress bar.

Needs IPython, so console.py imports this module only in a notebook.
"""

from typing import Any

from transformers.utils.notebook import NotebookProgressCallback, NotebookTrainingTracker

from grpo_math.run import metrics

COLUMNS = {
    "Loss": metrics.LOSS,
    "Reward": metrics.REWARD,
    "Accuracy": metrics.ACCURACY,
    "Length": metrics.LENGTH_MEAN,
    "Held-out accuracy": metrics.HELDOUT_ACCURACY,
}


class MetricTable(NotebookProgressCallback):
    """Replaces transformers' table, which shows the loss alone."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The columns are those of the first row, and later rows may add some.
        self.training_tracker = NotebookTrainingTracker(state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # transformers adds the prefix to the metrics of an evaluation.
        values = {name: (logs or {}).get(key, (logs or {}).get(f"eval_{key}")) for name, key in COLUMNS.items()}
        row = {name: f"{value:.4g}" for name, value in values.items() if value is not None}
        if row and self.training_tracker is not None:
            self.training_tracker.write_line({"Step": state.global_step, **row})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Remove the bar of an evaluation, whose metrics are logged elsewhere."""
        self.prediction_bar = None
        if self.training_tracker is not None:
            self.training_tracker.remove_child()
