"""Every field of a recipe: ours from their dataclasses, those of TRL and transformers from their source, because
importing TRL takes seconds.
"""

import ast
import dataclasses
import functools
import logging
import operator
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, require_choice
from grpo_math.settings.declare import Facts
from grpo_math.settings.own import TOPICS, ProgramFields, TrainerFields
from grpo_math.system.source import DeclaredField, declared_fields, source_text, syntax_tree
from grpo_math.system.user_functions import is_user_function
from grpo_math.system.yaml_files import read_yaml

# module -> class; a later class overrides the fields of an earlier class
SOURCES = {
    "transformers.training_args": "TrainingArguments",
    "trl.trainer.base_config": "_BaseConfig",
    "trl.trainer.grpo_config": "GRPOConfig",
    "trl.trainer.model_config": "ModelConfig",
}
# Defaults that differ from TRL's: log a line of the history at each step, write completions to a file, not to the
# terminal, and give a vLLM server that starts with the run, or again, the time to load a large model.
OURS: dict[str, Any] = {
    "logging_steps": 1,
    "log_completions": True,
    "num_completions_to_print": 0,
    "vllm_server_timeout": 1800.0,
}
# Modules that define the enums.
CHOICES = ("transformers.training_args", "transformers.trainer_utils")
# Defaults that the source computes. A test compares them.
COMPUTED: dict[str, Any] = {"optim": "adamw_torch_fused", "output_dir": None}

TABLES = read_yaml(Path(__file__).with_name("trl_fields.yaml"))
# The facts about fields of TRL and transformers, and about our own: by name of the field.
TRL_FACTS: Facts = TABLES["fields"]
OUR_FACTS: Facts = {name: facts for topic in TOPICS for name, facts in getattr(topic, "FACTS", {}).items()}
WORDS = {"gt": "above {}", "ge": "of {} or more", "lt": "below {}", "le": "up to {}"}
logger = logging.getLogger(__name__)
OR_BOOL = ("scale_rewards", "resume_from_checkpoint")  # texts that may also be true or false


class Field(NamedTuple):
    """A field of a recipe. ``kinds``: the names in the annotation, such as {"int", "None"}; ``item``: the kind of a
    list's items; ``facts``: as in `declare.Facts` and trl_fields.yaml."""

    name: str
    kinds: frozenset[str]
    item: str | None
    default: Any
    facts: dict[str, Any]

    def refuse(self, value: Any, written: Any) -> None:
        """Raise `ConfigError` for a value out of range, or not among the choices. ``written``: the value in the recipe.

        >>> fields()["temperature"].refuse(0.0, "0")
        Traceback (most recent call last):
        ...
        grpo_math.errors.ConfigError: temperature='0' is out of range: give a number above 0
        """
        if isinstance(value, str):
            # The choice module:function accepts any user function.
            choices = self.facts.get("choices", ())
            if choices and not ("module:function" in choices and is_user_function(value)):
                require_choice(self.name, value, tuple(choices))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            # Not math.isfinite, which raises an exception for an integer of hundreds of digits.
            if not abs(value) < 1e308:
                raise ConfigError(self.name, written, "is not finite", "give a finite number")
            bounds = {name: bound for name, bound in self.facts.items() if name in WORDS}
            inside = all(getattr(operator, name)(value, bound) for name, bound in bounds.items())
            if not inside and value not in self.facts.get("also", ()):
                words = " and ".join(WORDS[name].format(bound) for name, bound in bounds.items())
                remedy = f"give a number {words}{self.facts.get('why', '')}"
                raise ConfigError(self.name, written, "is out of range", remedy)

    def check_in_script(self, value: Any) -> None:
        """Raise `ConfigError` for a value of a script that cannot work, and log a warning for an unusual value.

        >>> fields()["save_total_limit"].check_in_script(0)
        >>> fields()["learning_rate"].check_in_script(-1)
        Traceback (most recent call last):
        ...
        grpo_math.errors.ConfigError: learning_rate=-1 is out of range: give a number of 0 or more
        """
        try:
            self.refuse(value, value)
        except ConfigError as error:
            # Limits of this program for a field of TRL may be others in a script. {}: the same limits.
            is_added = not {*WORDS, "choices"}.isdisjoint(TRL_FACTS.get(self.name, ()))
            limits = self.facts.get("scripts") if is_added else {}
            if limits == {}:
                raise
            if limits:
                self._replace(facts=limits).refuse(value, value)
            logger.warning(str(error))


@functools.cache
def fields() -> dict[str, Field]:
    """Return every field of a recipe, by name."""
    enums = {
        name: {ast.unparse(x.targets[0]): ast.literal_eval(x.value) for x in node.body if isinstance(x, ast.Assign)}
        for module in CHOICES
        for name, node in _classes(module).items()
        if "ExplicitEnum" in {ast.unparse(base) for base in node.bases}
    }
    by_name: dict[str, Field] = {}
    for module, name in SOURCES.items():
        by_name |= {one.name: _from_source(one, enums) for one in declared_fields(_classes(module)[name])}
    by_name |= {
        one.name: _from_class(one) for kind in (TrainerFields, ProgramFields) for one in dataclasses.fields(kind)
    }
    return by_name | {name: by_name[name]._replace(default=default) for name, default in (OURS | COMPUTED).items()}


@functools.cache
def defaults() -> dict[str, Any]:
    """Return the default of every field, by name."""
    return {name: field.default for name, field in fields().items()}


def most_used() -> str:
    """Return the most used fields with their meanings, by group.

    >>> most_used().splitlines()[1:3]
    [' Model', "  --model_name_or_path      a folder, a Hub id, or 'embedded'"]
    """
    lines = ["the most used fields (docs/reference.md and --help-all have all of them):"]
    for group, meanings in TABLES["most_used"].items():
        lines.append(f" {group}")
        lines += [f"  --{name:<23} {meaning}" for name, meaning in meanings.items()]
    return "\n".join(lines)


def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax trees of the classes of a module, by name."""
    return {node.name: node for node in syntax_tree(source_text(module)).body if isinstance(node, ast.ClassDef)}


def _from_class(one: dataclasses.Field[Any]) -> Field:
    made: Any = one.default_factory
    default = made() if one.default is dataclasses.MISSING else one.default
    annotation = one.type.__name__ if type(one.type) is type else str(one.type)
    return Field(one.name, *_kinds(annotation), default, {**one.metadata, **OUR_FACTS.get(one.name, {})})


def _from_source(one: DeclaredField, enums: dict[str, dict[str, str]]) -> Field:
    kinds, item = _kinds(one.annotation)
    kinds |= {"bool"} if one.name in OR_BOOL else set()
    # The annotation allows a text, but only a mapping is valid.
    kinds -= {"str"} if one.name.endswith("_kwargs") else set()
    choices = next((tuple(enums[kind].values()) for kind in kinds if kind in enums), ())
    arguments: dict[str | None, Any] = {**one.arguments}
    if isinstance(metadata := arguments.get("metadata"), ast.Dict):
        arguments |= {ast.literal_eval(k): v for k, v in zip(metadata.keys, metadata.values, strict=True) if k}
    # transformers computes some of its choices.
    if isinstance(arguments.get("choices"), ast.List | ast.Tuple):
        choices = ast.literal_eval(arguments["choices"])
    # A field without a default has default_factory=list.
    default = ast.literal_eval(arguments["default"]) if "default" in arguments and one.name not in COMPUTED else []
    return Field(one.name, kinds, item, default, {"choices": choices, **TRL_FACTS.get(one.name, {})})


def _kinds(annotation: str) -> tuple[frozenset[str], str | None]:
    """Return the kinds of an annotation, and the kind of a list's items.

    >>> sorted(_kinds("list[str] | None")[0]), _kinds("list[str] | None")[1]
    (['None', 'list'], 'str')
    """
    parts = [part.partition("[") for part in annotation.split(" | ")]
    # The only Literal in these classes is Literal[False].
    kinds = frozenset("bool" if base == "Literal" else base for base, _, _ in parts)
    return kinds, next((inside.removesuffix("]") for base, _, inside in parts if base == "list" and inside), None)
