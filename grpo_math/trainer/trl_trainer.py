"""The type of TRL's trainer after its constructor, for annotations only.

TRL annotates attributes as optional that are set by then, and its arguments as those of transformers.

These files read private attributes of TRL, because TRL has no other name for what they need. trainer_parts.py hands
values to all other parts.

- trainer.py, constructor.py: the overrides, and the steps around TRL's constructor.
- updates.py, state.py: the rows of a rollout and the position in it.
- rollout_in_progress.py, table.py: the metrics and the table that TRL writes.
- loss_settings.py: the entropy bonus. largest_batch.py: the tokens of a prompt.
- evaluation/trainer_engines.py, generation/colocated_sampler.py: the weights that vLLM has.
- checks/compared.py, trainer/step_cost.py, train/program.py: methods that they record, time or call.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl import GRPOTrainer

    class TrlTrainer(GRPOTrainer):
        """A `GRPOTrainer` whose constructor has returned."""

        args: Any
        model: Any
        optimizer: Any
        max_completion_length: int
        num_generations: int
        num_generations_eval: int
        train_dataset: Any
        _buffered_inputs: Any
        # `Parts` of a `MathGRPOTrainer`. A subclass may have none before its constructor has returned.
        grpo_math: Any
