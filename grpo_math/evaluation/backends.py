"""Who generates the answers of an evaluation: transformers here, a vLLM server, or vLLM in this process.

`opened` gives the function that does, by the names of a model and an adapter; weights are loaded only then. Each takes
the token ids of a batch and its seed (`rollout.Generate`), stops at the same tokens, and samples at top_p 1 without
top_k. vLLM rounds in another way than transformers, so that near ties may fall otherwise.

Does not batch or grade, and does not start a server.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError, first_line, one_of
from grpo_math.evaluation.fingerprint import weights_hash
from grpo_math.generation.completions import Completion, Generate, batch_seed, read_off, stop_ids, with_model
from grpo_math.generation.models import fast_dtype, model_path
from grpo_math.generation.server import Server, served_rank
from grpo_math.reading import read_object, real

BACKENDS = ("hf", "vllm-server", "vllm")
AT_ONCE = 64  # requests to a server


_kept: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("weights", default=None)


@contextmanager
def keeping() -> Iterator[None]:
    """Within it, the weights that were loaded last are there for the next evaluation of the same model and adapter."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def _once(key: tuple[Any, ...], load: Callable[[], Any]) -> Any:
    kept = _kept.get()
    if kept is None:
        return load()
    if key not in kept:
        kept.clear()  # first: there may not be room for two
        kept[key] = load()
    return kept[key]


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn: ``samples`` of each problem at ``temperature``, 0 being greedy."""

    samples: int
    temperature: float
    max_new_tokens: int
    batch_size: int
    seed: int


def check(backend: str, server: str | None, adapter: str | None) -> None:
    """What cannot work, before anything is loaded."""
    one_of("backend", backend, BACKENDS)
    if backend == "vllm-server" and server is None:
        raise ConfigError("server", None, "is needed by backend=vllm-server", "give its URL, http://127.0.0.1:8000")
    if backend != "vllm-server" and server is not None:
        raise ConfigError("server", server, f"would be ignored by backend={backend}", "add --backend vllm-server")
    if backend == "vllm" and find_spec("vllm") is None:
        raise ConfigError("backend", "vllm", "needs the package vllm", "install it, or use vllm-server or hf")
    named = backend == "vllm-server" and adapter is not None and not Path(adapter).exists()  # one that the server has
    if adapter is not None and not named and not (Path(adapter) / "adapter_config.json").exists():
        raise ConfigError("adapter", adapter, "holds no adapter_config.json", "give the folder of a LoRA adapter")


def check_chat(model: str, tokenizer: Any, prompt: list[dict[str, str]]) -> None:
    """That the model has a chat template, and one that takes such a prompt."""
    from jinja2 import TemplateError

    try:
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as error:
        reason = f"has no chat template that takes this prompt ({type(error).__name__}: {first_line(error)})"
        raise ConfigError("model", model, reason, "use --template r1_zero, or an instruct model") from None


def context_of(model: Any) -> int | None:
    """The most tokens that a model, or one of that name, reads; None where its config does not say."""
    config = loaded(model, _config) if isinstance(model, str) else model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_context(model: Any, longest: int) -> None:
    """That prompts of so many tokens leave room for an answer."""
    limit = context_of(model)
    if limit is not None and longest >= limit:
        reason = f"has max_position_embeddings={limit}, and the longest prompt {longest} tokens"
        name = model if isinstance(model, str) else model.config._name_or_path
        raise ConfigError("model", name, reason, "leave out long problems")


def opened(
    model: Any, adapter: str | None, tokenizer: Any, backend: str, server: str | None, sampling: Sampling
) -> Generate:
    """The function that generates a batch, with a model that is loaded or a name.

    `ConfigError` for a model or an adapter that cannot be loaded.
    """
    if backend == "hf" or not isinstance(model, str):
        weights = _once((model, adapter), lambda: load_weights(model, adapter)) if isinstance(model, str) else model
        limits: Any = {"temperature": sampling.temperature, "max_new_tokens": sampling.max_new_tokens}
        return with_model(weights, tokenizer, **limits)
    stops = stop_ids(tokenizer, loaded(model, _generation_config))
    if backend == "vllm":
        return with_vllm(model_path(model), adapter, tokenizer, stops, sampling)
    client = Server(str(server))
    served = client.models()[0]
    if served not in (model, model_path(model)):
        raise ConfigError("model", model, f"is not what the server has, {served!r}", f"give --model {served}")
    name = served if adapter is None else adapter
    if adapter is not None and Path(adapter).is_dir():
        name = f"evaluated-{weights_hash(adapter)}"  # for these weights alone: vLLM's prefix cache goes by the name
        client.unload_adapter(name)
        client.load_adapter(name, str(real(adapter)))
    return with_server(client, name, tokenizer, stops, sampling)


def with_server(server: Server, name: str, tokenizer: Any, stops: list[int], sampling: Sampling) -> Generate:
    """Batches by a server, under the ``name`` of its model or of an adapter that it has loaded.

    vLLM gives every prompt of a request the request's seed, so that a request holds one prompt, and all its samples.
    """

    def ask(job: tuple[list[int], int, int]) -> list[Completion]:
        prompt, samples, seed = job
        sampled = server.generate(
            [prompt],
            model=name,
            n=samples,
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            logprobs=False,
            extra={"stop_token_ids": stops},
        )
        return [read_off(tokenizer, ids, stops) for ids in sampled.token_ids]

    def generate(prompts: list[list[int]], seed: int) -> list[Completion]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [completion for part in pool.map(ask, jobs(prompts, seed)) for completion in part]

    return generate


def with_vllm(path: str, adapter: str | None, tokenizer: Any, stops: list[int], sampling: Sampling) -> Generate:
    """Batches by vLLM's ``LLM`` in this process, with an adapter's folder beside the weights, not merged."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the answer
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora: dict[str, Any] = {}
    if adapter is not None:
        config = read_object(Path(adapter) / "adapter_config.json") or {}
        lora = {"enable_lora": True, "max_lora_rank": served_rank(config["r"])}
    llm = _once((path, adapter), lambda: LLM(model=path, **lora))
    request = None if adapter is None else LoRARequest("adapter", 1, adapter)

    def generate(prompts: list[list[int]], seed: int) -> list[Completion]:
        batch = jobs(prompts, seed)
        limits: Any = {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens}
        drawn = [SamplingParams(n=n, seed=own, stop_token_ids=stops, **limits) for _, n, own in batch]
        inputs: Any = [{"prompt_token_ids": prompt} for prompt, _, _ in batch]
        outputs = llm.generate(inputs, drawn, use_tqdm=False, lora_request=request)
        return [read_off(tokenizer, list(one.token_ids), stops) for output in outputs for one in output.outputs]

    return generate


def jobs(prompts: list[list[int]], seed: int) -> list[tuple[list[int], int, int]]:
    """The prompts of a batch, equal neighbours as one: (token ids, how many, a seed of its own).

    >>> [(prompt, samples) for prompt, samples, _ in jobs([[5], [5], [6]], seed=0)]
    [([5], 2), ([6], 1)]
    """
    runs = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
    return [(prompt, samples, batch_seed(seed, i)) for i, (prompt, samples) in enumerate(runs)]


def load_weights(model: str, adapter: str | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    weights = loaded(
        model, lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=fast_dtype(), trust_remote_code=False)
    )
    if adapter is not None:
        from peft import PeftModel

        try:
            weights = PeftModel.from_pretrained(weights, adapter)
        except Exception as error:  # peft has no error of its own for a folder that it cannot use
            said = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError("adapter", adapter, f"does not fit {model}", said) from None
    return weights.to("cuda") if torch.cuda.is_available() else weights


def _config(path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def _generation_config(path: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # a model without the file ends as its tokenizer says
        return None


def loaded(model: str, load: Callable[[str], Any]) -> Any:
    """What ``load`` gives for the folder of a model; `ConfigError` where it raises."""
    try:
        return load(model_path(model))
    except ConfigError as error:  # generation/models.py names the recipe's field
        raise ConfigError("model", error.value, error.reason, error.remedy) from None
    except UserError:
        raise
    except Exception as error:  # transformers, safetensors and the Hub each have their own
        raise ConfigError("model", model, "cannot be loaded", f"{type(error).__name__}: {first_line(error)}") from None
