"""A recipe and a command line -> every setting, without torch. Checks each name, type, choice and range.

>>> recipe = read(["--learning_rate", "1e-5", "--use_peft"])
>>> recipe.settings.learning_rate, recipe.settings.use_peft, recipe.settings.beta, recipe.problems
(1e-05, True, 0.0, [])
>>> print(read(["--temprature", "1"]).problems[0])
--temprature is not a setting: did you mean --temperature?
>>> print(read(["--temperature", "0"]).problems[0])
temperature='0' is out of range: give a number above 0

rules.py and batch.py check combinations of settings.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError, require_choice
from grpo_math.redact import ENDINGS, HIDDEN, is_secret
from grpo_math.settings.data import columns_as_text, dataset_as_text
from grpo_math.settings.fields import Field, defaults, fields
from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.shipped import recipe_file
from grpo_math.settings.start_adapter import ALL_LINEAR, adapter_fields
from grpo_math.settings.translate import SCRIPTS, for_script, hint, refuse_not_here, translated
from grpo_math.system.encodings import uncompressed
from grpo_math.system.reading import from_json, home, reading
from grpo_math.system.table_files import TABLES
from grpo_math.system.yaml_files import from_yaml, read_yaml

METHODS: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("methods.yaml"))
# TRL takes null for these fields. For the first, transformers then samples 20 tokens.
NEEDED = ("max_completion_length", "num_generations")
# The options of `grpo-math train` that are not settings.
OPTIONS = ("config", "method", "gpus", "accelerate_config", "list", "copy", "help_all", "json")
# The words of transformers' HfArgumentParser.
TRUTH = {**dict.fromkeys(("yes", "true", "t", "y", "1"), True), **dict.fromkeys(("no", "false", "f", "n", "0"), False)}


class Recipe(NamedTuple):
    """A recipe and a command line. ``problems`` has one error for each bad setting, which keeps its default."""

    settings: RunSettings
    problems: list[UserError]
    argv: list[str]
    notes: list[str]  # a line for each field that TRL has removed or renamed
    env: Mapping[str, str] = {}  # the variables of the recipe
    replaced: Sequence[str] = ()  # a line for each value of the recipe that the method or the adapter has replaced

    def raise_first_problem(self) -> "Recipe":
        """Return the recipe if it has no problem."""
        if self.problems:
            raise self.problems[0]
        return self


def read(argv: Sequence[str]) -> Recipe:
    """Return the settings of ``--config RECIPE --method NAME --FIELD VALUE ...``. The method wins over the recipe, and
    a field of the command line over the method.

    Changes nothing in this process: a command calls `read_and_set_env`. Raises `UserError` for a file that is not a
    recipe. A bad setting keeps its default, and adds to ``problems``.
    """
    parsed = parse(argv)
    settings, notes, replaced = merge(parsed.recipe, parsed.typed, parsed.method)
    valid, problems = validate(settings, parsed.places)
    try:
        of_adapter, more = validate(adapter_fields(valid))
    except UserError as problem:
        of_adapter, more = {}, [problem]
    if of_adapter and valid.get("lora_target_modules") == ALL_LINEAR:
        modules = ", ".join(of_adapter["lora_target_modules"])
        replaced.append(f"lora_target_modules all-linear -> {modules}, by the adapter")
    # A bad setting keeps its default, so that the other checks continue and report more than one mistake.
    return Recipe(
        RunSettings(valid | of_adapter), [*parsed.problems, *problems, *more], list(argv), notes, parsed.env, replaced
    )


class Parsed(NamedTuple):
    """The fields of a recipe and of a command line as they are written, under any name."""

    recipe: dict[str, Any]
    typed: dict[str, Any]
    method: Any
    env: dict[str, str]
    problems: list[UserError]  # words that are no option
    places: dict[str, str]  # the file and the line of each field of the recipe


def parse(argv: Sequence[str]) -> Parsed:
    """Split the command line into options, and read the recipe that it names."""
    typed, problems = _typed(argv)
    path, method = typed.pop("config", None), typed.pop("method", None)
    if not isinstance(path, str | None):
        raise UserError("--config needs one value: give the path of a recipe")
    recipe = read_recipe(path) if path is not None else {}
    env = recipe.pop("env", {})
    # The launcher or SLURM has given this process its GPUs: the recipe's would include those of the vLLM server.
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        env.pop("CUDA_VISIBLE_DEVICES", None)
    places = {name: place for name, place in _places(path).items() if name not in typed} if path else {}
    return Parsed(recipe, typed, method, env, problems, places)


def merge(
    recipe: Mapping[str, Any], typed: Mapping[str, Any], method: Any = None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the fields under our names, notes about them, and a line for each value that the method has replaced.

    >>> merge({"seed": 1, "baseline": "none"}, {"seed": 2}, "rloo")[0]["seed"]
    2
    """
    # Look for the marks before the translation, which renames the fields that mark a script's recipe.
    marks, typed_marks = ([name for name in SCRIPTS if name in names] for names in (recipe, typed))
    # The command line wins, by the old name of a field or by the new one: both are translated first.
    (written, notes), (words, more) = translated(recipe), translated(typed)
    notes += more
    of_method = method_fields(method)
    replaced = _drop_weights(written, of_method, f"--method {method}")
    replaced += _drop_weights(of_method, words, "the command line")
    for name, value in of_method.items():
        if name in words and not _same(name, words[name], value):
            notes.append(f"{name}={words[name]!r} stays, and --method {method} has {value!r}: set the one you want")
        elif name in written and name not in words and not _same(name, written[name], value):
            replaced.append(f"{name} {_short(written[name])} -> {_short(value)}, by --method {method}")
    settings = {**written, **of_method, **words}
    # Without rewards, a missing teacher is an error.
    distils = of_method.get("kl_estimator") == "advantage" and settings.get("rewards", ["accuracy"])
    if distils and not settings.get("reference_model"):
        notes.append(f"--method {method} distils the model before its training: name a teacher as reference_model")
    if marks or typed_marks:
        explicit = "prompt_template" in settings
        settings = for_script(settings)
        # The recipe of a script has its prompts in the data. On the command line alone, the name may mean dataset.
        if not marks and not explicit:
            notes.append(
                f"--{typed_marks[0]} sets prompt_template to {settings['prompt_template']!r}, as in TRL: "
                "set the one you want"
            )
    return settings, notes, replaced


def validate(
    settings: Mapping[str, Any], places: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, Any], list[UserError]]:
    """Return the settings that are valid, with the types of their fields, and the errors of the others.

    An error ends with the place of its field, if ``places`` has one.
    """
    valid, problems = {}, list[UserError]()
    for name, value in settings.items():
        try:
            valid[name] = check(name, value)
        except ConfigError as one:
            place = f" ({places[name]})" if name in places else ""
            problems.append(ConfigError(one.field, one.value, one.reason, one.remedy + place))
        except UserError as problem:
            # A file has no dashes.
            in_file = re.sub(r"^--|(?<=did you mean )--", "", str(problem))
            problems.append(UserError(f"{in_file} ({places[name]})") if name in places else problem)
    return valid, problems


def _places(path: str) -> dict[str, str]:
    """Return the file and the line of each field of a YAML recipe."""
    lines = recipe_file(path).read_text(encoding="utf-8", errors="replace").splitlines()
    names = [re.match(r"""["']?(\w+)["']?\s*:""", line) for line in lines]
    return {match[1]: f"{path}, line {number}" for number, match in enumerate(names, 1) if match}


def read_and_set_env(argv: Sequence[str]) -> Recipe:
    """Return `read` for a command, and set the recipe's environment variables in this process.

    Call it before the packages that read the variables are imported. Checks call `read`.
    """
    recipe = read(argv)
    with reading("env of the recipe"):  # Python refuses some names
        os.environ.update(recipe.env)
    return recipe


def _same(name: str, one: Any, other: Any) -> bool:
    """Return True if two values of a field are one setting: the command line has texts."""
    with suppress(UserError):
        return bool(check(name, one) == check(name, other))
    return False


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _drop_weights(fields: dict[str, Any], winner: Mapping[str, Any], by: str) -> list[str]:
    """Drop the reward_weights next to rewards that ``winner`` replaces. Return a line if there were any.

    >>> fields = {"rewards": ["accuracy", "overlong"], "reward_weights": [1.0, 0.5]}
    >>> _drop_weights(fields, {"rewards": "accuracy"}, "the command line")
    ['reward_weights [1.0, 0.5] is dropped with its rewards, by the command line']
    >>> fields
    {'rewards': ['accuracy', 'overlong']}
    """
    if "rewards" not in winner or "reward_weights" not in fields:
        return []
    if _same("rewards", fields.get("rewards", defaults()["rewards"]), winner["rewards"]):
        return []
    return [f"reward_weights {fields.pop('reward_weights')} is dropped with its rewards, by {by}"]


def method_fields(name: Any) -> dict[str, Any]:
    """Return the fields of a method of methods.yaml, which the command line may change; {} for None.

    >>> method_fields("lite_ppo")
    {'scale_rewards': 'batch', 'loss_type': 'dapo'}
    """
    if name is None:
        return {}
    require_choice("method", name, tuple(METHODS))
    return dict(METHODS[name]["fields"])


def _typed(words: Sequence[str]) -> tuple[dict[str, Any], list[UserError]]:
    """Return the settings of the command line, and an error for each word that is not a setting.

    >>> _typed(["--a", "1", "2", "--b=3"])
    ({'a': ['1', '2'], 'b': '3'}, [])
    """
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or not options:
            name, equals, value = word.partition("=")
            options.append((name, [value] if equals else []))
        else:
            options[-1][1].append(word)
    typed: dict[str, Any] = {}
    problems = []
    for word, values in options:
        name = word.removeprefix("--").replace("-", "_")
        kinds = fields()[name].kinds if name in fields() else frozenset()
        if not word.startswith("--"):
            problems.append(UserError(f"{word} is not a setting: write --FIELD VALUE"))
        elif not values and kinds and "bool" not in kinds:
            problems.append(UserError(f"{word} needs a value: write {word} VALUE"))
        elif len(values) > 1 and kinds and "list" not in kinds:
            shown = "several" if is_secret(name) else " ".join(values)
            problems.append(UserError(f"{word} takes one value, not {shown}: write {word} VALUE"))
        else:
            # A field without a value is a switch: --use_peft.
            typed[name] = values if "list" in kinds or len(values) > 1 else values[0] if values else True
    return typed, problems


def is_switch(name: str, following: Sequence[str]) -> bool:
    """Return True for a field that is true or false if the following word of the command line is neither.

    >>> is_switch("use_peft", ["true"]), is_switch("use_peft", ["mine.yaml"]), is_switch("seed", ["3"])
    (False, True, False)
    """
    is_bool = name in fields() and fields()[name].kinds <= {"bool", "None"}
    return is_bool and not TRUTH.keys() & {word.lower() for word in following}


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Return the fields of a recipe. Raises a `UserError` of one line for a file that is not a recipe."""
    # JSON is YAML.
    if uncompressed(path).endswith(TABLES) and not uncompressed(path).endswith(".json"):
        raise UserError(f"{path} is data, not a recipe: give --dataset {path}, and the recipe as --config")
    recipe = read_yaml(recipe_file(path))
    if not isinstance(recipe, dict):
        raise UserError(f"{path} contains no fields: a recipe is a YAML file with a field on each line")
    env = recipe.get("env", {})
    if not isinstance(env, dict):
        raise UserError(f"{path}: env is not a mapping: write NAME: VALUE under it")
    for name, value in env.items():
        # YAML reads a name or a value such as no as false.
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise UserError(f"{path}: env, {name}: the name or the value is not a text: put it in quotes")
        env[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return {str(name): value for name, value in recipe.items()}


def check(name: str, value: Any) -> Any:
    """Return the value with the type of its field. Raises `UserError` for an invalid name, type, choice or number.

    >>> check("num_generations", "8"), check("rewards", "accuracy"), check("use_peft", "yes")
    (8, ['accuracy'], True)
    >>> check("output_dir", "~/runs").startswith("~"), check("output_dir", "runs/~")
    (False, 'runs/~')
    >>> check("save_strategy", False)
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: save_strategy=False is not a text: put it in quotes, because YAML reads no as false
    """
    field = fields().get(name)
    for word in (name, *(map(str, value) if name == "rewards" and isinstance(value, list) else ())):
        refuse_not_here(name, value if word == name else word, word)
    if field is None:
        near = hint(name, (*fields(), *OPTIONS)) or "grpo-math train --help-all lists them"
        remedy = "give it to grpo-math train on the command line" if name in OPTIONS else near
        raise UserError(f"--{name} is not a setting: {remedy}")
    if name in ("columns", "eval_columns"):
        value = columns_as_text(value)
    if name in ("dataset", "eval_dataset"):
        value = dataset_as_text(value)
    written, value = value, coerced(field, value)
    for one in value if isinstance(value, list) else [value]:
        field.refuse(one, written)
    if name in ("output_dir", "resume_from_checkpoint") and isinstance(value, str):
        # transformers expands ~ too, but only after the checks that look into the folder.
        return os.path.expanduser(value)
    if name == "system_prompt" and isinstance(value, str):
        path = home(value)
        # A name that ends in .txt or .md is a file, even if it is misspelt.
        if os.path.isfile(path) or re.fullmatch(r"\S+\.(txt|md)", value):
            with reading(path):
                return path.read_text(encoding="utf-8-sig").strip()
    return value


# Conversion of a value to the type of its field


def _mapping(value: Any) -> dict[str, Any]:
    mapping = from_json(value) if isinstance(value, str) else value
    if not isinstance(mapping, dict):
        raise ValueError
    return mapping


def _integer(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def _text(value: Any) -> str:
    # YAML reads a folder named 7 as a number.
    if not isinstance(value, str | int):
        raise ValueError
    return str(value)


# The kind of a field -> the name for a value of this kind, and the function that converts a value. A field of several
# kinds takes the first kind that fits, so a text stays a text unless it is a mapping or a number.
COERCIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dict": ("a mapping", _mapping),
    "int": ("a whole number", _integer),
    "float": ("a number", float),
    "str": ("a text", _text),
    "bool": ("true or false", lambda value: TRUTH[str(value).lower()]),
}


def coerced(field: Field, value: Any) -> Any:
    """Convert a value of the recipe to its field's kind: YAML reads ``5e-6`` as a text, and a number may be in quotes.

    >>> coerced(fields()["learning_rate"], "5e-6"), coerced(fields()["rewards"], "accuracy, shaped")
    (5e-06, ['accuracy', 'shaped'])
    """
    if value is None:
        return _empty(field)
    if "list" in field.kinds and "dict" not in {*field.kinds, field.item}:
        _refuse_mapping(field.name, value)
    if "list" in field.kinds and (isinstance(value, list) or "str" not in field.kinds):
        item = field._replace(kinds=frozenset({field.item or "str"}), default=[])
        return [coerced(item, one) for one in _items(field, value)]
    accepted = [kind for kind in COERCIONS if kind in field.kinds] or ["str"]
    for kind in accepted:
        # A bool is an int in Python, and YAML reads no as false.
        if isinstance(value, bool) and kind != "bool":
            continue
        with suppress(ValueError, TypeError, KeyError, OverflowError):
            return COERCIONS[kind][1](value)
    raise _wrong_kind(field, value, [COERCIONS[kind][0] for kind in accepted])


def _empty(field: Field) -> None:
    """Return None. Raise `ConfigError` if the field needs a value."""
    if ("None" not in field.kinds or field.name in NEEDED) and field.default is not None:
        raise ConfigError(field.name, None, "is empty", f"give a value, or leave it out for {field.default!r}")


def _refuse_mapping(name: str, value: Any) -> None:
    """Raise `ConfigError` for a mapping in place of a list of texts, with the list to write.

    >>> _refuse_mapping("rewards", {"gsm8k": 1})
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: rewards={'gsm8k': 1} is not a list: write rewards: [gsm8k] and reward_weights: [1]
    """
    items = value if isinstance(value, list) else [value]
    if any(isinstance(one, dict) for one in items):
        pairs = [pair for one in items for pair in (one.items() if isinstance(one, dict) else [(one, 1)])]
        remedy = f"write {name}: [{', '.join(str(key) for key, _ in pairs)}]"
        if name == "rewards":
            remedy += f" and reward_weights: [{', '.join(str(weight) for _, weight in pairs)}]"
        raise ConfigError(name, value, "is not a list", remedy)


def _items(field: Field, value: Any) -> list[Any]:
    """Return the items of a list, which the command line has as texts.

    >>> _items(fields()["heldout"], ["{data: gsm8k}", "{data: math500}"])
    [{'data': 'gsm8k'}, {'data': 'math500'}]
    """
    # On the command line, [] is a text.
    items = [one for one in (value if isinstance(value, list) else [value]) if one != "[]"]
    if not all(isinstance(one, str) for one in items):
        return items
    if field.item == "dict":
        text = ", ".join(items)
        with suppress(ValueError):
            return from_yaml(text if text.startswith("[") else f"[{text}]")
    return [name.strip() for one in items for name in one.split(",")] if field.name == "rewards" else items


def _wrong_kind(field: Field, value: Any, words: list[str]) -> ConfigError:
    """Return the error for a value of no accepted kind. ``words``: the names of the kinds."""
    remedy = f"give {words[0]}"
    if "dict" in field.kinds:
        remedy = 'write it as {"name": 1}'
    elif isinstance(value, bool) and "str" in field.kinds:
        remedy = f"put it in quotes, because YAML reads {'yes' if value else 'no'} as {str(value).lower()}"
    # The names in a mapping are unknown if the mapping cannot be read.
    secret = "dict" in field.kinds and any(ending in str(value).lower() for ending in ENDINGS)
    return ConfigError(field.name, HIDDEN if secret else value, f"is not {' or '.join(words)}", remedy)
