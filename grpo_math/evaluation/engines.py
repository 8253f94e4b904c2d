"""The engine of an evaluation: a model, and the backend that generates its completions.

`Model` is a model by its name, in transformers or in a vLLM server, or a model in memory. It loads weights, or starts a
server, when the first completion is needed. trainer_engines.py has the engines of a training. All stop at the same
tokens and sample as the `Request` says. vLLM rounds differently from transformers, so near ties may differ.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig

from grpo_math.errors import ConfigError, as_config_error, require_choice
from grpo_math.evaluation.fingerprint import weights_hash
from grpo_math.generation import vllm_server
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import Generate, ask_each, read_off, stop_ids, with_model
from grpo_math.generation.dtypes import inference_dtype
from grpo_math.generation.models import (
    check_weights,
    context_length,
    load_adapter,
    load_base,
    load_tokenizer,
    loading,
    model_path,
)
from grpo_math.generation.request import DEFAULT_REQUEST, QUANTISATION, Request
from grpo_math.generation.vllm_process import STARTUP, ServerProcess, executable
from grpo_math.generation.vllm_server import Server, answer_seconds
from grpo_math.problems.from_recipe import renamed_error_fields
from grpo_math.system.machine import free_port
from grpo_math.system.reading import read_json


@dataclass(frozen=True)
class Backend:
    """The program that generates. ``hf``: transformers in this process. ``vllm``: a vLLM server that is started for the
    evaluation and stopped after it. ``vllm-server``: the vLLM server at the URL ``server``."""

    name: str = "hf"
    server: str | None = None

    def __post_init__(self) -> None:
        require_choice("backend", self.name, ("hf", "vllm", "vllm-server"))
        if (self.name == "vllm-server") != (self.server is not None):
            reason = f"does not go with backend={self.name}"
            raise ConfigError("server", self.server, reason, "give --backend vllm-server and its URL, or neither")


class Model:
    """A model with its adapter: ``model`` is a name, or a model that is already loaded, with its ``tokenizer``. The
    ``request`` states how a named model is quantised and changed.

    Use it as a context manager, which frees the weights and stops a server that was started.
    """

    min_batch_size = 1  # completions in a batch
    shows_progress = True

    def __init__(
        self,
        model: Any,
        adapter: str | None = None,
        backend: Backend = Backend(),
        tokenizer: Any = None,
        request: Request = DEFAULT_REQUEST,
    ) -> None:
        self.named = isinstance(model, str)
        self.name: str = model if self.named else getattr(model.config, "_name_or_path", "") or "in memory"
        self.adapter = adapter
        self.backend = backend
        self.request = request
        self._stack = ExitStack()
        # These replace the cached properties below, so that nothing is loaded.
        if not self.named:
            self.weights = model
            self.tokenizer = tokenizer
        if adapter is not None and not (Path(adapter) / "adapter_config.json").exists():
            raise ConfigError("adapter", adapter, "has no adapter_config.json", "give the folder of a LoRA adapter")

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for name in ("weights", "served"):
            self.__dict__.pop(name, None)

    @cached_property
    def tokenizer(self) -> Any:
        return loaded(self.name, load_tokenizer)

    @cached_property
    def weights(self) -> Any:
        return load_weights(self.name, self.adapter, self.request)

    @cached_property
    def served(self) -> tuple[Server, str]:
        """A client of the vLLM server, and the server's name for the model or the adapter."""
        client = Server(self.backend.server or self._start_server())
        base = client.models()[0]
        if base not in (self.name, model_path(self.name)):
            raise ConfigError("model", self.name, f"is not what the server has, {base!r}", f"give --model {base}")
        if self.adapter is None:
            return client, base
        # vLLM's prefix cache keys an adapter by its name, so that other weights need another name.
        name = f"evaluated-{weights_hash(self.adapter)}"
        # vLLM refuses to load a name twice, and an earlier evaluation leaves its adapter on the server.
        client.unload_adapter(name)
        client.load_adapter(name, str(Path(self.adapter).resolve()))
        return client, name

    def _start_server(self) -> str:
        """Start a vLLM server, wait until it is ready, and return its URL. Leaving the context manager stops it."""
        port, rank = free_port(), 0
        if self.adapter is not None:
            rank = read_json(Path(self.adapter) / "adapter_config.json")["r"]
        vllm_server.make_key()
        server = vllm_server.ServerSettings(
            model=loaded(self.name, model_path),
            port=port,
            lora_rank=rank,
            fixed=True,
            in_4bit=bool(self.request.quantisation),
            on_gpu=torch.cuda.is_available(),
            executable=executable(),
        )
        log = Path(tempfile.mkdtemp(prefix="grpo_math-")) / "vllm_server.log"
        environment = {**os.environ, **vllm_server.environment()}
        process = ServerProcess(server.command(), environment, f"http://127.0.0.1:{port}", log)
        # Before the wait: a server that does not start in time is stopped too.
        self._stack.callback(process.stop)
        process.wait(STARTUP)
        # After the wait: the log of a server that did not start is kept, because the error message names it.
        self._stack.callback(shutil.rmtree, log.parent)
        return process.url

    def gather_from_ranks(self, rows: Sequence[Any], call: Callable[[Sequence[Any], int], Any]) -> list[Any]:
        """Return what ``call`` returns for the rows of each rank, and the number of this share of the rows. Every rank
        calls this, and gets the whole list. Here each process has all rows."""
        return [call(rows, 0)]

    def identity(self) -> dict[str, Any]:
        """Return the settings of an evaluation that name the engine."""
        # vLLM is the same engine if the user has started its server.
        return {"model": self.name, "adapter": self.adapter, "backend": self.backend.name.removesuffix("-server")}

    def files_identity(self, request: Request) -> dict[str, Any]:
        """Return the settings of an evaluation that follow from the files of the model."""
        dtype = {"dtype": loaded(self.name, inference_dtype)} if self.backend.name == "hf" else {}
        hashed = weights_hash(model_path(self.name), self.adapter)
        return {"weights_hash": hashed, "request": {**request.to_dict(), **dtype}}

    def check(self, prompt: str | list[dict[str, str]], template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Check the files and the chat template before weights are loaded, with the prompt of one problem."""
        if not isinstance(prompt, str):
            check_chat(self.name, self.tokenizer, prompt, template_kwargs)
        if self.backend.name == "hf":
            loaded(self.name, check_weights)

    @cached_property
    def context(self) -> int | None:
        """The maximum context length in tokens; None if the config does not state it."""
        # Only the config, which is small. The weights are never loaded if a server has them.
        read = partial(AutoConfig.from_pretrained, trust_remote_code=False)
        config = self.weights.config if "weights" in self.__dict__ else loaded(self.name, read)
        return context_length(config)

    def check_context(self, longest: int) -> None:
        """Check that a prompt of ``longest`` tokens leaves room for an answer."""
        if self.context is not None and longest >= self.context:
            reason = f"has max_position_embeddings={self.context}, and the longest prompt {longest} tokens"
            raise ConfigError("model", self.name, reason, "leave out long problems")

    def generator(self, request: Request) -> Generate:
        """Return the function that generates a batch. Raises `ConfigError` if model or adapter cannot be loaded."""
        if self.named and self.backend.name != "hf":
            # vLLM ignores names that it does not know.
            for option in request.options:
                if option in vars(GenerationConfig()):
                    reason = "is a setting of transformers, not of vLLM"
                    raise ConfigError("generation_kwargs", option, reason, "use --backend hf")
            quantised = request.quantisation
            # vLLM quantises a base into nf4 only; a server, if `grpo-math serve` or the user has told it.
            quantises_alike = quantised.get("load_in_4bit") and quantised.get("bnb_4bit_quant_type") != "fp4"
            if quantises_alike and self.backend.server:
                quantises_alike = self.served[0].settings()["model_config"].get("quantization") == "bitsandbytes"
            if quantised and not quantises_alike:
                reason = "does not quantise the base as the run did"
                raise ConfigError("backend", self.backend.name, reason, "use --backend hf")
            if request.model_init_kwargs:
                reason = "changes the model, and a server of vLLM does not know it"
                raise ConfigError("model_init_kwargs", ", ".join(request.model_init_kwargs), reason, "use --backend hf")
            stops = stop_ids(self.tokenizer, loaded(self.name, _generation_config), request)
            client, name = self.served
            return with_server(client, name, self.tokenizer, stops, request)
        return with_model(self.weights, self.tokenizer, request)


def check_chat(
    model: str, tokenizer: Any, prompt: list[dict[str, str]], template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Check that the model has a chat template that accepts this prompt."""
    reason, remedy = "has no chat template that takes this prompt", "use --template r1_zero, or an instruct model"
    with as_config_error("model", model, reason, remedy):
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **(template_kwargs or {}))


def with_server(client: Server, name: str, tokenizer: Any, stops: list[int], request: Request) -> Generate:
    """Return a function that generates batches with a vLLM server. ``name`` is a model or a loaded adapter."""

    def generate(prompts: list[list[int]], seed: int) -> list[Completion]:
        timeout = answer_seconds(len(prompts) * request.max_new_tokens)

        def ask(prompt: list[int], seed: int) -> list[Completion]:
            (completion,) = client.generate(
                prompt,
                model=name,
                max_tokens=request.max_new_tokens,
                seed=seed,
                logprobs=False,
                extra={**request.for_vllm(), "stop_token_ids": stops},
                timeout=timeout,
            )
            return [read_off(tokenizer, completion.tokens, stops, request.stop)]

        return ask_each(ask, prompts, seed)

    return generate


def load_weights(model: str, adapter: str | None, request: Request = DEFAULT_REQUEST) -> Any:
    """Return a model with its adapter, quantised and changed as in training."""
    options: dict[str, Any] = {"dtype": loaded(model, inference_dtype), **request.model_init_kwargs}
    if quantisation := request.quantisation:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=bool(quantisation["load_in_4bit"]),
            load_in_8bit=bool(quantisation["load_in_8bit"]),
            bnb_4bit_quant_type=quantisation["bnb_4bit_quant_type"] or "nf4",
            bnb_4bit_use_double_quant=bool(quantisation["use_bnb_nested_quant"]),
            bnb_4bit_compute_dtype=options["dtype"],
        )
    weights = loaded(model, partial(load_base, **options))
    if adapter is not None:
        weights = load_adapter(weights, adapter, model)
    # bitsandbytes chooses the device of quantised weights, and refuses another.
    return weights.to("cuda") if torch.cuda.is_available() and not quantisation else weights


def quantisation_fields(weights: Any) -> dict[str, Any]:
    """Return the quantisation of loaded weights, under the names of a recipe; {} without one.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(quantization_config=SimpleNamespace(load_in_8bit=True))
    >>> quantisation_fields(SimpleNamespace(config=config, is_loaded_in_8bit=True))["load_in_8bit"]
    True
    >>> quantisation_fields(SimpleNamespace(config=config))
    {}
    """
    config = getattr(weights.config, "quantization_config", None)
    if not (getattr(weights, "is_loaded_in_4bit", False) or getattr(weights, "is_loaded_in_8bit", False)):
        return {}
    names = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    return dict(zip(QUANTISATION, (getattr(config, name, None) for name in names), strict=True))


def _generation_config(path: str) -> Any:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        # Without this file, the tokenizer's EOS ends a completion.
        return None


def loaded(model: str, load: Callable[[str], Any]) -> Any:
    """Return ``load(folder of the model)``. Any exception becomes a `ConfigError` that names the model."""
    with renamed_error_fields({"model_name_or_path": "model"}), loading(model, "files"):
        return load(model_path(model))
