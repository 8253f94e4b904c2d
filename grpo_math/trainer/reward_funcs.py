"""A trainer's reward functions: names to functions, and a check of the data's gold answers.

A gold answer is a row's ``answer``, or TRL's ``solution`` (`read_gold_answer`).
A stream is checked by its columns only, and not at all if they are not known.

rewards/guard.py calls the functions.
"""

from collections.abc import Sequence
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.problems.columns import ARGUMENTS
from grpo_math.problems.stored import rows_with
from grpo_math.rewards.functions import REWARDS, SHIPPED
from grpo_math.rewards.guard import needed, reward_name
from grpo_math.rewards.inputs import GOLD_COLUMNS, GOLDS, column_names, read_gold_answer
from grpo_math.system.user_functions import is_foreign

# Methods of TRL's trainer that get the rows of the data. Those of a subclass may make prompts.
ROW_MAKERS = (
    *("get_train_dataloader", "_get_dataloader", "training_step", "_prepare_inputs"),
    "_generate_and_score_completions",
)


def resolved(reward_funcs: Any) -> Any:
    """Replace keys of `REWARDS` with their functions. All other objects stay those of the script."""
    if isinstance(reward_funcs, list):
        return [resolved(func) for func in reward_funcs]
    return REWARDS.get(reward_funcs, reward_funcs) if isinstance(reward_funcs, str) else reward_funcs


def may_make_prompts(trainer_class: type, data: Any) -> bool:
    """Return True if rows have no prompt, and a method of a subclass may make it, and gold answers too."""
    has_prompts = "prompt" in (column_names(data) or ())
    return not has_prompts and any(is_foreign(getattr(trainer_class, name)) for name in ROW_MAKERS)


def check_gold_answers(rewards: Any, data: Any, has_environment: bool = False) -> str | None:
    """Return a warning about rows without a gold answer, or None.

    Raises `ConfigError` if a reward needs gold answers and the data has none, for problems without prompts, and for a
    column with the name of an argument that training passes to rewards: training would replace that column.

    ``rewards`` is the argument ``reward_funcs`` of `GRPOTrainer`, ``data`` its ``train_dataset``. With an
    ``environment_factory``, the environments may make the prompts.

    >>> from datasets import Dataset
    >>> check_gold_answers("accuracy", Dataset.from_list([{"prompt": "1 + 1?"}]))
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: reward_funcs='accuracy' needs gold answers, and ... has only the columns prompt: ...
    >>> check_gold_answers("accuracy", Dataset.from_list([{"problem": "1 + 1?", "answer": "2"}]))
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: dataset='train_dataset' has the columns problem, answer, and no prompt: give each ...
    """
    # None as data: a rollout_func or an environment makes the rows.
    if (names := column_names(data)) is None:
        return None
    # Rows of a data file. TRL would raise a KeyError in the first step.
    if "problem" in names and "prompt" not in names and not has_environment:
        reason = f"has the columns {', '.join(names)}, and no prompt"
        raise ConfigError("dataset", "train_dataset", reason, "give each row a prompt, as load_problems does")
    columns = [name for name in GOLD_COLUMNS if name in names]
    # A stream cannot be counted without reading it to its end.
    n = len(data) if columns and hasattr(data, "__len__") else 0
    missing = sum(read_gold_answer(row) is None for row in rows_with(data, *columns)) if n else 0
    if reserved := [name for name in names if name in ARGUMENTS]:
        raise ConfigError(
            "dataset",
            "train_dataset",
            f"has a column {reserved[0]!r}, a name that training uses itself",
            f"rename it, to my_{reserved[0]} for example",
        )
    if columns and (not n or missing < n):
        return (
            f"{missing} of {n} rows of train_dataset have no gold answer ({GOLDS}): "
            "their completions get the verdict bad_gold."
            if missing
            else None
        )
    lacks = f"no gold in {' or '.join(columns)}" if columns else f"only the columns {', '.join(names) or 'none'}"
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        if needs_gold_answers(reward, names):
            raise ConfigError(
                "reward_funcs",
                reward if isinstance(reward, str) else reward_name(reward),
                f"needs gold answers, and train_dataset has {lacks}",
                f"give each row its gold in a column {GOLDS}",
            )
    return f"train_dataset has no gold ({GOLDS}): completions are not graded, and no accuracy is logged."


def needs_gold_answers(reward: Any, columns: Sequence[str] = ()) -> bool:
    """Return True if a reward needs gold answers: its ``grade`` has no default, or it is a built-in that needs them.

    If the data have a column ``grade``, it is passed like other columns.

    >>> needs_gold_answers(lambda completions, grade, **columns: [])
    True
    >>> needs_gold_answers(lambda completions, grade=None: [])
    False
    >>> [name for name, reward in REWARDS.items() if not needs_gold_answers(reward)]
    ['format_strict', 'format_soft', 'xml_count', 'overlong', 'repetition']
    """
    for name, shipped in SHIPPED.items():
        if reward in (name, shipped.reward):
            return shipped.needs_gold
    # Not callable: a name that TRL resolves.
    return callable(reward) and "grade" in needed(reward) and "grade" not in columns
