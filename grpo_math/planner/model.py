"""A model's shapes and its measured memory, from its config.json.

The measurements of common models are shipped (measured.json). Any other model is measured once, by measure.py in a
separate process, and the answer is kept in the cache folder.

Does not read weights, and imports neither torch nor transformers.
"""

import atexit
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError, first_line
from grpo_math.generation.embedded import cache_dir
from grpo_math.planner.settings import NotPlanned
from grpo_math.reading import read_json

FORMAT = 5  # of the answers of measure.py
HERE = Path(__file__).parent
# Fields of a config.json that do not change a shape.
ASIDE = ("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache")
ASIDE_ENDING = "_token_id"
# The layers of a model with a language-model head: of most families, of GPT-2 and BLOOM, of GPT-NeoX, of OPT.
PREFIXES = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers")


class Linear(NamedTuple):
    """A linear map. ``layers`` is the number of layers that have it, ``path`` its name within a layer."""

    path: str
    n_in: int
    n_out: int
    layers: int

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def weights(self) -> int:
        return self.n_in * self.n_out


@dataclass(frozen=True)
class Shape:
    """The shapes of a model, from `measure.shape`. ``source`` is the model's name.

    >>> shape = shape_of("qwen2", read_config("Qwen/Qwen2.5-1.5B"))
    >>> shape.total, shape.tied, shape.kv_bytes_per_token(2), [linear.name for linear in shape.linears][:2]
    (1543714304, True, 28672, ['q_proj', 'k_proj'])
    """

    source: str
    config: dict[str, Any]
    family: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    tied: bool
    max_tokens: int | None
    total: int
    active: int  # parameters that one token goes through
    tensors: list[tuple[int, int]]  # (elements, how many of that size)
    linears: list[Linear]
    cache: tuple[int, int]  # elements in the KV cache of a sequence: constant, and per token
    linear: bool  # memory is linear in the tokens: no layer has a state or attention that no torch kernel computes
    tiled: bool  # trainer/tiled_mlp.py supports its layers
    measures: bool  # measure now if a measurement is neither shipped nor cached

    def measured(self, how: dict[str, Any]) -> dict[str, Any]:
        return measured(self.source, self.config, how, self.measures)

    def kv_bytes_per_token(self, element: int = 2) -> int:
        """Return the bytes of a token in the KV cache. An upper bound: sliding windows are ignored."""
        return self.cache[1] * element


def shape_of(source: str, config: Mapping[str, Any], measures: bool = True) -> Shape:
    """Return the shapes of a model.

    Raises `ConfigError` if transformers cannot build a model from the config.json, and, without ``measures``, if the
    model has not been measured.
    """
    method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
    # mxfp4 is trained in 16 bit.
    if method != "mxfp4":
        reason = f"is stored quantised by {method!r}, whose sizes the plan does not know"
        raise NotPlanned("model_name_or_path", source, reason, "name the unquantised model")
    if not config.get("model_type"):
        raise _refusal(source, "has no model_type in its config.json")
    fields = plain(config)
    answer = {**measured(source, fields, None, measures)}
    linears = [Linear(*linear) for linear in answer.pop("linears")]
    return Shape(source=source, config=fields, linears=linears, measures=measures, **answer)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that determine the shapes. For a shipped model these are the shipped fields."""
    # The shipped fields do not include these biases, which add tensors.
    if not (config.get("attention_bias") or config.get("mlp_bias")):
        for fields in shapes().values():
            if all(config.get(name) == value for name, value in fields.items()):
                return fields
    aside = {*ASIDE, "quantization_config"}
    return {k: v for k, v in config.items() if k not in aside and not k.endswith(ASIDE_ENDING) and v is not None}


def wanted_modules(settings: Mapping[str, Any]) -> Any:
    """Return ``lora_target_modules`` as peft receives it.

    TRL turns a list with one name into a string. peft matches a string as a regular expression against the whole name
    of a module.
    """
    modules = settings["lora_target_modules"]
    return modules[0] if isinstance(modules, list) and len(modules) == 1 else modules


def check_targets(shape: Shape, settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a name in ``lora_target_modules`` that matches no linear map of a layer."""
    modules = wanted_modules(settings)
    if modules is None or modules == "all-linear":
        return
    # peft matches the whole name of a module. Which of these prefixes the model has is not measured.
    paths = [f"{prefix}.0.{linear.path}" for prefix in PREFIXES for linear in shape.linears]
    for name in [modules] if isinstance(modules, str) else modules:
        if isinstance(modules, str):
            matches = any(re.fullmatch(name, path) for path in paths)
        else:
            matches = any(f".{path}".endswith(f".{name}") for path in paths)
        if not matches:
            remedy = f"use all-linear, or {', '.join(dict.fromkeys(linear.name for linear in shape.linears))}"
            raise ConfigError("lora_target_modules", name, "matches no linear map of a layer", remedy)


# Measurements: shipped, cached, or made now


def measured(source: str, config: dict[str, Any], how: dict[str, Any] | None, measures: bool = True) -> dict[str, Any]:
    """Return the answer of measure.py: the memory of a model set up as in ``how``, or its shapes if ``how`` is None."""
    key = key_of(config, how)
    if key in shipped():
        return dict(shipped()[key])
    path = cache_dir() / "measured" / f"{FORMAT}-{key}.json"
    try:
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if not measures:
            reason = "has not been measured"
            raise NotPlanned("model_name_or_path", source, reason, "grpo-math plan measures it once") from None
        answer = _ask(source, config, how)
        if "error" in answer:
            reason = f"cannot be measured ({answer['error']})"
            raise NotPlanned("model_name_or_path", source, reason, "train it without a plan") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answer), encoding="utf-8")
    return answer


def key_of(config: dict[str, Any], how: dict[str, Any] | None) -> str:
    return hashlib.sha256(json.dumps([config, how], sort_keys=True).encode()).hexdigest()[:16]


@cache
def shipped() -> dict[str, dict[str, Any]]:
    answers: dict[str, dict[str, Any]] = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))
    return answers


@cache
def _worker() -> Any:
    """Return the measuring process. Importing torch takes longest, so one process answers all requests."""
    print("plan     measuring the model once: 10 to 30 s", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "grpo_math.planner.measure"]
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True, env=environment)
    atexit.register(worker.kill)  # unloading torch would outlast the command
    return worker


def _ask(source: str, config: dict[str, Any], how: dict[str, Any] | None) -> dict[str, Any]:
    worker = _worker()
    try:
        worker.stdin.write(json.dumps({"config": config, "how": how}) + "\n")
        worker.stdin.flush()
        # The line of a worker that has ended is empty, which json refuses with a ValueError.
        answer: dict[str, Any] = json.loads(worker.stdout.readline())
    except (OSError, ValueError):
        raise UserError(f"{source} could not be measured: python -m grpo_math.planner.measure says why") from None
    return answer


# config.json


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Return the config.json fields of common base models, by Hub id."""
    models: dict[str, dict[str, Any]] = json.loads((HERE / "shapes.json").read_text(encoding="utf-8"))
    return models


def read_config(name: str | None, revision: str = "main", offline: bool = False) -> dict[str, Any]:
    """Return the config.json of a local folder, a shipped model or the Hub, in this order. Raises `UserError`."""
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", "give a folder, a Hub id, or 'embedded'")
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise _refusal(name, "has no config.json", "give the folder of a model")
    else:
        # A model and its post-trained form have the same shape.
        for same in (name, *(name.removesuffix(suffix) for suffix in ("-Instruct", "-it", "-Base"))):
            if same in shapes():
                return shapes()[same]
        path = _download(name, revision, offline)
    config: dict[str, Any] = read_json(path)
    return config


def _refusal(name: str, reason: str, remedy: str = "check its config.json") -> ConfigError:
    return ConfigError("model_name_or_path", name, reason, remedy)


def _download(name: str, revision: str, offline: bool) -> Path:
    # huggingface_hub reads the variable when it is imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision, local_files_only=offline))
    except Exception as error:
        # The Hub's client raises many exception types, from a bad name to no network. Each means: no config.json.
        raise UserError(
            f"model_name_or_path={name!r} is not a folder here nor a shipped shape, and its config.json did not come "
            f"from the Hub ({first_line(error)}): give a folder that holds its config.json"
        ) from None
