"""A field of a recipe: its default and what `--help` and docs/reference.md say about it.

The dataclass that contains the field checks its values.
"""

from dataclasses import field
from typing import Any


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Return a dataclass field. settings/fields.py reads its default, range, choices, ``resume`` and
    ``shapes_rollout`` from the source of the call.

    ``limits`` are not in the metadata, because parsers of dataclasses (TRL's) hand it to argparse.

    >>> setting(["accuracy"], "Reward functions.").metadata["help"], setting(8, "Completions.").default
    ('Reward functions.', 8)
    """
    argument: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**argument, metadata={"help": help})
