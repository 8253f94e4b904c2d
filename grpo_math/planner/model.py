"""A model's shapes and its measured memory, from its config.json.

The measurements of common models are shipped (measured.json). Any other model is measured once, by measure.py in a
separate process, and the answer is kept in the cache folder.

Reads no weights, and imports neither torch nor transformers.
"""

import atexit
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from select import select
from typing import Any

from grpo_math.errors import UserError
from grpo_math.generation.embedded import cache_dir
from grpo_math.generation.models import config_file, refuse_expert_dropout
from grpo_math.planner.settings import Json, LaunchSettings, NotPlanned
from grpo_math.run.bar import Bar
from grpo_math.run.files import remembered
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.reading import read_json

FORMAT = 8  # version of measure.py's answers
BAR, INTERVAL = "{desc} {bar:20} {elapsed}", 0.5  # of the bar, and the seconds between its moves
# Fields of a config.json that do not change a shape.
IGNORED_KEYS = (*("torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache"), "quantization_config")


@dataclass(frozen=True)
class Shape:
    """The shapes of a model, from `measure.shape`.

    >>> shape = model_shape("qwen2", read_config("Qwen/Qwen2.5-1.5B"))
    >>> shape.total, shape.tied, shape.cache, shape.paths[:2]
    (1543714304, True, [0, 14336], ['model.layers.0.self_attn.q_proj', 'model.layers.0.self_attn.k_proj'])
    """

    measured: Callable[[Json], Json]  # the memory of the model under settings
    layers: int
    hidden: int
    heads: int
    vocab: int
    tied: bool
    max_tokens: int | None
    total: int
    active: int  # parameters that one token goes through
    matrices: int  # parameters of linear maps without the LM head, and of the largest of them
    largest: int
    paths: list[str]  # names of these maps, with 0 in place of each number
    cache: tuple[int, int]  # elements in the KV cache of a sequence: constant, and per token without sliding windows
    linear: bool  # memory is linear in the tokens: no layer has a state or attention that no torch kernel computes
    tiled: bool  # trainer/tiled_mlp.py supports its layers
    packed: int | None = None  # the length from which its rows are not packed, if there is one


def model_shape(source: str, config: LaunchSettings, measures: bool = True) -> Shape:
    """Return the shapes of a model. ``measures``: measure now what has not been measured.

    Raises `ConfigError` if transformers cannot build a model from the config.json, and, without ``measures``, if the
    model has not been measured.

    >>> model_shape("mine", {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})
    Traceback (most recent call last):
    grpo_math.planner.settings.NotPlanned: model_name_or_path='mine' is stored quantised by 'gptq', whose sizes the \
plan does not know: name the unquantised model
    >>> model_shape("mine", {"model_type": "llama", "hidden_size": 8}, measures=False)
    Traceback (most recent call last):
    grpo_math.planner.settings.NotPlanned: model_name_or_path='mine' has not been measured: grpo-math plan measures it \
once
    """
    method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
    # mxfp4 is trained in 16 bit.
    if method != "mxfp4":
        reason = f"is stored quantised by {method!r}, whose sizes the plan does not know"
        raise NotPlanned("model_name_or_path", source, reason, "name the unquantised model")
    measure = partial(measured, source, shape_fields(config), measure=measure_now if measures else None)
    return Shape(measured=measure, **measure(None))


def shape_fields(config: LaunchSettings) -> Json:
    """Return the fields that determine the shapes. For a shipped model these are the shipped fields.

    >>> shipped = stored("shapes.json")["Qwen/Qwen2.5-0.5B"]
    >>> shape_fields({**shipped, "head_dim": 64}) == shipped
    True
    >>> shape_fields({"model_type": "mine", "hidden_size": 8, "head_dim": None, "eos_token_id": 2})
    {'model_type': 'mine', 'hidden_size': 8}
    """
    # The shipped fields do not include these biases, which add tensors.
    if not (config.get("attention_bias") or config.get("mlp_bias")):
        for fields in stored("shapes.json").values():
            if fields.items() <= config.items():
                return fields
    return {k: v for k, v in config.items() if not (k in IGNORED_KEYS or k.endswith("_token_id") or v is None)}


def wanted_modules(settings: RunSettings) -> Any:
    """Return ``lora_target_modules`` as peft receives it.

    TRL turns a list with one name into a string. peft matches a string as a regular expression against the whole name
    of a module.
    """
    modules = settings.lora_target_modules
    return modules[0] if isinstance(modules, list) and len(modules) == 1 else modules


# Measurements: shipped, cached, or made now


def measured(source: str, config: Json, how: Json | None, measure: Callable[..., Json] | None) -> Json:
    """Return the answer of measure.py: the memory of a model set up as in ``how``, or its shapes if ``how`` is None.

    ``measure`` answers if the measurement is neither shipped nor in the cache; None: such a model is refused.
    """
    key = measurement_key(config, how)
    path = cache_dir() / "measured" / f"{FORMAT}-{key}.json"
    if key in stored("measured.json"):
        return stored("measured.json")[key]

    def measurement() -> Json:
        if measure is None:
            raise NotPlanned("model_name_or_path", source, "has not been measured", "grpo-math plan measures it once")
        answer = measure(source, config, how)
        if "error" in answer:
            refuse_expert_dropout(answer["error"], source)
            reason = f"cannot be measured ({answer['error']})"
            raise NotPlanned("model_name_or_path", source, reason, "train it without a plan")
        return answer

    return dict(remembered(path, measurement))


def measurement_key(config: Json, how: Json | None) -> str:
    request = json.dumps([config, how], sort_keys=True)
    return hashlib.sha256(request.encode()).hexdigest()[:16]


@cache
def stored(name: str) -> dict[str, Json]:
    """Return a shipped file: the answers of measure.py by key, or the fields of common base models by Hub id."""
    return dict(json.loads(Path(__file__).with_name(name).read_bytes()))


@cache
def _worker() -> Any:
    """Return the measuring process. Importing torch takes longest, so one process answers all requests."""
    print("plan     measuring the model once: 10 to 30 s", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "grpo_math.planner.measure"]
    pipes: Json = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    worker = subprocess.Popen(command, text=True, bufsize=1, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, **pipes)
    atexit.register(worker.kill)  # unloading torch would outlast the command
    return worker


def measure_now(source: str, config: Json, how: Json | None) -> Json:
    """Return the answer of the measuring process."""
    worker = _worker()
    try:
        worker.stdin.write(json.dumps([config, how]) + "\n")
        # A bar is shown only in a terminal, and until the answer is printed.
        with Bar(desc="plan     measuring", total=30, bar_format=BAR, leave=False, disable=None) as bar:
            while not select([worker.stdout], [], [], INTERVAL)[0]:
                bar.update(INTERVAL)
        # The line of a worker that has ended is empty, which json refuses with a ValueError.
        return dict(json.loads(worker.stdout.readline()))
    except (OSError, ValueError):
        raise UserError(f"{source} could not be measured: python -m grpo_math.planner.measure says why") from None


def read_config(name: str | None, revision: str = "main", offline: bool = False) -> Json:
    """Return the config.json of a shipped model, of a local folder or of the Hub. Raises `UserError`."""
    if fields := shipped_config(name):
        return fields
    return dict(read_json(config_file(name, revision, offline)))


def shipped_config(name: str | None) -> Json | None:
    """Return the config.json of a shipped model, or None."""
    # A model and its post-trained form have the same shape.
    base = re.sub("-(Instruct|it|pt|Base)$", "", name or "")
    return None if Path(base).is_dir() else stored("shapes.json").get(base)
