"""Every field of a recipe, read from the source of the classes that declare it: importing those takes seconds.

A name, a default or a choice is written in one place (`SOURCES`).

Does not read a recipe: recipe.py does.
"""

import ast
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# package, file, classes; a later one overrides a field of an earlier one
SOURCES = (
    ("transformers", "training_args.py", ("TrainingArguments",)),
    ("trl", "trainer/base_config.py", ("_BaseConfig",)),
    ("trl", "trainer/grpo_config.py", ("GRPOConfig",)),
    ("trl", "trainer/model_config.py", ("ModelConfig",)),
    ("grpo_math", "trainer/config.py", ("MathGRPOConfig",)),
    ("grpo_math", "settings/arguments.py", ("TrainArguments",)),
)
# Defaults of the program, where TRL's classes have others: a line of the history a step, and every completion in a
# file and none on the terminal.
OURS = {"logging_steps": 1, "log_completions": True, "num_completions_to_print": 0}
CHOICES = (("transformers", "training_args.py"), ("transformers", "trainer_utils.py"))  # where the enums are
COMPUTED = {"optim": "adamw_torch_fused", "output_dir": None}  # defaults that the source works out; a test compares

# Choices that the source does not state as such
NAMES = {
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers", "auto"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "log_level": ("debug", "info", "warning", "error", "critical", "detail", "passive"),
    "log_level_replica": ("debug", "info", "warning", "error", "critical", "detail", "passive"),
    "bnb_4bit_quant_storage": ("uint8", "float16", "bfloat16", "float32"),
}
OR_BOOL = ("scale_rewards", "resume_from_checkpoint")  # texts that may also be true or false


class Field(NamedTuple):
    """``kinds``: the names in the annotation, such as {"int", "None"}; ``item``: the kind of a list's items."""

    name: str
    kinds: frozenset[str]
    item: str | None
    default: Any
    choices: tuple[str, ...]


@functools.cache
def fields() -> dict[str, Field]:
    """Every field of a recipe by name."""
    enums = {
        node.name: {
            ast.unparse(x.targets[0]): ast.literal_eval(x.value) for x in node.body if isinstance(x, ast.Assign)
        }
        for package, file in CHOICES
        for node in _source(package, file).body
        if isinstance(node, ast.ClassDef) and "ExplicitEnum" in {ast.unparse(base) for base in node.bases}
    }
    found: dict[str, Field] = {}
    for node in (node for source in SOURCES for node in _classes(*source)):
        lines = [line for line in node.body if isinstance(line, ast.AnnAssign) and line.value is not None]
        found |= {ast.unparse(line.target): _field(line, enums) for line in lines}
    return found | {name: found[name]._replace(default=default) for name, default in OURS.items()}


@functools.cache
def _source(package: str, file: str) -> ast.Module:
    spec: Any = importlib.util.find_spec(package)  # does not import a top-level package
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))


def _classes(package: str, file: str, names: Sequence[str]) -> list[ast.ClassDef]:
    """Return the source of these classes."""
    return [node for node in _source(package, file).body if isinstance(node, ast.ClassDef) and node.name in names]


def assigned(file: str, *classes: str) -> tuple[str, ...]:
    """Return the names that these classes of accelerate give a type or a value.

    >>> assigned("utils/dataclasses.py", "DistributedType")[:2]
    ('NO', 'MULTI_CPU')
    """
    lines = [line for node in _classes("accelerate", file, classes) for line in node.body]
    typed = [ast.unparse(line.target) for line in lines if isinstance(line, ast.AnnAssign)]
    return (*typed, *(ast.unparse(line.targets[0]) for line in lines if isinstance(line, ast.Assign)))


def _field(line: ast.AnnAssign, enums: dict[str, dict[str, str]]) -> Field:
    name, value = ast.unparse(line.target), line.value
    kinds, item = set[str](), None
    for part in ast.unparse(line.annotation).split(" | "):
        base, _, inside = part.partition("[")
        kinds.add("bool" if base == "Literal" else base)
        item = inside.removesuffix("]") if base == "list" else item
    kinds |= {"bool"} if name in OR_BOOL else set()
    kinds -= {"str"} if name.endswith("_kwargs") else set()  # a text would be a path, or a mapping that is misspelt
    choices = NAMES.get(name) or next((tuple(enums[kind].values()) for kind in kinds if kind in enums), ())
    stated: dict[str | None, Any] = {"default": value}
    if isinstance(value, ast.Call):  # field(default=...), or our own setting(default, help)
        stated = {word.arg: word.value for word in value.keywords}
        stated |= {"default": value.args[0]} if value.args else {}
    if isinstance(metadata := stated.get("metadata"), ast.Dict):
        named = {ast.unparse(k): v for k, v in zip(metadata.keys, metadata.values, strict=True) if k}
        if isinstance(named.get("'choices'"), ast.List):
            choices = tuple(ast.literal_eval(named["'choices'"]))
    default = _literal(stated["default"], name, enums) if "default" in stated else []  # default_factory=list
    return Field(name, frozenset(kinds), item, default, choices)


def _literal(node: ast.expr, name: str, enums: dict[str, dict[str, str]]) -> Any:
    if name in COMPUTED:
        return COMPUTED[name]
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in enums:
        return enums[ast.unparse(node.value)][node.attr]
    return ast.literal_eval(node)
