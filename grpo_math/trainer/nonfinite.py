"""Skip a step whose gradient is not finite; too many of them in a row end the run.

Through clipping by the norm, one NaN in a gradient makes every weight NaN, and Adam's moments keep it. transformers has
computed the norm already. If it is not finite, the gradients are dropped, and the optimizer has nothing to apply.
DeepSpeed skips such a step itself, and reports an infinite norm. The norm is that of the gradient of all ranks, so all
ranks decide the same.
"""

import math
from typing import Any

from grpo_math.errors import UserError
from grpo_math.run.stateful import Stateful


class NonFiniteSteps(Stateful):
    """Counts the skipped steps; ``limit`` of them in a row end the run."""

    SAVED = ("in_a_row",)

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def count(self, grad_norm: Any, may_overflow: bool = False) -> bool:
        """Count a step with this gradient norm. Return True if the step is skipped.

        ``may_overflow``: the loss scale of float16 may be too large. The scale then falls, and the step does not count.

        >>> steps = NonFiniteSteps(2)
        >>> steps.count(0.5), steps.count(float("nan")), steps.count(1.0), steps.in_a_row
        (False, True, False, 0)
        >>> steps.count(float("nan")), steps.count(float("inf"), may_overflow=True), steps.in_a_row
        (True, True, 1)
        """
        # A NaN or an infinity in any gradient makes the norm over all of them non-finite.
        skipped = not math.isfinite(float(grad_norm))
        if not (skipped and may_overflow):
            self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped

    def error(self, step: int) -> UserError | None:
        """Return the error that ends the run, if any, before optimizer step number ``step`` (from 0) is counted.

        >>> steps = NonFiniteSteps(2)
        >>> steps.count(float("inf")), steps.error(3), steps.count(float("nan"))
        (True, None, True)
        >>> str(steps.error(4))[:95]
        'the gradient was not finite in steps 4 to 5, 2 in a row: the weights are still those of step 3;'
        """
        if self.in_a_row < self.limit:
            return None
        first = step + 2 - self.in_a_row
        steps = f"step {first}" if self.in_a_row == 1 else f"steps {first} to {step + 1}, {self.in_a_row} in a row"
        return UserError(
            f"the gradient was not finite in {steps}: the weights are still those of step {first - 1}; lower "
            "learning_rate, or train in float32 if this is float16 (max_nonfinite_steps limits the steps in a row)"
        )
