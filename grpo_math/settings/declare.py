"""How the modules of settings/ state a setting (`setting`) and a rule for several settings (`Rule`).

A topic is one module: a dataclass has our own fields and the properties that follow from them, ``FACTS`` has their
limits, ``RULES`` the rules that a script obeys too, and ``PROGRAM_RULES`` the rules for recipes alone. trl_fields.yaml
has the fields of TRL.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from grpo_math.settings.run_settings import RunSettings

LEAVE = "leave it out"


# The facts about settings, by name: limits (``ge: 0``), choices, what a resumed run may do (``resume``: may_change or
# must_match), and ``shapes_rollout``: a half-trained rollout fits only the same value.
Facts = dict[str, dict[str, Any]]


def setting(default: Any, help: str) -> Any:
    """Return a dataclass field. The metadata is only the help: transformers' parser passes all metadata to argparse.

    >>> setting(["accuracy"], "Reward functions.").metadata, setting(8, "Completions.").default
    (mappingproxy({'help': 'Reward functions.'}), 8)
    """
    argument: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**argument, metadata={"help": help})


class Rule(NamedTuple):
    """A rule for several settings.

    ``level``: training refuses an error before weights load; a warning is one line in the log; no_effect warns about
    the fields that were changed from their defaults, because nothing reads them.
    ``fields``: the settings at fault, separated by spaces. Each word is a regular expression for their names.
    ``when``: the condition. That of an error or a warning reads one of the fields.
    ``reason`` and ``remedy`` may contain settings: {beta}.
    """

    level: Literal["error", "warning", "no_effect"]
    fields: str
    when: Callable[["RunSettings"], object]
    reason: str
    remedy: str = LEAVE


def without(switch: str, fields: str) -> Rule:
    """Return the rule for fields that nothing reads while a setting is off."""
    remedy = f"set {switch}, or {LEAVE}"
    return Rule("no_effect", fields, lambda s: not getattr(s, switch), f"{switch} is not set", remedy)


def has_field(mapping: str, key: str, field: str) -> Rule:
    """Return the rule for a key of a mapping, for which the recipe has a field."""
    reason = f"sets {key}, which has a field"
    return Rule("error", mapping, lambda s: key in entries(getattr(s, mapping)), reason, f"set {field}")


def entries(mapping: Any) -> Mapping[str, Any]:
    """Return a setting that is a mapping. The setting may also be empty, or the path of a file."""
    return mapping if isinstance(mapping, dict) else {}
