"""The model under training on held-out problems, over all ranks, before, during and after a run.

Does not generate or grade: evaluation/ does.
"""

from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from grpo_math.evaluation.figures import summary
from grpo_math.evaluation.fingerprint import problems_hash
from grpo_math.evaluation.results import evaluate
from grpo_math.run import metrics
from grpo_math.run.log import History, Tell
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer


def evaluate_over_ranks(
    trainer: MathGRPOTrainer,
    rows: list[dict[str, Any]],
    config: MathGRPOConfig,
    about: dict[str, Any],
    overlap: dict[str, Any] | None,
    progress: bool,
) -> dict[str, Any]:
    """Greedy results over all ranks: each takes every n-th row."""
    accelerator = trainer.accelerator
    results = evaluate(
        accelerator.unwrap_model(trainer.model),
        rows[accelerator.process_index :: accelerator.num_processes] or rows[:1],
        tokenizer=trainer.processing_class,
        max_new_tokens=config.max_completion_length or 512,
        batch_size=32,
        grade_timeout=config.grade_timeout,
        progress=progress and accelerator.is_main_process,
        about=about,
        contamination=overlap,
    )
    if accelerator.num_processes > 1:
        by_id = {record["id"]: record for record in gather_object(results["rows"])}
        results["rows"] = [by_id[row["id"]] for row in rows]
        results.update(summary(results["rows"]), problems_hash=problems_hash(rows))
    return results


class HeldOut(TrainerCallback):
    """Accuracy on held-out problems every so many steps, as a line of the history, and told to the trackers."""

    def __init__(self, score: Any, rows: list[dict[str, Any]], every: int, history: History, tell: Tell) -> None:
        self.score, self.rows, self.every, self.history, self.tell = score, rows, every, history, tell

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every:
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
