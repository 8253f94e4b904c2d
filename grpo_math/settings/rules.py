"""Check the rules for several settings, which `MathGRPOConfig`, `grpo-math doctor` and training share.

>>> settings = RunSettings({"output_dir": "run", "surrogate": "reinforce", "epsilon": 0.1})
>>> [(level, line)] = violations(settings)
>>> level, str(line)
('warning', 'epsilon=0.1 has no effect: the surrogate reinforce does not read it: leave it out')

The rules are in the modules of the topics, next to the settings. fields.py checks the type, range and choices of each
setting. checks/ has the checks that need data.
"""

import functools
import logging
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.settings.declare import Rule
from grpo_math.settings.fields import defaults
from grpo_math.settings.own import TOPICS
from grpo_math.settings.run_settings import RunSettings

logger = logging.getLogger(__name__)
# For recipes and scripts. TRL checks some of these in the constructor of its trainer, after the weights are loaded, and
# only warns of others.
TRAINER_RULES: list[Rule] = [rule for topic in TOPICS for rule in getattr(topic, "RULES", ())]
RULES = [*TRAINER_RULES, *(rule for topic in TOPICS for rule in getattr(topic, "PROGRAM_RULES", ()))]


@functools.cache
def named(fields: str) -> tuple[str, ...]:
    """Return the names of the settings that a rule names.

    >>> named("use_.*dora beta")
    ('use_dora', 'beta')
    """
    return tuple(name for word in fields.split() for name in defaults() if re.fullmatch(word, name))


def violations(s: RunSettings | Any, rules: Sequence[Rule] = RULES) -> Iterator[tuple[str, ConfigError]]:
    """Yield the level and the error of each broken rule. ``s``: `RunSettings`, or a `MathGRPOConfig` for its rules."""
    for rule in rules:
        names = named(rule.fields)
        # The class of a script's config has TRL's defaults.
        default = {name: getattr(type(s), name, defaults()[name]) for name in names}
        changed = [name for name in names if getattr(s, name) not in (default[name], "", [], {})]
        is_idle = rule.level == "no_effect"
        if rule.when(s) and (changed or not is_idle):
            # The settings that the user has changed are at fault. If none is, a default is.
            name, *more = changed or names
            reason = f"has no effect: {rule.reason}" if is_idle else rule.reason
            others = f"(and {', '.join(more)}) " if more else ""
            line = others + reason.format_map(vars(s)), rule.remedy.format_map(vars(s))
            yield "error" if rule.level == "error" else "warning", ConfigError(name, getattr(s, name), *line)


def refuse(s: Any) -> None:
    """Raise the first error of the settings of a `MathGRPOConfig`; log the warnings if there is no error."""
    # An error comes before a warning.
    for level, line in sorted(violations(s, TRAINER_RULES), key=operator.itemgetter(0)):
        if level == "error":
            raise line
        logger.warning(str(line))
