"""Measure the accuracy on held-out problems during training.

Does not generate or grade: evaluation/ does, as before and after a run.
"""

from typing import Any

from transformers import TrainerCallback

from grpo_math.problems.problem import Problem
from grpo_math.run import metrics
from grpo_math.run.log import History, Tell


class HeldOut(TrainerCallback):
    """Log the accuracy on ``rows`` after every ``steps`` steps, to the history and to the trackers."""

    def __init__(self, score: Any, rows: list[Problem], steps: int, history: History, tell: Tell) -> None:
        self.score, self.rows, self.steps, self.history, self.tell = score, rows, steps, history, tell

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps:
            return
        results = self.score(self.rows, False)
        if state.is_world_process_zero:
            values = {
                metrics.HELDOUT_ACCURACY: results[metrics.ACCURACY],
                metrics.HELDOUT_IN_FORMAT: results[metrics.ACCURACY_IN_FORMAT],
                metrics.HELDOUT_N: results["n"],
            }
            self.history.append(state.global_step, values)
            self.tell(args, state, control, values)
