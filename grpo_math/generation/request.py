"""A request to a model: the prompt's template, and how the answer is sampled. Training, evaluations, `ask`, the model
card and `doctor --show` use the same one.

An evaluation changes the temperature and the length, and nothing else. The results of an evaluation contain the
description, so that results of different requests are not compared.

Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from grpo_math.errors import ConfigError
from grpo_math.redact import without_secrets

# Settings of a run that have the same name in a request.
SHARED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")
# Names of transformers -> names of vLLM, which a request uses.
RENAMED = {"stop_strings": "stop", "eos_token_id": "stop_token_ids", "min_new_tokens": "min_tokens"}
LENGTHS = ("max_tokens", "max_new_tokens")
# Keys of generation_kwargs that each program sets itself.
OMITTED = {"n", "seed", "logprobs", "do_sample", "num_return_sequences", "max_length"}
# Keys of model_init_kwargs that do not change what a model answers: they have a field of their own, say how and where
# weights are loaded, or have an effect in training only.
LOADING = (
    *("dtype", "torch_dtype", "attn_implementation", "revision", "quantization_config", "trust_remote_code"),
    *("device_map", "max_memory", "offload_folder", "low_cpu_mem_usage", "cache_dir", "local_files_only"),
    *("force_download", "use_safetensors", "use_cache", "attention_dropout"),
)
QUANTISATION = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")


@dataclass(frozen=True)
class Request:
    """The settings of a request. ``stop`` and ``stop_token_ids`` end an answer, as the model's end tokens do.

    ``options``: other settings of the sampler. ``template`` is None if it is not known, for example for the rows of a
    script. ``quantisation`` and ``model_init_kwargs`` change the model.
    """

    template: str | None = None
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    max_new_tokens: int = 512
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    regex: str | None = None
    quantisation: Mapping[str, Any] = field(default_factory=dict)
    model_init_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a results file, without those that are not known."""
        unknown = {"template", "system_prompt"} if self.template is None else set[str]()
        fields = {name: value for name, value in asdict(self).items() if name not in unknown}
        # A script's model_init_kwargs may contain objects.
        return cast(dict[str, Any], json.loads(json.dumps(fields, default=str)))

    def for_vllm(self) -> dict[str, Any]:
        """Return the sampling settings of a request to vLLM, without its length.

        >>> Request(stop=["</answer>"], regex="[0-9]+").for_vllm()["structured_outputs"]
        {'regex': '[0-9]+'}
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        settings = {name: getattr(self, name) for name in names} | dict(self.options)
        if self.stop:
            settings["stop"] = self.stop
        if self.stop_token_ids:
            settings["stop_token_ids"] = self.stop_token_ids
        if self.regex is not None:
            settings["structured_outputs"] = {"regex": self.regex}
        return settings

    def for_transformers(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of transformers' generate. ``known`` has all of its names.

        Raises `ConfigError` for a setting that only vLLM has.
        """
        remedy = "use --backend vllm"
        if self.regex is not None:
            raise ConfigError("vllm_structured_outputs_regex", self.regex, "needs vLLM", remedy)
        transformers_names = {vllm: name for name, vllm in RENAMED.items()}
        options = {transformers_names.get(name, name): value for name, value in self.options.items()}
        # An answer is read from its tokens, which contain the stop string with vLLM, too.
        for name in ("ignore_eos", "include_stop_str_in_output"):
            options.pop(name, None)
        for name in options:
            if name not in known:
                raise ConfigError("generation_kwargs", name, "is a setting of vLLM, not of transformers", remedy)
        settings = {"do_sample": False, "repetition_penalty": self.repetition_penalty, **options}
        if self.temperature:
            settings |= {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            # Only if it is set, because a min_p of 0 is a step of the sampler, too.
            settings |= {"min_p": self.min_p} if self.min_p else {}
        if self.stop:
            settings["stop_strings"] = self.stop
        if self.cache_implementation:
            settings["cache_implementation"] = self.cache_implementation
        return settings


DEFAULT_REQUEST = Request()


def request_from(settings: Mapping[str, Any]) -> Request:
    """Return the request of a recipe, a run's config.yaml or a trainer's arguments, which have the same names.

    >>> request = request_from({"generation_kwargs": {"stop": "</answer>", "top_p": 0.9, "seed": 3}, "top_k": None})
    >>> request.stop, request.top_p, request.top_k, dict(request.options)
    (['</answer>'], 0.9, 0, {})
    """
    options = {RENAMED.get(name, name): value for name, value in (settings.get("generation_kwargs") or {}).items()}
    # As in training: generation_kwargs win.
    values = {**settings, **options}
    shared = {name: values[name] for name in SHARED if values.get(name) is not None}
    max_tokens = next((options[name] for name in LENGTHS if options.get(name)), settings.get("max_completion_length"))
    ours = {*SHARED, *LENGTHS, *OMITTED, "stop", "stop_token_ids"}
    init = settings.get("model_init_kwargs") or {}
    quantised = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return Request(
        template=settings.get("prompt_template"),
        system_prompt=settings.get("system_prompt"),
        template_kwargs=dict(settings.get("chat_template_kwargs") or {}),
        max_new_tokens=max_tokens or 512,
        stop=_listed(options.get("stop")),
        stop_token_ids=_listed(options.get("stop_token_ids")),
        options={name: value for name, value in options.items() if name not in ours},
        regex=settings.get("vllm_structured_outputs_regex"),
        quantisation={name: settings.get(name) for name in QUANTISATION} if quantised else {},
        model_init_kwargs=without_secrets({name: value for name, value in init.items() if name not in LOADING}),
        **shared,
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
