"""The type of TRL's trainer after its constructor, for annotations only.

TRL annotates attributes as optional that are set by then, and its arguments as those of transformers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl import GRPOTrainer

    class TrlTrainer(GRPOTrainer):
        """A `GRPOTrainer` whose constructor has returned."""

        args: Any
        model: Any
        max_completion_length: int
        num_generations: int
        num_generations_eval: int
        train_dataset: Any
        _buffered_inputs: Any
        # `Parts` of a `MathGRPOTrainer`. A subclass may have none before its constructor has returned.
        grpo_math: Any
