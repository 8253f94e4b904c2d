"""A recipe and a command line -> every setting, without torch: its name, kind, choices and range are checked here.

>>> settings = read(["--learning_rate", "1e-5", "--use_peft"])
>>> settings.values["learning_rate"], settings.values["use_peft"], settings.values["beta"], settings.problems
(1e-05, True, 0.0, [])
>>> print(read(["--temprature", "1"]).problems[0])
--temprature is not a setting: did you mean --temperature?
>>> print(read(["--temperature", "0"]).problems[0])
temperature='0' is out of range: give a number above 0

Does not check what two settings mean together: batch.py, conflicts.py and trainer/config.py do.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math import reading
from grpo_math.errors import ConfigError, UserError, one_of
from grpo_math.run.redact import ENDINGS, is_secret
from grpo_math.settings.fields import OR_BOOL, Field, fields
from grpo_math.settings.shipped import find
from grpo_math.trainer.ranges import refuse_out_of_range

NEEDED = ("max_completion_length",)  # TRL takes null, and transformers then samples 20 tokens
PATHS = ("output_dir", "model_name_or_path", "dataset", "eval_dataset", "resume_from_checkpoint", "difficulty_file")
NOT_UTF8 = re.compile("[\0\ud800-\udfff]")
YES, NO = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
# What ``env`` may set. Not where programs, libraries, models and keys come from: a recipe may be somebody else's.
MAY_SET = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_SOCKET_IFNAME", "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_OFFLINE"),
    *("WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_TAGS", "WANDB_NOTES"),
    *("GRPO_MATH_GRADE_MEMORY", "GRPO_MATH_JUDGE_MODEL"),
)
EXCLUDE = (("load_in_4bit", "load_in_8bit"), ("fp16", "bf16"))  # refused by the classes too, but without their names


# What other programs call a setting: near in meaning, and not in letters.
MEANT = {
    **dict.fromkeys(("model", "model_name", "model_path", "base_model", "model_id"), "model_name_or_path"),
    **dict.fromkeys(("data", "dataset_name", "train_data", "train_file", "dataset_path"), "dataset"),
    **dict.fromkeys(("lr", "step_size"), "learning_rate"),
    **dict.fromkeys(("lora_rank", "rank", "r"), "lora_r"),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "num_train_epochs"),
    **dict.fromkeys(("steps", "num_steps", "total_steps", "train_steps", "iterations"), "max_steps"),
    **dict.fromkeys(("batch_size", "train_batch_size", "batch", "prompts"), "prompts_per_step"),
    **dict.fromkeys(("micro_batch_size", "per_device_batch_size", "mini_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("grad_accum", "accumulation_steps", "grad_acc_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("group_size", "generations", "rollout_n", "num_samples", "num_rollouts"), "num_generations"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_response_length", "max_length"), "max_completion_length"),
    **dict.fromkeys(("kl_coef", "kl_weight", "kl_beta", "kl_penalty"), "beta"),
    **dict.fromkeys(("clip", "clip_ratio", "clip_range", "cliprange", "clip_eps", "eps_clip"), "epsilon"),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high"), "epsilon_high"),
    **dict.fromkeys(("reward", "reward_fn", "reward_funcs", "reward_function"), "rewards"),
    **dict.fromkeys(("output", "out", "out_dir", "run_dir", "save_dir"), "output_dir"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim"),
    **dict.fromkeys(("lora", "peft"), "use_peft"),
    **dict.fromkeys(("vllm",), "use_vllm"),
    **dict.fromkeys(("qlora", "use_4bit", "quantize"), "load_in_4bit"),
    **dict.fromkeys(("prompt_template", "system_prompt"), "template"),
    **dict.fromkeys(("loss",), "loss_type"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_gradient_norm"), "max_grad_norm"),
}


def hint(name: str, known: Collection[str]) -> str:
    """``did you mean --lora_r?``: the known name that is nearest in meaning, or else in letters; empty without one.

    >>> hint("lr", ["learning_rate"]), hint("model_name_or_path", ["model"]), hint("quux", ["seed"])
    ('did you mean --learning_rate?', 'did you mean --model?', '')
    """
    meant = MEANT.get(name, name)
    near = [one for one in known if meant in (one, MEANT.get(one))] or difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean --{near[0]}?" if near else ""


class Recipe(NamedTuple):
    """``values`` has every field; ``given`` names those of the recipe and the command line; one problem a bad one."""

    values: dict[str, Any]
    given: set[str]
    problems: list[UserError]
    env: dict[str, str]  # of the recipe: environment variables
    argv: list[str]

    def sound(self) -> Recipe:
        """Itself; raises the first of its problems."""
        if self.problems:
            raise self.problems[0]
        return self

    def stated(self) -> dict[str, Any]:
        return {name: self.values[name] for name in self.given}


def read(argv: Sequence[str]) -> Recipe:
    """The settings of ``--config RECIPE --FIELD VALUE ...``. Raises `UserError` for a file that is no recipe; whatever
    is wrong with a single setting is a problem of the result, and the setting stays at its default."""
    path, words = split(argv)
    written = read_recipe(path) if path is not None else {}
    given: dict[str, Any] = {name: value for name, value in written.items() if name != "env"}
    problems: list[UserError] = []
    for word, said in _options(words):
        if not word.startswith("--"):
            problems.append(UserError(f"{word} is not a setting: write --FIELD VALUE"))
            continue
        name = word.removeprefix("--").replace("-", "_")
        if name not in fields() and name.startswith("no_") and "bool" in _kinds(name[3:]):
            name, said = name[3:], ["false"]
        kinds = _kinds(name)
        if not said and kinds and "bool" not in kinds:
            problems.append(UserError(f"{word} needs a value: write {word} VALUE"))
        elif not said:
            given[name] = True
        elif len(said) > 1 and kinds and "list" not in kinds:
            shown = "several" if is_secret(name) else " ".join(said)
            problems.append(UserError(f"{word} takes one value, not {shown}: write {word} VALUE"))
        else:
            given[name] = said if "list" in kinds else said[0]
    checked = {}
    for name, value in given.items():
        try:
            checked[name] = check(name, value)
        except UserError as problem:
            problems.append(problem)
    values = {name: field.default for name, field in fields().items()} | checked
    for one, other in EXCLUDE:
        if values[one] and values[other]:
            problems.append(ConfigError(one, True, f"and {other}=True exclude each other", "leave one of them out"))
    env = {str(name): str(value) for name, value in written.get("env", {}).items()}
    return Recipe(values, set(checked), problems, env, list(argv))


def split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The path after ``--config``, and the other words.

    >>> split(["--config", "a.yaml", "--seed", "1"]), split(["--config=a.yaml"])
    (('a.yaml', ['--seed', '1']), ('a.yaml', []))
    """
    words, path = list(argv), None
    for number, word in enumerate(words):
        if word == "--config" or word.startswith("--config="):
            inside = "=" in word
            path = word.partition("=")[2] if inside else next(iter(words[number + 1 :]), "")
            if not path or path.startswith("--"):
                raise UserError("--config needs a value: give the path of a recipe")
            del words[number : number + (1 if inside else 2)]
            break
    if any(word.split("=")[0] == "--config" for word in words):
        raise UserError("--config is given twice: give one recipe")
    return path, words


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The YAML of a recipe. Raises a `UserError` of one line for what is no file, no YAML, or no mapping."""

    def refused(said: str) -> UserError:
        return UserError(f"--config {path}: {said}")

    try:
        recipe = reading.read_yaml(find(path), strict=True)
    except reading.Unreadable as error:
        raise refused(f"{error}: give a recipe, a YAML file with a field on each line") from None
    if not isinstance(recipe, dict):
        raise refused("holds no fields: a recipe is a YAML file with a field on each line")
    if not isinstance(recipe.get("env", {}), dict):
        raise refused("env is not a mapping: write NAME: VALUE under it")
    for name, value in recipe.get("env", {}).items():
        text = f"{name}{value}"
        if not name or "=" in str(name) or NOT_UTF8.search(text) or isinstance(value, list | dict | None):
            raise refused(f"env: {name} is not a variable with a value: write NAME: VALUE")
        if str(name) not in MAY_SET:
            remedy = "set it in the shell that starts the run"
            raise refused(f"env: {str(name)[:200]!r} is not a variable that a recipe may set: {remedy}")
    return {str(name): value for name, value in recipe.items()}


def check(name: str, value: Any) -> Any:
    """The value as training has it. Raises `UserError` for a name, kind, choice or number that cannot be.

    >>> check("num_generations", "8"), check("rewards", "accuracy"), check("use_peft", "yes")
    (8, ['accuracy'], True)
    >>> check("save_strategy", False)
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: save_strategy=False is not a string: put it in quotes, since YAML reads no as false
    """
    field = fields().get(name)
    if field is None:
        raise UserError(f"--{name} is not a setting: {hint(name, fields()) or 'grpo-math train --help-all lists them'}")
    if name.endswith("_token") and not isinstance(value, str | None):
        raise ConfigError(name, "***", "is not a string", "put it in quotes")
    if name == "vllm_server_base_url" and "@" in str(value):
        reason = "holds a user or password, which the run would write down"
        raise ConfigError(name, "***", reason, "give the address alone; a key goes into VLLM_API_KEY")
    said, value = value, _typed(field, value)
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            _check_text(name, one)
        elif isinstance(one, int | float) and not isinstance(one, bool):
            refuse_out_of_range(name, one, said, field.default)
    if field.choices and isinstance(value, str):
        one_of(name, value, field.choices)
    if name in ("output_dir", "resume_from_checkpoint") and isinstance(value, str) and value.startswith("~"):
        value = os.path.expanduser(value)  # as transformers does, later
    return value


def _check_text(name: str, text: str) -> None:
    if found := NOT_UTF8.search(text):
        reason = "holds a NUL byte" if found[0] == "\0" else "is not UTF-8, or holds half of a surrogate pair"
        raise ConfigError(name, text, reason, "take it out")
    if name in PATHS:
        if text.startswith("~") and os.path.expanduser(text) == text:
            raise ConfigError(name, text, "is in the folder of a user that there is not", "write the whole path")
        if _is_loop(text):
            raise ConfigError(name, text, "goes through a link that leads to itself", "name another one")
        longest = max(len(part.encode()) for part in text.split("/"))
        if long := "a file's name" if longest > 255 else "a path" if len(text.encode()) > 3000 else "":
            raise ConfigError(name, f"{text[:40]}...", f"is longer than {long} can be", "name another one")
        if text and (not text.strip() or not text.isprintable()):
            raise ConfigError(name, text, "is blank, or holds a line break", "name another one")


def _is_loop(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _typed(field: Field, value: Any) -> Any:
    name, kinds, usual = field.name, field.kinds, f"the default is {field.default!r}"

    def refused(reason: str, remedy: str = usual) -> ConfigError:
        return ConfigError(name, value, reason, remedy)

    if value is None:
        if ("None" not in kinds or name in NEEDED) and field.default is not None:
            raise refused("is empty", f"give a value, or leave it out for {field.default!r}")
        return None
    if "list" in kinds and not (isinstance(value, str) and "str" in kinds):
        item = Field(name, frozenset({field.item or "str"}), None, field.default, field.choices)
        return [_typed(item, one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) or (isinstance(value, dict) and "dict" not in kinds):
        raise refused(f"is a {'list' if isinstance(value, list) else 'mapping'}, and one value is wanted")
    if isinstance(value, dict):
        return value
    if name.endswith("_kwargs") or kinds <= {"dict", "None"}:
        return _mapping(name, str(value))
    numbers = kinds & {"int", "float"}
    if isinstance(value, bool):
        if "bool" not in kinds and numbers:
            raise refused("is not a number")
        if "bool" not in kinds and name not in OR_BOOL:
            word = "yes" if value else "no"
            raise refused("is not a string", f"put it in quotes, since YAML reads {word} as {str(value).lower()}")
        return value
    if "str" in kinds or not kinds & {"int", "float", "bool"}:
        if isinstance(value, float) and numbers == {"int"}:
            raise refused("is not a whole number")
        return value if isinstance(value, int | float) and numbers else str(value)
    if "bool" in kinds:
        if (word := str(value).lower()) not in (*YES, *NO):
            raise refused("is neither true nor false", "use one of the two")
        return word in YES
    try:
        if "float" not in kinds and isinstance(value, float):
            raise ValueError
        return float(value) if "float" in kinds else int(value)
    except ValueError:
        kind = "number" if "float" in kinds else "whole number"
        raise refused(f"is not a {kind}", usual if field.default is not None else f"give a {kind}") from None


def _mapping(name: str, text: str) -> dict[str, Any]:
    try:
        found = reading.from_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        shown = "***" if any(ending in text.lower() for ending in ENDINGS) else text
        raise ConfigError(name, shown, "is not a mapping", 'write it as JSON, such as {"name": 1}')
    return found


def _kinds(name: str) -> frozenset[str]:
    field = fields().get(name)
    return field.kinds if field else frozenset()


def _options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """``["--a", "1", "2", "--b=3"]`` -> ``[("--a", ["1", "2"]), ("--b", ["3"])]``; a first word may be no option."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") or not found:
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found
