"""Diagnose a run during training, as a transformers callback.

diagnosis.py has the findings.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from grpo_math.checks.diagnosis import diagnose
from grpo_math.errors import Finding, UserError
from grpo_math.evaluation.evaluation import read
from grpo_math.grading import GRADER
from grpo_math.run import metrics
from grpo_math.run.checkpoints import checkpoints
from grpo_math.run.history import read_lines
from grpo_math.run.log import History


class Diagnosis(TrainerCallback):
    """Print a line when a finding appears for the first time.

    ``tell`` sends the line to the trackers, except for findings at the end of training: trackers are closed by then.
    """

    def __init__(self, history: History, settings: dict[str, Any], tell: Callable[..., Any]) -> None:
        self.history = history
        self.settings = settings
        self.tell = tell
        self.last_step = 0
        self.reported = set[str]()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # Report at the last step in any case: the trackers take no line after that step.
        last = state.global_step >= state.max_steps
        # Otherwise report at the first line, and then every ten steps. Each diagnosis reads the whole file, so long
        # runs are diagnosed less often.
        interval = max(10, state.global_step // 50)
        measured = logs and (metrics.LOSS in logs or metrics.HELDOUT_N in logs)
        if measured and (last or not self.last_step or state.global_step - self.last_step >= interval):
            for finding in self.report_new_findings(state):
                self.tell(args, state, control, logs={metrics.FINDING_PREFIX + finding.check: finding.line()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report_new_findings(state)

    def report_new_findings(self, state: Any) -> list[Finding]:
        """Print and return the findings that are new."""
        if not state.is_world_process_zero or not self.history.path.exists():
            return []
        self.last_step = state.global_step
        lines = read_lines(self.history.path)
        with suppress(UserError):  # a script may not have evaluated
            base = read(self.history.path.with_name("before.json"))
            # A resumed run may have been evaluated by another grader: then its earlier accuracy is not compared.
            if base.settings.get("grader") == GRADER:
                lines = [{metrics.STEP: 0, **base.summary.logged()}, *lines]
        saved = [folder.name for _, folder in checkpoints(self.history.path.parent)]
        findings = diagnose(lines, self.settings, saved)
        new = [finding for finding in findings if finding.check not in self.reported]
        for finding in new:
            self.reported.add(finding.check)
            tqdm.write(f"step {state.global_step}: {finding.line()}", file=sys.stderr)
        return new
