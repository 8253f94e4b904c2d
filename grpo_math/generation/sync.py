"""Generate with vLLM by sending only the adapter: the base model never changes (``vllm_sync: adapter``).

TRL merges the adapter into the base, sends every weight, and unmerges the adapter. Each time this changes a bfloat16
base a little and a 4-bit base more, and it needs NCCL. Here a sync saves the trained tensors (a few MB) to a new
folder, and vLLM loads the folder as a LoRA adapter.

Each sync has a new name and a new folder. vLLM could also load in place under one name. But then vLLM reads the folder
again for every batch of requests, and its engine dies if the folder is missing. The prefix cache identifies an adapter
by name and path, and so reuses the old adapter's keys and values. Both happened with vLLM 0.31.

A canary (canary.py) checks that vLLM samples from the trained model.

With ``staleness: 1`` the next batch is sampled while one is trained on (prefetch.py): two adapters are then in use.

A restarted server gets the adapter again, and lost completions are sampled again. The folder is in the run directory,
which a server on another machine must see under the same path. The end of the run removes the folder; a run that
resumes removes what a killed run has left.

`adapter_sync` replaces TRL's generation class during the constructor of TRL's trainer. It also replaces TRL's client,
which does not support a key, by a client that sends VLLM_API_KEY. TRL sends full weights. Images are not supported.
"""

import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import gather_object, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.adapters import ADAPTER, adapter_tensors, refuse_unserved, save_adapter
from grpo_math.generation.canary import TOKENS, Canary
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import ask_each, batch_seed
from grpo_math.generation.lost_server import one_line_for_lost_servers, repeat_after_restart, wait
from grpo_math.generation.prefetch import PrefetchedRollout
from grpo_math.generation.request import request_from
from grpo_math.generation.shared import SharedBase, cannot_share
from grpo_math.generation.vllm_server import Server, key, served_rank, without_aborts
from grpo_math.run.speed_ups import switched_off
from grpo_math.run.weights import split_by
from grpo_math.system.addresses import url_of
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.replaced import replaced


@contextmanager
def adapter_sync(vllm_sync: str, args: Any) -> Iterator[None]:
    """Make TRL's trainer use an `AdapterGeneration` inside this context, if it trains a PEFT adapter and ``vllm_sync``
    is adapter. Otherwise the trainer uses TRL's class with a `KeyedClient`. All ranks call this."""
    if not args.use_vllm:
        yield
        return
    trl_class, make_model = grpo_trainer.VLLMGeneration, grpo_trainer.create_model_from_path
    shared = SharedBase() if getattr(args, "vllm_share_weights", False) else None

    def generation(**kwargs: Any) -> VLLMGeneration:
        """Take the place of TRL's class. All ranks call this."""
        with restored_methods(kwargs["model"]):
            if vllm_sync == "adapter" and is_peft_model(kwargs["model"]):
                return AdapterGeneration(args, shared, **kwargs)
            if shared:
                raise cannot_share("no adapter is trained, so the base changes")
            if getattr(args, "staleness", 0):
                reason = "needs an adapter: full weights would change while the server samples"
                raise ConfigError("staleness", 1, reason, "train with use_peft, or leave it at 0")
            if vllm_sync == "adapter":
                switched_off("adapter sync", "no adapter is trained")
            if args.vllm_mode == "server":
                # TRL waits without a word, and its error comes with the tracebacks of two libraries. TRL's own server
                # has no version.
                server = Server(args.vllm_server_base_url or url_of(args.vllm_server_host, args.vllm_server_port))
                start = start_line(kwargs["model"], args, server.url)
                broadcast_from_main(partial(wait, server, args.vllm_server_timeout, start, has_version=False))
            return trl_class(**kwargs)

    if args.vllm_mode == "server":
        one_line_for_lost_servers()
    # TRL has no argument for these: its constructors look them up by name in these modules.
    make = partial(shared.create, make_model) if shared else make_model
    with (
        replaced(grpo_trainer, VLLMGeneration=generation, create_model_from_path=make),
        replaced(vllm_generation, VLLMClient=KeyedClient),
    ):
        yield


def start_line(model: Any, args: Any, url: str, rank: int = 0) -> str:
    """Return the command that starts the server of a training, for adapters of this rank or, with 0, for weights."""
    words = [
        "grpo-math serve --use_vllm true --vllm_mode server --model_name_or_path",
        model.config._name_or_path or "MODEL",
    ]
    if rank:
        words += ["--use_peft true --lora_r", str(rank), *["--staleness 1"] * bool(getattr(args, "staleness", 0))]
    words += [f"--port {port}"] if (port := urlsplit(url).port) else []
    lora = f" (vllm serve with --enable-lora --max-lora-rank {served_rank(rank)})" if rank else ""
    return f"Start it: {' '.join(words)}{lora}"


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


class KeyedClient(VLLMClient):
    """TRL's client with VLLM_API_KEY in every request of its session.

    TRL's constructor makes the session, and calls `check_server` before any request that needs the key.
    """

    def check_server(self, *arguments: Any, **kwargs: Any) -> None:
        if key():
            self.session.headers["Authorization"] = f"Bearer {key()}"
        super().check_server(*arguments, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict:
        return without_aborts(url, partial(super()._post, url, **kwargs))


class AdapterGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration`, which syncs adapters instead of weights."""

    # With staleness 1, `RolloutQueue.take_completions` samples the batches of training, by `request` and `sample`.
    take: Callable[[list[list[int]], int], list[Completion]] | None = None
    last_request: PrefetchedRollout | None = None
    context = 2**31  # vLLM's limit of prompt and completion tokens
    server: Server  # with vllm_mode server, on the main process
    loading = threading.Lock()

    def __init__(self, args: Any, shared: SharedBase | None, **kwargs: Any) -> None:
        self.shared = shared
        # TRL's constructor ends with `_init_vllm`, which reads these attributes.
        self.args = args
        self.run = uuid.uuid4().hex[:8]
        self.sent = 0  # adapters; each has its own folder
        self.folder = Path()  # of vLLM's current adapter, whose name is the folder's
        self.lost_requests = 0  # requests that failed because a server was lost, on the main process
        self.checked_requests = 0  # those before the last check
        # Rollouts requested so far. The seed of a batch follows from this number and the run's seed.
        self.rollouts = 0
        super().__init__(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {"sampled": self.rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rollouts = state["sampled"]

    # TRL's three methods

    def _init_vllm(self) -> None:
        # First, so that a refused adapter does not wait for an engine to load its weights.
        refuse_unserved(self.model)
        peft_config: Any = self.model.peft_config[ADAPTER]
        self.rank = peft_config.r
        # FSDP 1 flattens parameters, so an adapter has no separate tensors.
        if self._dist.fsdp_version == 1:
            raise ConfigError("fsdp_version", 1, "cannot be synced as an adapter", "use FSDP 2, or DeepSpeed")
        if self.shared and (kind := split_by(self.accelerator)):
            raise cannot_share(f"{kind} splits each weight over the GPUs")
        float32 = False  # in vLLM and in the trainer
        if self.mode == "server":
            float32, context = broadcast_from_main(self._connect)
            self.context = context
        else:
            self._load_colocated()
            self.context = self.max_model_length or self.context
        # The main process sends adapters to the server. Each process sends them to its colocated engine.
        if self.mode == "colocate" or self.accelerator.is_main_process:
            output_dir = Path(str(self.args.output_dir)).resolve()
            name = f"vllm_adapters_{self.accelerator.process_index}_"
            # A killed run leaves its folder. Other processes use theirs, so each removes only its own. Without the last
            # underscore, process 1 would also match the folders of process 10.
            for leftover in output_dir.glob(f"{name}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            # Absolute, because vLLM resolves a relative path in the server's working directory.
            self.root = output_dir / f"{name}{self.run}"
            # `finalize` also runs when the interpreter exits, which `__del__` need not.
            weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        self.canary = Canary(self.model, self.accelerator, float32, self._gather_answers, self._send, self.context)
        # As TRL after it loads vLLM: if processes are out of step, DeepSpeed may hang while it initializes.
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        # accelerate has prepared the model by now, and may have copied weights.
        if self.shared and not self.sent:
            self.shared.check(self.model)
        self._wake()
        self._send()
        # The check itself is in `generate`, because it needs the prompts.
        self.canary.due |= self.canary.agreed < 2

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> tuple:
        if any(image is not None for image in images or ()):
            raise UserError("vllm_sync=adapter supports text only: set vllm_sync to merged for prompts with images")
        # TRL's `generate` would call `sync_weights` if the weights slept. Here sleep keeps the base and the adapter, so
        # waking is enough.
        self._wake()
        all_prompts = gather_object(prompts) if self.mode == "server" else prompts
        if self.canary.due:
            self.canary.check(all_prompts, self.sent)
        if self.mode == "colocate":
            return super().generate(prompts, images, num_generations, profiler)
        # TRL repeats each prompt ``num_generations`` times in a row. One request samples the whole group.
        with profiler or nullcontext():
            completions, lost_requests = broadcast_from_main(
                lambda: (self._completions(all_prompts[::num_generations], num_generations), self.lost_requests)
            )
        if lost_requests > self.checked_requests:
            self.checked_requests = lost_requests
            self.canary.check(all_prompts, self.sent)
        # Ranks have equally many prompts, and `gather_object` keeps the order of ranks.
        first = self.accelerator.process_index * len(prompts)
        local_completions = completions[first : first + len(prompts)]
        # TRL expects a list of the top log-probs for each token. Only the sampled token's is requested.
        logps = [[[logp] for logp in completion.logps] for completion in local_completions]
        token_ids = [completion.tokens for completion in local_completions]
        return list(prompts), token_ids, logps, [[[token] for token in row] for row in token_ids]

    def watch(self, difference: float) -> None:
        """Compare the models again if the mean difference of their log-probs is too large in two rollouts in a row.

        All processes call this, before the update of the rollout.
        """
        if not self.canary.differs(difference, lags=bool(getattr(self.args, "staleness", 0))):
            return
        self._wake()
        self.canary.compare(1.0, self.sent)
        if self.mode == "colocate" and self.enable_sleep_mode:
            self.llm.sleep(level=2)  # as TRL calls it
            self._llm_weights_sleeping = True

    def _wake(self) -> None:
        if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:
            # As TRL does: torch's cached blocks may otherwise leave too little memory for vLLM's weights.
            vllm_generation.empty_cache()
            # Shared weights do not sleep.
            if self.shared is None:
                self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
            # Before 0.33 vLLM may lose an adapter while it sleeps (vllm-project/vllm#53888).
            self.canary.due |= self.canary.effect <= self.canary.tolerance

    # Server

    def _connect(self) -> tuple[bool, int]:
        """Check the server. Return True if the server and the trainer compute in float32, and the token limit."""
        url = self.server_base_url or url_of(self.server_host, self.server_port)
        # An answer may take long, so a server that no longer answers is noticed after this hour. The client does not
        # retry, because `_repeat_after_restart` does.
        self.server = server = Server(url, timeout=3600.0, retries=0)
        self._wait()
        settings = server.settings()
        lora, context = settings["lora_config"], settings["model_config"]["max_model_len"]
        if lora is None or lora["max_lora_rank"] < self.rank:
            has = "takes no adapters" if lora is None else f"takes adapters up to rank {lora['max_lora_rank']}"
            remedy = f"start it with --enable-lora --max-lora-rank {served_rank(self.rank)}, or lower the rank"
            raise ConfigError("lora_r", self.rank, f"cannot be served: {server.url} {has}", remedy)
        if getattr(self.args, "staleness", 0) and lora.get("max_loras", 1) < 2:
            reason = f"has two adapters at work, and {server.url} serves one at a time"
            raise ConfigError("staleness", 1, reason, "start it with --max-loras 2")
        if self.max_completion_length >= context:
            reason = f"leaves no room for a prompt in the {context} tokens of {server.url}"
            raise ConfigError(
                "max_completion_length", self.max_completion_length, reason, "start it with a larger --max-model-len"
            )
        # TRL's trainer reads the server's logprobs_mode through its client.
        self.vllm_client: Any = SimpleNamespace(get_server_info=server.settings)
        # The canary may be strict only if the model, the server and autocast all compute in float32.
        dtypes = {str(self.model.dtype), settings["model_config"]["dtype"], self.accelerator.mixed_precision} - {"no"}
        return {dtype.removeprefix("torch.") for dtype in dtypes} == {"float32"}, context

    def _completions(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """Sample on the main process."""
        if self.take is None:
            return self.sample(prompts, n)
        completions = self.take(prompts, n)
        self._remove_unused_adapters()
        return completions

    def sample(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """Sample ``n`` completions of each prompt with the adapter as it is now."""
        return self._sampling(prompts, n)()

    def request(self, prompts: list[list[int]], n: int, step: int) -> PrefetchedRollout:
        """Request completions by the adapter as it is now, after ``step`` optimizer steps, and do not wait."""
        self.last_request = PrefetchedRollout(prompts, step, self.folder).start(self._sampling(prompts, n))
        return self.last_request

    def _sampling(self, prompts: list[list[int]], n: int) -> Callable[[], list[Completion]]:
        """Return the call that samples ``n`` completions of each prompt for training.

        The seeds follow from the run's seed, so that another server or a restart does not change the samples.
        """
        # TRL's class has all other settings under the names of its trainer's arguments.
        request = request_from({**vars(self), "vllm_structured_outputs_regex": self.structured_outputs_regex})
        # Other keys, such as a seed, are the user's own.
        extra = {**self.generation_kwargs, **request.for_vllm()}
        self.rollouts += 1
        seed = batch_seed(self.args.seed, self.rollouts - 1)
        return self.sampling(prompts, seed, self.max_completion_length, n=n, extra=extra)

    def sampling(
        self, prompts: list[list[int]], seed: int, longest: int, **settings: Any
    ) -> Callable[[], list[Completion]]:
        """Return the call that samples at most ``longest`` tokens after each prompt, with the adapter as it is now.

        ``settings`` are those of `Server.generate`.
        """
        # Read now, because the call may run in a thread after a later sync has set another folder.
        folder = self.folder

        def ask(prompt: list[int], seed: int) -> list[Completion]:
            # The prompt of a later turn may be longer than TRL's limit.
            room = max(1, min(longest, self.context - len(prompt)))
            of_prompt = {"seed": seed, "max_tokens": room, **settings}
            # Requests are repeated one by one, so an error of one loses no other answer.
            call = partial(self.server.generate, prompt, model=folder.name, **of_prompt)
            return self._repeat_after_restart(call, folder)

        return partial(ask_each, ask, prompts, seed)

    # A server may restart at any time, with the base and no adapters. The seeds of the requests do not depend on that.
    def _repeat_after_restart(self, call: Callable[[], Any], folder: Path) -> Any:
        """Return what ``call`` returns. If the server was lost, repeat the call when the server is back and has the
        adapter of ``folder``."""

        def restore() -> None:
            self.lost_requests += 1
            self._wait()
            self._load(folder)

        return repeat_after_restart(self.server.url, call, restore, f"after sync {self.sent}")

    def _wait(self) -> None:
        start = start_line(self.model, self.args, self.server.url, self.rank)
        wait(self.server, self.server_timeout, start, f"({self.sent} syncs so far) ")

    def _load(self, folder: Path) -> None:
        # With staleness, two threads may find a restarted server without the adapter, and vLLM refuses a second load.
        with self.loading:
            if folder.name not in self.server.models():
                self.server.load_adapter(folder.name, str(folder))

    # Adapters

    def _send(self, scale: float = 1.0) -> None:
        """Send the adapter as it is now to vLLM under a new name. Adapters that no request needs are removed.

        All ranks call this.
        """
        # Outside of `broadcast_from_main`: every process takes part in gathering sharded tensors.
        tensors = adapter_tensors(self.model, self._dist.gather_params)
        self.sent += 1
        if self.mode == "server":
            broadcast_from_main(partial(self._publish, tensors, scale))
        else:
            self._publish(tensors, scale)

    def _publish(self, tensors: dict[str, torch.Tensor], scale: float) -> None:
        self.folder = self.root / f"{self.run}-{self.sent}"
        save_adapter(self.model, tensors, self.folder, scale)
        if self.mode == "colocate":
            from vllm.lora.request import LoRARequest

            # vLLM looks a loaded adapter up by its number, so each sync needs a new one, of at least 1.
            adapter = LoRARequest(self.folder.name, self.sent, str(self.folder))
            self.llm.generate = partial(self.llm.generate, lora_request=adapter)
        else:
            self._repeat_after_restart(partial(self._load, self.folder), self.folder)
        self._remove_unused_adapters()

    def _remove_unused_adapters(self) -> None:
        """Remove adapters from vLLM and the disk, except the last one and the one that is being sampled from."""
        running = self.last_request and not self.last_request.done() and self.last_request.folder
        for folder in set(self.root.iterdir()) - {self.folder, running}:
            if self.mode == "server":
                self._repeat_after_restart(partial(self.server.unload_adapter, folder.name), self.folder)
            shutil.rmtree(folder, ignore_errors=True)

    # Colocated

    def _load_colocated(self) -> None:
        """Load TRL's colocated engine with support for adapters, and share its base with the trainer if requested."""
        # TRL imports `LLM` into its module if vLLM is installed, and has no argument for these settings.
        llm_class: Any = getattr(vllm_generation, "LLM", None)  # None: TRL raises an error
        settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": served_rank(self.rank)}
        if self.shared:
            settings["dtype"] = str(self.model.dtype).removeprefix("torch.")
            # vLLM's other kernels for experts repack the weights.
            if self.accelerator.device.type == "cuda" and any("experts" in name for name in self.shared.modules):
                settings["moe_backend"] = "triton"

        def engine(**kwargs: Any) -> Any:
            llm = llm_class(**kwargs, **settings)
            sleep = llm.sleep
            # Level 1 keeps the base in main memory. TRL's level 2 discards it, and nothing would send it again.
            llm.sleep = partial(release_cache, llm, sleep) if self.shared else lambda level: sleep(level=1)
            return llm

        with replaced(vllm_generation, LLM=engine), self.shared.locate() if self.shared else nullcontext():
            super()._init_vllm()
        if self.shared:
            self.shared.attach(self.model, self.accelerator.device)

    # For the canary

    def _gather_answers(self, prompt: list[int]) -> list[Completion]:
        """Return a greedy continuation, with log-probs, of each replica of the server, or of each process's engine."""
        if self.mode == "server":
            return broadcast_from_main(partial(self._ask_server, prompt))
        from vllm import SamplingParams

        if self.enable_sleep_mode:
            # TRL wakes the key-value cache only inside `generate`, which runs after the canary.
            self.llm.wake_up(tags=["kv_cache"])
        # An end token must not shorten the comparison. `logprobs=0`: only the sampled token's log-prob.
        settings = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        # As TRL before `generate`, which may hang otherwise (huggingface/trl#3671).
        if self.tensor_parallel_size > 1:
            torch.distributed.barrier(device_ids=[self.accelerator.local_process_index])
        output = self.llm.generate([{"prompt_token_ids": prompt}], sampling_params=settings, use_tqdm=False)[0]
        tokens = list(output.outputs[0].token_ids)
        logps = [at[token].logprob for at, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        return gather_object([Completion(tokens, logps)])

    def _ask_server(self, prompt: list[int]) -> list[Completion]:
        greedy: Any = {"temperature": 0.0, "max_tokens": TOKENS, "extra": {"ignore_eos": True}}
        ask = partial(self.server.generate, prompt, model=self.folder.name, **greedy)
        calls = [
            partial(ask, replica=replica) for replica in self._repeat_after_restart(self.server.replicas, self.folder)
        ]
        return [answer for call in calls for answer in self._repeat_after_restart(call, self.folder)]
