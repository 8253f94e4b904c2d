"""A step whose gradient is not finite is left out; too many in a row end the run.

One NaN in a gradient makes every weight NaN through the clipping by its norm, and Adam's moments keep it. So the norm,
which transformers has computed by then, decides: the gradients are dropped, and the optimizer has nothing to step with.
DeepSpeed leaves such a step out by itself, and reports an infinite norm. The norm is that of the gradient reduced over
all ranks, so that they decide alike.

Does not look for the cause.
"""

import math
from typing import Any

from grpo_math.errors import UserError


class NonFiniteSteps:
    """Counts the steps that were left out; ``limit`` of them in a row end the run."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row = limit, 0

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.in_a_row = state["in_a_row"]

    def seen(self, grad_norm: Any) -> bool:
        """Whether this step is left out.

        >>> steps = NonFiniteSteps(2)
        >>> steps.seen(0.5), steps.seen(float("nan")), steps.seen(1.0), steps.in_a_row
        (False, True, False, 0)
        """
        # A NaN or an infinity in any gradient makes the norm over all of them non-finite.
        skipped = not math.isfinite(float(grad_norm))
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped

    def error(self, step: int) -> UserError | None:
        """What ends the run, if anything does, before optimizer step number ``step`` (from 0) is counted as done."""
        if self.in_a_row < self.limit:
            return None
        first = step + 2 - self.in_a_row
        steps = f"step {first}" if self.in_a_row == 1 else f"steps {first} to {step + 1}, {self.in_a_row} in a row"
        return UserError(
            f"the gradient was not finite in {steps}: the weights are still those of step {first - 1}; lower "
            "learning_rate, or train in bfloat16 or float32 where this is float16 (max_nonfinite_steps says how many "
            "may follow each other)"
        )
