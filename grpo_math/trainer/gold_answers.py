"""The gold answers of a data set, looked at before weights load: what is without them, and what cannot be.

A gold is what `gold_of` finds in a row: its ``answer``, or TRL's ``solution``.

Does not grade, and looks at the columns alone where the rows come as a stream.
"""

import inspect
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.problems.columns import ARGUMENTS, refuse_made
from grpo_math.rewards import REWARDS
from grpo_math.rewards.columns import GOLD_COLUMNS, GOLDS, gold_of
from grpo_math.rewards.guard import name_of

WITHOUT_GOLD = ("format_strict", "format_soft", "xml_count", "overlong", "repetition")  # of `REWARDS`


def check_gold_answers(rewards: Any, data: Any) -> str | None:
    """One line about rows without a gold, or None; `ConfigError` for a reward that needs golds where there are none.

    A column that a reward gets from training is refused too: it would replace the user's.

    ``rewards``: what `GRPOTrainer` takes as ``reward_funcs``; ``data`` its ``train_dataset``, of which a stream is
    judged by its columns.

    >>> check_gold_answers("accuracy", [{"prompt": "1 + 1?"}])
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: reward_funcs='accuracy' needs gold answers, and ... has only the columns prompt: ...
    """
    if data is None:  # rows of a rollout_func, or of an environment
        return None
    columns, without, rows = _counted(data)
    refuse_made(_columns(data), "train_dataset", ARGUMENTS if columns else set(ARGUMENTS) - {"grade"})
    if columns and (not rows or without < rows):
        lacking = f"{without} of {rows} rows of train_dataset have no gold answer ({GOLDS})"
        return f"{lacking}: their completions get the verdict bad_gold." if without else None
    named = ", ".join(_columns(data)) or "none"
    lacks = f"no gold in {' or '.join(columns)}" if columns else f"only the columns {named}"
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        if needs_golds(reward):
            reason = f"needs gold answers, and train_dataset has {lacks}"
            name = reward if isinstance(reward, str) else name_of(reward)
            raise ConfigError("reward_funcs", name, reason, f"give each row its gold in a column {GOLDS}")
    return f"train_dataset has no gold ({GOLDS}): completions are not graded, and no accuracy is logged."


def needs_golds(reward: Any) -> bool:
    """Whether a reward cannot be called without golds: it takes ``grade``, or is one of ours that asks for them.

    >>> needs_golds(lambda completions, grade, **columns: []), needs_golds(lambda completions, grade=None: [])
    (True, False)
    >>> [name for name, reward in REWARDS.items() if not needs_golds(reward)]
    ['format_strict', 'format_soft', 'xml_count', 'overlong', 'repetition']
    """
    for name, function in REWARDS.items():
        if reward in (name, function):
            return name not in WITHOUT_GOLD
    try:
        grade = inspect.signature(reward).parameters.get("grade")
    except (TypeError, ValueError):  # a model, or a name that is TRL's to read
        return False
    return grade is not None and grade.default is inspect.Parameter.empty


def _columns(data: Any) -> list[str]:
    """The names of the columns; of a data set that does not know them, those of its first row."""
    names = getattr(data, "column_names", None)
    return list(names) if isinstance(names, list) else list(next(iter(data), {}))


def _counted(data: Any) -> tuple[list[str], int, int]:
    """The columns that may hold a gold, the rows without one, and all rows; of a stream no row is counted."""
    columns = [name for name in GOLD_COLUMNS if name in _columns(data)]
    # A stream cannot be counted without reading it to its end.
    if not columns or not hasattr(data, "column_names") or not hasattr(data, "__len__"):
        return columns, 0, 0
    plain = data.with_format(None)  # numbers, not tensors
    values = zip(*(plain[name] for name in columns), strict=True)
    return columns, sum(gold_of(dict(zip(columns, row, strict=True))) is None for row in values), len(data)
