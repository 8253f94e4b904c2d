"""Generation by vLLM in which the adapter alone goes to it, and the base never changes (``vllm_sync: adapter``).

TRL merges the adapter into the base, sends every weight, and takes it out again; on bfloat16 that changes the base a
little each time, on 4 bit it loses more, and it needs NCCL. Here a sync saves the trained tensors (a few MB) to a new
folder, and vLLM loads it as a LoRA adapter.

Each sync has a new name and a new folder. vLLM could also load in place under one name; but then it reads the folder
again for every batch of requests (its engine dies if the folder is gone), and its prefix cache, which knows an adapter
by name and path, answers from the old adapter's keys and values. Both were seen with vLLM 0.31.

A canary follows the first sync, and the first one after the adapter has moved: on the same prompt as before, vLLM's
log-probs of a greedy continuation have to agree with the trainer's. A few updates move log-probs by less than rounding
does; so the second time the adapter is also sent with its effect multiplied until it is plain to see, by the same way.

A server that restarts gets the adapter again, and the completions that were lost are sampled again. The folder is in
/dev/shm where the server is on this machine, else in the run directory, which the server has to see under the same
path; GRPO_MATH_ADAPTER_DIR names another. It goes with the run; a run that is killed leaves its last one.

`adapter_sync` puts the class in the place of TRL's name for the time of its constructor. Does not send full weights
(TRL's own path does), and takes no images.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.adapters import ADAPTER, adapter_tensors, logps, refuse_unserved, save_adapter, scaled
from grpo_math.generation.completions import batch_seed
from grpo_math.generation.server import LOCAL, Sampled, Server, ServerError, served_rank
from grpo_math.run.main_process import on_main

logger = logging.getLogger(__name__)

RESTARTS = 3  # so often one request outlives its server
CANARY_TOKENS = 16
LARGEST_SCALE = 2.0**24
AT_ONCE = 256  # requests to one server


class ServerAway(UserError):
    """A server that did not come back: the trainer saves a checkpoint, and the run ends."""


@contextmanager
def adapter_sync(vllm_sync: str, args: Any) -> Iterator[None]:
    """In here TRL's trainer makes an `AdapterGeneration` where it trains a PEFT adapter and ``vllm_sync`` says so."""
    if not args.use_vllm or vllm_sync != "adapter":
        yield
        return
    module: Any = grpo_trainer
    trls = module.VLLMGeneration

    def generation(**kwargs: Any) -> VLLMGeneration:
        if is_peft_model(kwargs["model"]):
            return AdapterGeneration(args, **kwargs)
        if "," in (kwargs.get("server_base_url") or ""):
            reason = "names several servers, and full weights go to one"
            raise ConfigError("vllm_server_base_url", kwargs["server_base_url"], reason, "name one server")
        return trls(**kwargs)

    module.VLLMGeneration = generation
    try:
        yield
    finally:
        module.VLLMGeneration = trls


class AdapterGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration`, with adapters in place of weights."""

    def __init__(self, args: Any, **kwargs: Any) -> None:
        self.output_dir = Path(str(args.output_dir))
        self.run = uuid.uuid4().hex[:8]
        self.syncs = 0
        self.sent = 0  # folders
        self.folder: Path | None = None  # of the adapter that vLLM has
        self.servers: list[Server] = []
        self.canary: list[int] | None = None  # its prompt
        self.canaries = 0  # 1: agreed; 2: agreed with an adapter that had moved, and nothing is left to show
        self.unchecked = False
        self.float32 = False  # on either side
        self.seed, self.rollouts = args.seed, 0  # how many were sampled by servers: the seeds follow from both
        super().__init__(**kwargs)

    @property
    def name(self) -> str:
        """Of the adapter that vLLM has."""
        return self.folder.name if self.folder is not None else ""

    # TRL's three methods

    def _init_vllm(self) -> None:
        refuse_unserved(self.model)
        if self._dist.fsdp_version == 1:
            raise ConfigError("fsdp_version", 1, "cannot be synced as an adapter", "use FSDP 2, or DeepSpeed")
        if self.mode == "server":
            self.float32 = on_main(self._connect)
        elif self.mode == "colocate":
            self._load_colocated()
        else:
            raise ConfigError("vllm_mode", self.mode, "is not known", "use colocate or server")
        if self._samples:
            self.root = self._folder_for_adapters()
            weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self._send()
        self.syncs += 1
        self.unchecked = self.canaries < 2

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> tuple:
        if images is not None and any(image is not None for image in images):
            raise UserError(
                "vllm_sync=adapter samples from text alone: set vllm_sync to merged for prompts with images"
            )
        if self.mode == "colocate":
            if self.enable_sleep_mode and self._llm_weights_sleeping:
                self.sync_weights()
            if self.unchecked:
                self._check_canary(prompts)
            return super().generate(prompts, images, num_generations, profiler)
        everyones = gather_object(prompts)
        if self.unchecked:
            self._check_canary(everyones)
        with profiler or nullcontext():
            sampled = on_main(partial(self._sample, everyones[::num_generations], num_generations))
        self.rollouts += 1
        first = self.accelerator.process_index * len(prompts)
        token_ids, logprobs = (values[first : first + len(prompts)] for values in sampled)
        return (
            list(prompts),
            token_ids,
            [[[logprob] for logprob in row] for row in logprobs],
            [[[token] for token in row] for row in token_ids],
        )

    # Servers

    def _connect(self) -> bool:
        """Check every server; whether it and the trainer compute in float32."""
        base = self.server_base_url or f"http://{self.server_host.replace('0.0.0.0', '127.0.0.1')}:{self.server_port}"
        self.servers = [Server(url.strip(), timeout=3600.0) for url in base.split(",")]
        peft_config: Any = self.model.peft_config[ADAPTER]
        rank, precision = peft_config.r, self.accelerator.mixed_precision
        dtypes = {str(self.model.dtype)} | ({precision} - {"no"})
        for server in self.servers:
            server.wait(self.server_timeout, progress=_say_once(f"waiting for the vLLM server at {server.url}"))
            server.check_version()
            settings = server.settings()
            lora, longest = settings["lora_config"], settings["model_config"]["max_model_len"]
            if lora is None or lora["max_lora_rank"] < rank:
                has = "takes no adapters" if lora is None else f"takes adapters up to rank {lora['max_lora_rank']}"
                remedy = f"start it with --enable-lora --max-lora-rank {served_rank(rank)}, or lower the rank"
                raise ConfigError("lora_r", rank, f"cannot be served: {server.url} {has}", remedy)
            if self.max_completion_length >= longest:
                reason = f"leaves no room for a prompt in the {longest} tokens of {server.url}"
                remedy = "start it with a larger --max-model-len"
                raise ConfigError("max_completion_length", self.max_completion_length, reason, remedy)
            dtypes.add(settings["model_config"]["dtype"])
        self.vllm_client: Any = SimpleNamespace(
            get_server_info=self.servers[0].settings
        )  # TRL reads logprobs_mode there
        return {dtype.removeprefix("torch.") for dtype in dtypes} == {"float32"}

    def _sample(self, prompts: list[list[int]], n: int) -> Sampled:
        """Each server takes every k-th prompt; in the order of prompts.

        A prompt is a request of its own, since vLLM gives all prompts of a request its one seed. The seeds follow from
        the run's seed, so that neither another server nor a restart in between changes what is sampled.
        """
        extra = dict(self.generation_kwargs)
        if self.structured_outputs_regex is not None:
            extra["structured_outputs"] = {"regex": self.structured_outputs_regex}
        settings: Any = {
            "n": n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_completion_length,
            "extra": extra,
        }
        k, own = len(self.servers), batch_seed(self.seed, self.rollouts)
        requests = [(prompt, batch_seed(own, number)) for number, prompt in enumerate(prompts)]

        def share(i: int) -> list[Sampled]:
            server = self.servers[i]

            def ask(request: tuple[list[int], int]) -> Sampled:
                return server.generate([request[0]], model=self.name, seed=request[1], **settings)

            def asked() -> list[Sampled]:
                with ThreadPoolExecutor(AT_ONCE) as requesting:
                    return list(requesting.map(ask, requests[i::k]))

            return self._outliving_restarts(server, asked)

        with ThreadPoolExecutor(k) as pool:
            shares = list(pool.map(share, range(k)))
        found = [shares[i % k][i // k] for i in range(len(prompts))]
        return Sampled(
            [ids for one in found for ids in one.token_ids], [row for one in found for row in one.logprobs or []]
        )

    def _outliving_restarts(self, server: Server, call: Callable[[], Any]) -> Any:
        """What ``call`` returns; where the server was lost, again once it is back and has the adapter."""
        for _ in range(RESTARTS):
            try:
                return call()
            except ServerError as error:
                if error.status is not None and error.status < 500 and error.status != 404:
                    raise
                logger.warning("%s; it is asked again.", error)
            try:
                server.wait(self.server_timeout, progress=_say_once(f"waiting for {server.url} to come back"))
                server.check_version()
                self._load(server)
            except ServerError as error:
                raise ServerAway(str(error)) from None
        raise ServerAway(f"{server.url} was lost {RESTARTS} times over one request: its own log says why")

    def _load(self, server: Server) -> None:
        if self.name not in server.models():
            server.load_adapter(self.name, str(self.folder))

    # Adapters

    def _send(self, scale: float = 1.0) -> None:
        """The adapter as it is now, to vLLM under a new name; what was there before is removed."""
        tensors = adapter_tensors(self.model, self._dist.gather_params)
        self.sent += 1
        if self.mode == "server":
            on_main(partial(self._publish, tensors, scale))
        else:
            self._publish(tensors, scale)

    def _publish(self, tensors: dict[str, torch.Tensor], scale: float) -> None:
        before, self.folder = self.folder, self.root / f"{self.run}-{self.sent}"
        save_adapter(self.model, tensors, self.folder, scale)
        if self.mode == "colocate":
            from vllm.lora.request import LoRARequest

            self.llm.adapter = LoRARequest(self.name, self.sent, str(self.folder))
        for server in self.servers:
            self._outliving_restarts(server, partial(self._replace, server, before))
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def _replace(self, server: Server, before: Path | None) -> None:
        self._load(server)
        if before is not None:
            server.unload_adapter(before.name)

    @property
    def _samples(self) -> bool:
        """Whether this process hands adapters to vLLM: the main one to servers, each to its own colocated engine."""
        return self.mode == "colocate" or self.accelerator.is_main_process

    def _folder_for_adapters(self) -> Path:
        own, shared = os.environ.get("GRPO_MATH_ADAPTER_DIR"), Path("/dev/shm")
        near = all(urlsplit(server.url).hostname in LOCAL for server in self.servers)
        base = Path(own) if own else shared if near and os.access(shared, os.W_OK) else self.output_dir
        base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="grpo_math-adapters-", dir=base.resolve()))

    # Colocated

    def _load_colocated(self) -> None:
        """TRL's own engine, made to take adapters."""
        if not hasattr(vllm_generation, "LLM"):
            raise UserError(
                "vllm_mode=colocate needs vLLM in the environment of the training: pip install grpo_math[vllm]"
            )
        made = vllm_generation.LLM
        peft_config: Any = self.model.peft_config[ADAPTER]
        rank = served_rank(peft_config.r)
        vllm_generation.LLM = lambda **kwargs: _WithAdapter(
            made(**kwargs, enable_lora=True, max_loras=1, max_lora_rank=rank)
        )
        try:
            super()._init_vllm()
        finally:
            vllm_generation.LLM = made

    # The canary

    def _check_canary(self, prompts: list[list[int]]) -> None:
        """Raise `UserError` where vLLM's log-probs are not the trainer's."""
        self.unchecked = False
        if self.canary is None:
            self.canary = on_main(partial(self._canary_prompt, prompts))
        if not self.canaries:
            self._compare(1.0)
            self.canaries = 1
            return
        scale = self._visible_scale()
        if scale is None:  # no update has moved the adapter yet
            return
        self._send(scale)
        moved = self._compare(scale)
        self._send()
        self._compare(1.0)
        if moved > 2 * self._tolerance:
            self.canaries = 2

    def _canary_prompt(self, prompts: list[list[int]]) -> list[int]:
        """Two blocks of the prefix cache (as far as the context has room): prompts, and before them their tokens in
        disorder. Prompts over and over would be copied from, which a wrong model does as well as the right one."""
        block, longest = 16, self.max_model_length or 2**20
        if self.servers:
            settings = [server.settings() for server in self.servers]
            block = max(of["cache_config"]["block_size"] for of in settings)
            longest = min(of["model_config"]["max_model_len"] for of in settings)
        elif self.mode == "colocate":
            block = self.llm.llm_engine.vllm_config.cache_config.block_size
        row = [token for ids in dict.fromkeys(map(tuple, prompts)) for token in ids]
        length = min(2 * block + 1, longest - CANARY_TOKENS - 1)
        filler = random.Random(0).choices(row, k=max(0, length - len(row)))
        return (filler + row)[:length]

    def _visible_scale(self) -> float | None:
        """A power of 2 that, times the adapter's effect, moves the trainer's log-probs of the canary by 5 tolerances;
        None where nothing does."""
        prompt: Any = self.canary
        base, scale = self._trainers(0.0, prompt[:1], prompt[1:]), 1.0
        while scale <= LARGEST_SCALE:
            moved = (self._trainers(scale, prompt[:1], prompt[1:]) - base).abs().mean().item()
            if moved >= 5 * self._tolerance:
                return scale
            scale *= 2.0 ** min(6, max(1, math.ceil(math.log2(6 * self._tolerance / max(moved, 1e-9)))))
        return None

    def _compare(self, scale: float) -> float:
        """How far the adapter, with its effect times ``scale``, moves the trainer's log-probs of what vLLM samples."""
        prompt: Any = self.canary
        completions = self._ask(prompt)
        tolerance = self._tolerance
        farthest, moved = 0.0, math.inf
        for token_ids, logprobs in completions:
            ours = self._trainers(scale, prompt, token_ids)
            from_base = (ours - self._trainers(0.0, prompt, token_ids)).abs().mean().item() if scale != 1 else 0.0
            apart = (ours - torch.tensor([math.nan if x is None else x for x in logprobs])).abs().mean().item()
            limit = tolerance + 0.1 * from_base
            if not apart <= limit:
                raise UserError(
                    f"vLLM samples the wrong model: after sync {self.syncs} its log-probs are {apart:.3f} nats from "
                    f"the trainer's, and at most {limit:.3f} is rounding: see that it serves the base that is trained, "
                    "in the same precision, and that nothing else loads adapters into it"
                )
            farthest, moved = max(farthest, apart), min(moved, from_base)
        logger.info("canary: sync %d, adapter x %g, %.4f nats apart", self.syncs, scale, farthest)
        return moved

    def _ask(self, prompt: list[int]) -> list[tuple[list[int], list[float | None]]]:
        """A greedy continuation with its log-probs from every server, or from every process's engine."""
        if self.mode == "server":
            return on_main(partial(self._ask_servers, prompt))
        from vllm import SamplingParams

        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        settings = SamplingParams(temperature=0.0, max_tokens=CANARY_TOKENS, ignore_eos=True, logprobs=0)
        output = self.llm.generate([{"prompt_token_ids": prompt}], sampling_params=settings, use_tqdm=False)[0]
        ids = list(output.outputs[0].token_ids)
        logprobs = [at[token].logprob for at, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        return gather_object([(ids, logprobs)])

    def _ask_servers(self, prompt: list[int]) -> list[tuple[list[int], list[float | None]]]:
        greedy: Any = {"temperature": 0.0, "max_tokens": CANARY_TOKENS, "extra": {"ignore_eos": True}}
        answers = []
        for server in self.servers:
            ask = partial(server.generate, [prompt], **greedy)
            sampled = self._outliving_restarts(server, partial(ask, model=self.name))
            answers.append((sampled.token_ids[0], sampled.logprobs[0]))
        return answers

    def _trainers(self, scale: float, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """The main process's, so that all decide alike; every process computes them, since its parameters may be
        needed for the others'."""
        with scaled(self.model, scale), self.accelerator.autocast():
            values = [logps(self.model, prompt, completion)]
        broadcast_object_list(values, from_process=0)
        return values[0]

    @property
    def _tolerance(self) -> float:
        """Nats between the two forwards, on average over the canary's tokens, that rounding may make: several times
        what was seen (0.03 in bfloat16)."""
        if getattr(self.model, "is_loaded_in_4bit", False) or getattr(self.model, "is_loaded_in_8bit", False):
            return 0.4
        return 0.02 if self.float32 else 0.2


class _WithAdapter:
    """vLLM's `LLM` that samples with an adapter. It sleeps at level 1, with the base kept in main memory: TRL's level 2
    throws the weights away, which nothing would send again."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.adapter: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._llm.generate(*args, lora_request=self.adapter, **kwargs)

    def sleep(self, level: int = 1) -> None:
        self._llm.sleep(level=1)


def _say_once(message: str) -> Callable[[float], None]:
    """A progress line after two seconds of waiting, and once a minute."""
    said: list[int] = []

    def progress(seconds: float) -> None:
        if seconds >= 2 and int(seconds // 60) not in said:
            said.append(int(seconds // 60))
            logger.warning("%s (%.0f s) ...", message, seconds)

    return progress
