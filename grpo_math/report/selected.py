"""Choose completions of a run as training data for TRL's SFTTrainer."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading import Verdict
from grpo_math.report.run_dir import completion_files
from grpo_math.run.files import require_new
from grpo_math.system.reading import near, read_table

COLUMNS = ("prompt", "completion")  # the columns that TRL's SFTTrainer reads


def select(
    run_dir: Path, file: Path, *, only_good: bool = True, per_problem: int = 4, min_reward: float | None = None
) -> tuple[int, dict[str, int]]:
    """Write each distinct completion that passes the filters, as a row with prompt and completion.

    Return the number of rows, and the number of completions that each reason left out. ``only_good``: correct, in the
    format, not cut, and at most ``per_problem`` (0: no limit) of a problem.
    """
    require_new("to", file)
    if not run_dir.is_dir():
        raise ConfigError("run_dir", str(run_dir), "is not a folder", near(run_dir) or "name the folder of a run")
    lines: dict[str, None] = {}  # a dict is a set that keeps the order
    left_out, of_problem = Counter[str](), Counter[str]()
    for row in (row for path in completion_files(run_dir) for _, row in read_table(path)):
        line, problem = (json.dumps({n: row[n] for n in names}, ensure_ascii=False) for names in (COLUMNS, COLUMNS[:1]))
        reason = _rejection(row, only_good, min_reward) or "repeated" * (line in lines)
        if not reason and only_good and 0 < per_problem <= of_problem[problem]:
            reason = f"more than {per_problem} of a problem"
        if reason:
            left_out[reason] += 1
        else:
            lines[line] = None
            of_problem[problem] += 1
    if not lines:
        reason = f"has no completions to select ({counted(left_out)})" if left_out else "has no completions"
        remedy = "write all of them with --all" if left_out else "train with log_completions, on data with gold answers"
        raise ConfigError("run_dir", str(run_dir), reason, remedy)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines), dict(left_out)


def counted(left_out: dict[str, int]) -> str:
    """Return the reasons with their numbers, the most frequent first.

    >>> counted({"repeated": 2, "not correct": 1200})
    '1,200 not correct; 2 repeated'
    """
    return "; ".join(f"{count:,} {reason}" for reason, count in Counter(left_out).most_common())


def _rejection(row: dict[str, Any], only_good: bool, min_reward: float | None) -> str:
    """Return the reason to leave a completion out, or ""."""
    reward = row.get("reward")
    reasons = {
        "not correct": row.get("verdict") != Verdict.CORRECT and only_good,
        # A run without a format has True or None.
        "outside the format": row.get("in_format") is False and only_good,
        "cut at the limit": bool(row.get("truncated")) and only_good,
        f"below the reward {min_reward}": min_reward is not None and not (reward is not None and reward >= min_reward),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
