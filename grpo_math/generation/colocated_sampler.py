"""`ColocatedSampler`: token ids -> completions of the trained adapter, by a vLLM engine in this process.

TRL loads the engine and samples with it. Here the engine is loaded with support for adapters, each request gets the
adapter, and a sleeping engine keeps the base.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from grpo_math.generation.adapter_store import AdapterStore
from grpo_math.generation.completion import Completion
from grpo_math.generation.sampler import Sampler
from grpo_math.generation.shared import SharedBase
from grpo_math.generation.vllm_server import served_rank
from grpo_math.system.replaced import replaced


class ColocatedSampler(Sampler):
    """Uses the engine of ``trl``.

    ``trl_generate``: TRL's `generate`. ``shared``: the base, if the trainer and the engine share it.
    """

    def __init__(
        self, trl: VLLMGeneration, trl_generate: Callable[..., tuple], store: AdapterStore, shared: SharedBase | None
    ) -> None:
        super().__init__(store)
        self.trl = trl
        self.trl_generate = trl_generate
        self.shared = shared
        self.context = trl.max_model_length or 2**31

    def broadcast_adapter(self, scale: float = 1.0) -> None:
        """See `Sampler`. Each request names the adapter."""
        from vllm.lora.request import LoRARequest

        store, llm = self.store, self.trl.llm
        store.write(store.gather_next(), scale)
        # vLLM looks a loaded adapter up by its number, so each sync needs a new one, of at least 1.
        adapter = LoRARequest(store.current.name, store.sent, str(store.current))
        llm.generate = partial(llm.generate, lora_request=adapter)
        for folder in store.unused():
            store.remove(folder)

    def gather_completions(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """See `Sampler`. Ranks may share an engine."""
        _, token_ids, logps, _ = self.trl_generate(prompts, None, n)
        return [Completion(list(tokens), [top[0] for top in row]) for tokens, row in zip(token_ids, logps, strict=True)]

    def gather_greedy(self, prompt: list[int], tokens: int) -> list[Completion]:
        """See `Sampler`. Each process asks its engine."""
        from vllm import SamplingParams

        trl = self.trl
        if trl.enable_sleep_mode:
            # TRL wakes the key-value cache only inside `generate`, which runs after the canary.
            trl.llm.wake_up(tags=["kv_cache"])
        # `logprobs=0`: only the sampled token's log-prob.
        settings = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        # As TRL before `generate`, which may hang otherwise (huggingface/trl#3671).
        if trl.tensor_parallel_size > 1:
            torch.distributed.barrier(device_ids=[trl.accelerator.local_process_index])
        output = trl.llm.generate([{"prompt_token_ids": prompt}], sampling_params=settings, use_tqdm=False)[0]
        ids = list(output.outputs[0].token_ids)
        logps = [at[token].logprob for at, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        return gather_object([Completion(ids, logps)])

    def wake(self) -> bool:
        """See `Sampler`."""
        if not (self.trl.enable_sleep_mode and self.trl._llm_weights_sleeping):
            return False
        # As TRL does: torch's cached blocks may otherwise leave too little memory for vLLM's weights.
        vllm_generation.empty_cache()
        # Shared weights do not sleep.
        if self.shared is None:
            self.trl.llm.wake_up(tags=["weights"])
        # TRL's `generate` syncs weights that sleep. Here sleep keeps the base and the adapter, so waking is enough.
        self.trl._llm_weights_sleeping = False
        return True

    def sleep(self) -> None:
        """Let the engine sleep as TRL does after a rollout."""
        if self.trl.enable_sleep_mode:
            self.trl.llm.sleep(level=2)
            self.trl._llm_weights_sleeping = True


@contextmanager
def adapter_engine(model: Any, rank: int, device: torch.device, shared: SharedBase | None) -> Iterator[None]:
    """Make TRL load an engine with support for adapters of ``rank`` inside this context. The engine shares its base
    with the trainer if ``shared`` is given."""
    # TRL imports `LLM` into its module if vLLM is installed, and has no argument for these settings.
    llm_class: Any = getattr(vllm_generation, "LLM", None)  # None: TRL raises an error
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": served_rank(rank)}
    if shared:
        settings["dtype"] = str(model.dtype).removeprefix("torch.")
        # vLLM's other kernels for experts repack the weights.
        if device.type == "cuda" and any("experts" in name for name in shared.modules):
            settings["moe_backend"] = "triton"

    def engine(**kwargs: Any) -> Any:
        llm = llm_class(**kwargs, **settings)
        sleep = llm.sleep
        # Level 1 keeps the base in main memory. TRL's level 2 discards it, and nothing would send it again.
        llm.sleep = partial(release_cache, llm, sleep) if shared else lambda level: sleep(level=1)
        return llm

    with replaced(vllm_generation, LLM=engine), shared.locate() if shared else nullcontext():
        yield
    if shared:
        shared.attach(model, device)


def release_cache(llm: Any, sleep: Callable[..., None], level: int) -> None:
    """Give back the memory of an engine's key-value cache, and leave its weights where they are."""
    if hasattr(llm, "release_kv_cache_memory"):
        # Without a step, the scheduler still counts the requests that have ended.
        llm.llm_engine.step()
        sleep(level=0)  # stops the scheduler, and frees no memory
        llm.release_kv_cache_memory()
    else:  # before vLLM 0.31: the weights go to main memory and come back to the same addresses
        sleep(level=1)
        llm.wake_up(tags=["weights"])


@contextmanager
def restored_methods(model: torch.nn.Module) -> Iterator[None]:
    """Restore the classes of ``model`` after an engine has loaded inside this context.

    vLLM runs some families with transformers' classes, and replaces two of their methods. With these methods, the
    trainer's hooks would not run, and no other model of the class could be made.
    """
    constructors = {type(module): type(module).__init__ for module in model.modules()}
    yield
    for kind, constructor in constructors.items():
        if kind.__init__ is not constructor:
            kind.__init__ = constructor  # type: ignore[method-assign]
            kind.__call__ = partialmethod(call_module, kind.__call__)  # type: ignore[method-assign, assignment]


def call_module(module: torch.nn.Module, of_vllm: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module of a class whose ``__call__`` vLLM has replaced by ``of_vllm``."""
    # Only vLLM's constructor sets this attribute.
    call = of_vllm if "do_not_compile" in vars(module) else torch.nn.Module.__call__
    return call(module, *args, **kwargs)
