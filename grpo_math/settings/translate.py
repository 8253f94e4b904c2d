"""The names of settings in other programs, which names.yaml lists -> the fields of this program.

A recipe for `trl grpo` runs unchanged. A field that TRL or transformers has removed or renamed is
reported in one line.

recipe.py checks the values after the translation.
"""

import difflib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.settings.data import AS_IS, PROBLEM
from grpo_math.system.table_files import is_table
from grpo_math.system.yaml_files import read_yaml

NAMES = read_yaml(Path(__file__).with_name("names.yaml"))
SAME, RENAMED, REWARDS = NAMES["same"], NAMES["renamed"], NAMES["rewards"]
NO_EFFECT = {name: reason for reason, names in NAMES["no_effect"].items() for name in names}
NOT_HERE = {name: (program, remedy) for program, names in NAMES["not_here"].items() for name, remedy in names.items()}
TRANSLATIONS = SAME | RENAMED
SYNONYMS = {name: field for field, names in NAMES["meant"].items() for name in names} | TRANSLATIONS
# Values that switch a field off, as text: the command line has only texts.
OFF = ("none", "null", "false", "no", "off", "", "[]", "0", "0.0")
# A recipe with one of these is for a script.
SCRIPTS = ("dataset_name", "dataset_config")


def hint(name: str, known: Collection[str]) -> str:
    """Return ``did you mean --lora_r?`` for the known name of the same meaning, else for one that is much alike; or "".

    >>> hint("lr", ["learning_rate"]), hint("model_name_or_path", ["model"]), hint("quux", ["seed"])
    ('did you mean --learning_rate?', 'did you mean --model?', '')
    >>> hint("torch_dtyp", ["torch_compile", "dtype"])  # similar to a name that means dtype
    'did you mean --dtype?'
    >>> hint("use_cash", ["use_cache"]), hint("soft_cache", ["use_cache"])
    ('did you mean --use_cache?', '')
    """
    for word in (name, *difflib.get_close_matches(name, [*known, *SYNONYMS], cutoff=0.8)):
        meant = SYNONYMS.get(word, word)
        for one in known:
            if meant in (one, SYNONYMS.get(one)):
                return f"did you mean --{one}?"
    return ""


def translated(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe with our field names, and a line for each renamed field and each field without effect.

    Raises `UserError` for two names of one field with different values.

    >>> translated({"torch_dtype": "bfloat16", "reward_funcs": "my.rewards.short"})
    ({'dtype': 'bfloat16', 'rewards': ['my.rewards:short']}, ['torch_dtype is now dtype: rename the field'])
    """
    fields: dict[str, Any] = {}
    notes = [f"{name} is now {RENAMED[name]}: rename the field" for name in recipe if name in RENAMED]
    for name, value in _without_second_names(recipe).items():
        # A field that is switched off loses nothing, so it needs no line.
        if name in NO_EFFECT or (name in NOT_HERE and is_off(value)):
            if not is_off(value):
                notes.append(f"{name}={value} has no effect: {NO_EFFECT[name]}")
            continue
        if name == "reward_funcs":
            names = map(str, value if isinstance(value, list) else [value])
            # TRL writes package.module.function
            value = [REWARDS.get(one) or (one if ":" in one else ":".join(one.rsplit(".", 1))) for one in names]
        fields[TRANSLATIONS.get(name, name)] = value
    return fields, notes


def is_off(value: Any) -> bool:
    """Return True for a value that switches a field off."""
    return str(value).lower() in OFF


def refuse_not_here(field: str, value: Any, name: str) -> None:
    """Raise `ConfigError` if a field, or a reward in it, has a ``name`` that a run cannot do without in silence."""
    if name in NOT_HERE:
        program, remedy = NOT_HERE[name]
        raise ConfigError(field, value, f"is {program}, not here", remedy)


def _without_second_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with one name of each field. Raises `UserError` if two names have different values.

    >>> _without_second_names({"warmup_ratio": 0.1, "warmup_steps": 0, "rewards": ["a"], "reward_funcs": "a"})
    {'warmup_ratio': 0.1, 'rewards': ['a']}
    """
    single = dict(recipe)
    for old, field in TRANSLATIONS.items():
        if {old, field} <= single.keys():
            values = {name: _normalized(single[name]) for name in (old, field)}
            # The recipes of older versions switch off one of two settings that are one now.
            switched_on = [name for name, value in values.items() if value not in OFF]
            if len(switched_on) == 2 and values[old] != values[field]:
                raise UserError(f"{old} and {field} are two names of one setting, with different values: leave one out")
            del single[field if switched_on == [old] else old]
    return single


def _normalized(value: Any) -> str:
    """Return a value as text, the same for true and True, 1e-6 and 0.000001, a list of one and its content.

    >>> _normalized([True]) == _normalized("true"), _normalized(1e-6) == _normalized("0.000001")
    (True, True)
    """
    text = str(value[0] if isinstance(value, list) and len(value) == 1 else value).lower()
    with suppress(ValueError):
        return str(float(text))
    return text


def for_script(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return translated fields of TRL's script with our own: its configuration, and its prompts, which are a column."""
    ours = dict(fields)
    config = ours.pop("dataset_config", None)
    # Only a set on the Hub has configurations. A file has none.
    if config and not is_table(str(ours.get("dataset"))):
        ours["dataset"] = f"{ours.get('dataset')}:{config}"
    ours.setdefault("prompt_template", PROBLEM if ours.get("system_prompt") else AS_IS)
    return ours
