"""Every field of a recipe, read from the source code of the classes, because importing these classes takes seconds.

Each name, default and choice is written once, in a class of `SOURCES`.

Does not read a recipe: recipe.py does.
"""

import ast
import functools
import importlib.util
import math
import operator
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, one_of
from grpo_math.run.user_functions import is_user_function

# package, file, class; a later class overrides the fields of an earlier class
SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("grpo_math", "trainer/config.py", "MathGRPOConfig"),
    ("grpo_math", "settings/arguments.py", "TrainArguments"),
)
# Defaults that differ from TRL's: log a line of the history at each step, and write completions to a file, not to the
# terminal.
OURS: dict[str, Any] = {"logging_steps": 1, "log_completions": True, "num_completions_to_print": 0}
# Files of transformers that define the enums.
CHOICES = (("transformers", "training_args.py"), ("transformers", "trainer_utils.py"))
# Defaults that the source computes. A test compares them.
COMPUTED: dict[str, Any] = {"optim": "adamw_torch_fused", "output_dir": None}

# Range and choices of the fields of TRL and transformers. Our own fields state them in `setting(default, help, ge=0)`.
# Bounds are gt, ge, lt and le; ``also`` lists valid values outside the range, and ``why`` ends the remedy.
LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "detail", "passive")
CHOOSES = "with 1 a group's completions are alike"
RANGES: list[tuple[dict[str, float], str]] = [
    (
        {"gt": 0},
        "temperature repetition_penalty adam_epsilon num_train_epochs vllm_server_timeout delta neftune_noise_alpha "
        "epsilon epsilon_high sapo_temperature_pos sapo_temperature_neg vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_cap save_steps logging_steps eval_steps",
    ),
    (
        {"ge": 1},
        "max_completion_length lora_r lora_alpha num_iterations save_total_limit vllm_tensor_parallel_size "
        "vllm_max_model_length ref_model_sync_steps per_device_train_batch_size gradient_accumulation_steps "
        "ddp_timeout steps_per_generation generation_batch_size pad_to_multiple_of torch_empty_cache_steps "
        "dataloader_prefetch_factor ddp_bucket_cap_mb",
    ),
    (
        {"ge": 0},
        "beta weight_decay max_grad_norm warmup_steps router_aux_loss_coef entropy_coef entropy_coef_min "
        "entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold num_completions_to_print "
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg vllm_importance_sampling_clip_min eval_delay",
    ),
    ({"gt": 0, "le": 1}, "learning_rate top_p vllm_gpu_memory_utilization"),
    ({"ge": 0, "le": 1}, "top_entropy_quantile ref_model_mixup_alpha"),
    ({"ge": 0, "lt": 1}, "lora_dropout adam_beta1 adam_beta2"),
    ({"ge": 0, "lt": 2**32}, "seed data_seed"),
    ({"ge": 1, "le": 65535}, "vllm_server_port vllm_group_port"),
    ({"ge": 0, "le": 1024}, "dataloader_num_workers"),
]
THEIRS: dict[str, dict[str, Any]] = {
    **{name: limits for limits, names in RANGES for name in names.split()},
    "num_generations": {"ge": 2, "why": ", since a completion is compared with the others of its group"},
    "max_steps": {"ge": 1, "also": (-1,), "why": ", or -1 for num_train_epochs to decide"},
    "top_k": {"ge": 2, "also": (0,), "why": f", or 0 for all tokens: {CHOOSES}"},
    "min_p": {"ge": 0, "lt": 1, "why": f": {CHOOSES}"},
    "scale_rewards": {"choices": ("group", "batch", "none")},
    "loss_type": {"choices": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")},
    "importance_sampling_level": {"choices": ("token", "sequence")},
    "multi_objective_aggregation": {"choices": ("sum_then_normalize", "normalize_then_sum")},
    "vllm_mode": {"choices": ("colocate", "server")},
    "vllm_model_impl": {"choices": ("vllm", "transformers", "auto")},
    "vllm_importance_sampling_mode": {
        "choices": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "log_level": {"choices": LOG_LEVELS},
    "log_level_replica": {"choices": LOG_LEVELS},
    "bnb_4bit_quant_storage": {"choices": ("uint8", "float16", "bfloat16", "float32")},
    "lora_task_type": {"choices": ("CAUSAL_LM",)},
    "torch_compile_backend": {  # of accelerate's DynamoBackend
        "choices": (
            *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi"),
            *("fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"),
            *("hpu_backend", "neuron"),
        )
    },
    "torch_compile_mode": {"choices": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")},
}
WORDS = {"gt": "above {}", "ge": "of {} or more", "lt": "below {}", "le": "up to {}"}
OWN_FUNCTION = "module:function"  # the choice that accepts any user function
OR_BOOL = ("scale_rewards", "resume_from_checkpoint")  # texts that may also be true or false


class Field(NamedTuple):
    """A field of a recipe. ``kinds``: the names in the annotation, such as {"int", "None"}; ``item``: the kind of a
    list's items; ``limits``: as in `THEIRS`."""

    name: str
    kinds: frozenset[str]
    item: str | None
    default: Any
    choices: tuple[str, ...]
    limits: dict[str, Any]

    def refuse(self, value: Any, written: Any) -> None:
        """Raise `ConfigError` for a value out of range, or not among the choices. ``written``: the value in the recipe.

        >>> fields()["temperature"].refuse(0.0, "0")
        Traceback (most recent call last):
        ...
        grpo_math.errors.ConfigError: temperature='0' is out of range: give a number above 0
        """
        if isinstance(value, str):
            if self.choices and not (OWN_FUNCTION in self.choices and is_user_function(value)):
                one_of(self.name, value, self.choices)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(self.name, written, "is not finite", "give a finite number")
            bounds = {name: bound for name, bound in self.limits.items() if name in WORDS}
            inside = all(getattr(operator, name)(value, bound) for name, bound in bounds.items())
            if not inside and value not in self.limits.get("also", ()):
                words = " and ".join(WORDS[name].format(bound) for name, bound in bounds.items())
                remedy = f"give a number {words}{self.limits.get('why', '')}"
                raise ConfigError(self.name, written, "is out of range", remedy)


@functools.cache
def fields() -> dict[str, Field]:
    """Return every field of a recipe, by name."""
    enums = {
        name: {ast.unparse(x.targets[0]): ast.literal_eval(x.value) for x in node.body if isinstance(x, ast.Assign)}
        for package, file in CHOICES
        for name, node in _classes(package, file).items()
        if "ExplicitEnum" in {ast.unparse(base) for base in node.bases}
    }
    by_name: dict[str, Field] = {}
    for package, file, name in SOURCES:
        body = _classes(package, file)[name].body
        lines = [line for line in body if isinstance(line, ast.AnnAssign) and line.value is not None]
        by_name |= {ast.unparse(line.target): _field(line, enums) for line in lines}
    return by_name | {name: by_name[name]._replace(default=default) for name, default in (OURS | COMPUTED).items()}


@functools.cache
def defaults() -> dict[str, Any]:
    """Return the default of every field, by name."""
    return {name: field.default for name, field in fields().items()}


@functools.cache
def _classes(package: str, file: str) -> dict[str, ast.ClassDef]:
    """Return the syntax trees of the classes of a file, by name."""
    # For a top-level package, find_spec does not import the package.
    spec: Any = importlib.util.find_spec(package)
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _field(line: ast.AnnAssign, enums: dict[str, dict[str, str]]) -> Field:
    name, value = ast.unparse(line.target), line.value
    kinds, item = set[str](), None
    for part in ast.unparse(line.annotation).split(" | "):
        base, _, inside = part.partition("[")
        # The only Literal in these classes is Literal[False].
        kinds.add("bool" if base == "Literal" else base)
        item = inside.removesuffix("]") if base == "list" else item
    kinds |= {"bool"} if name in OR_BOOL else set()
    # A text would be a path, or an invalid mapping.
    kinds -= {"str"} if name.endswith("_kwargs") else set()
    choices = next((tuple(enums[kind].values()) for kind in kinds if kind in enums), ())
    stated: dict[str | None, Any] = {"default": value}
    # TRL and transformers write field(default=...), and this package setting(default, help, ge=0).
    if isinstance(value, ast.Call):
        stated = {word.arg: word.value for word in value.keywords}
        stated |= {"default": value.args[0]} if value.args else {}
    if isinstance(metadata := stated.get("metadata"), ast.Dict):
        stated |= {ast.literal_eval(k): v for k, v in zip(metadata.keys, metadata.values, strict=True) if k}
    # transformers computes some of its choices.
    literal = (ast.Constant, ast.List, ast.Tuple)
    limits = {key: ast.literal_eval(stated[key]) for key in (*WORDS, "choices") if isinstance(stated.get(key), literal)}
    limits |= THEIRS.get(name, {})
    # A field without a default has default_factory=list.
    default = ast.literal_eval(stated["default"]) if "default" in stated and name not in COMPUTED else []
    return Field(name, frozenset(kinds), item, default, tuple(limits.pop("choices", choices)), limits)
