"""A field of a recipe: its default and what `--help` and docs/settings.md say about it.

Does not check a value: the dataclass that holds the field does.
"""

from dataclasses import field
from typing import Any


def setting(default: Any, help: str) -> Any:
    """A dataclass field; settings/fields.py reads its default out of the source of the call.

    >>> setting(["accuracy"], "Reward functions.").metadata["help"], setting(8, "Completions.").default
    ('Reward functions.', 8)
    """
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})
