"""The verdicts of a rollout: graded once, counted for the log, kept where no reward comes of them.

Does not decide what an answer is worth: grading/ and rewards/ do.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_math.grading import Grade, Verdict, grade_batch, offending
from grpo_math.rewards.columns import text_of
from grpo_math.run import metrics


def graded(
    rows: Sequence[dict[str, Any]], completions: Sequence[Any], timeout: float
) -> tuple[list[Grade], list[dict[str, Any]]]:
    """The grade of each completion of rows with an ``answer``, and what is kept of those that could not be graded.

    >>> grades, ungradable = graded([{"answer": "2"}], ["#### 2"], timeout=5.0)
    >>> grades[0].verdict, ungradable
    (<Verdict.CORRECT: 'correct'>, [])
    """
    golds = [row["answer"] for row in rows]
    texts = [text_of(completion) for completion in completions]
    grades = grade_batch(golds, texts, answer_format=[row.get("answer_format") for row in rows], timeout=timeout)
    return grades, offending(grades, golds, texts)


def shares(verdicts: Sequence[str], size: int) -> dict[str, float]:
    """Shares of the completions by verdict, and of the groups of ``size`` that are all right or all wrong.

    >>> found = shares(["correct", "correct", "wrong", "timeout"], 2)
    >>> found["grading/timeout"], found["accuracy"], found["degenerate/all_right"], found["degenerate/all_wrong"]
    (0.25, 0.5, 0.5, 0.5)
    """
    right = [verdict == Verdict.CORRECT for verdict in verdicts]
    groups = [right[start : start + size] for start in range(0, len(right), size)]
    return {
        **{metrics.verdict_key(str(verdict)): verdicts.count(str(verdict)) / len(verdicts) for verdict in Verdict},
        metrics.ACCURACY: sum(right) / len(right),
        metrics.ALL_RIGHT: sum(map(all, groups)) / len(groups),
        metrics.ALL_WRONG: sum(not any(group) for group in groups) / len(groups),
    }


def keep_ungradable(run_dir: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Add what `grading.offending` found to the run's ``ungradable.jsonl``."""
    with open(run_dir / "ungradable.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps({metrics.STEP: step, **row}) + "\n" for row in rows)
