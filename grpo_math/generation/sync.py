"""Let TRL generate by vLLM with the trained adapter alone: the base model never changes (``vllm_sync: adapter``).

TRL merges the adapter into the base, sends every weight, and unmerges the adapter. Each time this changes a bfloat16
base a little and a 4-bit base more, and it needs NCCL. Here a sync saves the trained tensors (a few MB) to a new folder
(adapter_store.py), and vLLM loads the folder as a LoRA adapter.

`AdapterGeneration` is the seam: TRL's trainer calls it, and it hands over to

- `ServerSampler` or `ColocatedSampler`: token ids -> completions;
- `Prefetch`, with ``staleness: 1``: the next batch is sampled while one is trained on;
- `Canary`: checks that vLLM samples from the trained model.

`adapter_sync` replaces TRL's generation class during the constructor of TRL's trainer. It also replaces TRL's client,
which does not support a key, by a client that sends VLLM_API_KEY. TRL sends full weights. Images are not supported.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from accelerate.utils import is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.adapter_store import AdapterStore
from grpo_math.generation.adapters import ADAPTER, refuse_unserved
from grpo_math.generation.canary import Canary, rounding
from grpo_math.generation.colocated_sampler import ColocatedSampler, adapter_engine, restored_methods
from grpo_math.generation.lost_server import one_line_for_lost_servers, wait
from grpo_math.generation.prefetch import Prefetch
from grpo_math.generation.request import request_from
from grpo_math.generation.sampler import Sampler
from grpo_math.generation.server_sampler import ServerSampler
from grpo_math.generation.shared import SharedBase, cannot_share
from grpo_math.generation.vllm_server import Server, key, served_rank, without_aborts
from grpo_math.run.speed_ups import switched_off
from grpo_math.run.weights import split_by
from grpo_math.system.addresses import address_towards, server_url
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.replaced import replaced


@contextmanager
def adapter_sync(vllm_sync: str, args: Any) -> Iterator[None]:
    """Make TRL's trainer use an `AdapterGeneration` inside this context, if it trains a PEFT adapter and ``vllm_sync``
    is adapter. Otherwise the trainer uses TRL's class with a `KeyedClient`. All ranks call this."""
    if not args.use_vllm:
        yield
        return
    if args.vllm_mode == "server":
        one_line_for_lost_servers()
    choice = GenerationChoice(vllm_sync, args)
    # TRL has no argument for these: its constructors look them up by name in these modules.
    with (
        replaced(grpo_trainer, VLLMGeneration=choice.generation, create_model_from_path=choice.create_model),
        replaced(vllm_generation, VLLMClient=KeyedClient),
    ):
        yield


class GenerationChoice:
    """Two functions of TRL's module while its trainer's constructor runs: one makes the policy, one what generates.

    All ranks call both.
    """

    def __init__(self, vllm_sync: str, args: Any) -> None:
        self.args = args
        self.asks_for_adapter = vllm_sync == "adapter"
        self.shared = SharedBase() if getattr(args, "vllm_share_weights", False) else None
        self.trl_class, self.trl_create_model = grpo_trainer.VLLMGeneration, grpo_trainer.create_model_from_path

    def create_model(self, path: str, **kwargs: Any) -> Any:
        return (
            self.shared.create(self.trl_create_model, path, **kwargs)
            if self.shared
            else self.trl_create_model(path, **kwargs)
        )

    def generation(self, **kwargs: Any) -> VLLMGeneration:
        with restored_methods(kwargs["model"]):
            if self.asks_for_adapter and is_peft_model(kwargs["model"]):
                return AdapterGeneration(self.args, self.shared, **kwargs)
            self._refuse_without_adapter()
            if self.args.vllm_mode == "server":
                self._wait_for_server(kwargs["model"])
            return self.trl_class(**kwargs)

    def _refuse_without_adapter(self) -> None:
        """Raise `ConfigError` for settings that need an adapter, and log that TRL sends whole weights."""
        if self.shared:
            raise cannot_share("no adapter is trained, so the base changes")
        if getattr(self.args, "staleness", 0):
            reason = "needs an adapter: full weights would change while the server samples"
            raise ConfigError("staleness", 1, reason, "train with use_peft, or leave it at 0")
        if self.asks_for_adapter:
            switched_off("adapter sync", "no adapter is trained")

    def _wait_for_server(self, model: Any) -> None:
        """Wait for the server, and log that. All ranks call this.

        TRL waits without a line, and its error comes with the tracebacks of two libraries.
        """
        args = self.args
        server = Server(args.vllm_server_base_url or server_url(args.vllm_server_host, args.vllm_server_port))
        start = start_line(model, args, server.url)
        # TRL's own server has no version.
        broadcast_from_main(partial(wait, server, args.vllm_server_timeout, start, has_version=False))


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


class KeyedClient(VLLMClient):
    """TRL's client with VLLM_API_KEY in every request of its session, and without the proxies of the environment.

    TRL's constructor makes the session, and calls `check_server` before any other request.
    """

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        # Without the environment, requests also ignores this variable.
        self.session.verify = os.environ.get("REQUESTS_CA_BUNDLE", True)
        self.session.trust_env = False
        if key():
            self.session.headers["Authorization"] = f"Bearer {key()}"
        # TRL's own method asks through a proxy, and repeats a request for ever if the proxy refuses it.
        Server(self.base_url).wait(total_timeout)

    def init_communicator(self, device: Any = 0) -> None:
        # vLLM's default is the address of the default route. Anyone who reaches the port there can run code in the
        # server, because the workers unpickle the data that they receive.
        if address := address_towards(str(self.host)):
            os.environ.setdefault("VLLM_HOST_IP", address)
        super().init_communicator(device)

    def _post(self, url: str, **kwargs: Any) -> dict:
        return without_aborts(url, partial(super()._post, url, **kwargs))


class AdapterGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration`, which syncs adapters instead of weights. Hands over to a `Sampler`.

    ``args``: the training arguments. ``shared``: the base, if the trainer and a colocated engine share it.
    """

    def __init__(self, args: Any, shared: SharedBase | None, **kwargs: Any) -> None:
        # TRL's constructor ends with `_init_vllm`, which reads these attributes.
        self.args = args
        self.shared = shared
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        # First, so that a refused adapter does not wait for an engine to load its weights.
        refuse_unserved(self.model)
        # FSDP 1 flattens parameters, so an adapter has no separate tensors.
        if self._dist.fsdp_version == 1:
            raise ConfigError("fsdp_version", 1, "cannot be synced as an adapter", "use FSDP 2, or DeepSpeed")
        if self.shared and (kind := split_by(self.accelerator)):
            raise cannot_share(f"{kind} splits each weight over the GPUs")
        peft_config: Any = self.model.peft_config[ADAPTER]
        # Absolute, because vLLM resolves a relative path in the server's working directory.
        output_dir, process = Path(str(self.args.output_dir)).resolve(), self.accelerator.process_index
        store = AdapterStore(self.model, self._dist.gather_params, output_dir, process)
        lags = bool(getattr(self.args, "staleness", 0))
        self.sampler: Sampler
        self.prefetch: Prefetch | None = None
        if self.mode == "server":
            self.sampler = server = self._connect(store, peft_config.r)
            server.broadcast_limits(peft_config.r, 1 + lags, self.max_completion_length)
            # The main process sends all requests.
            self.prefetch = Prefetch(server) if lags and self.accelerator.is_main_process else None
        else:
            with adapter_engine(self.model, peft_config.r, self.accelerator.device, self.shared):
                super()._init_vllm()
            self.sampler = ColocatedSampler(self, super().generate, store, self.shared)
        self.context = self.sampler.context
        tolerance = rounding(self.model, self.sampler.dtype, self.accelerator.mixed_precision)
        self.canary = Canary(self.model, self.accelerator, self.sampler, tolerance, lags)
        # As TRL after it loads vLLM: if processes are out of step, DeepSpeed may hang while it initializes.
        self.accelerator.wait_for_everyone()

    def _connect(self, store: AdapterStore, rank: int) -> ServerSampler:
        url = self.server_base_url or server_url(self.server_host, self.server_port)
        sampler = ServerSampler(
            url,
            store,
            partial(training_settings, self),
            seed=self.args.seed,
            start=start_line(self.model, self.args, url, rank),
            seconds=self.server_timeout,
        )
        # TRL's trainer reads the server's logprobs_mode through its client.
        self.vllm_client: Any = SimpleNamespace(get_server_info=sampler.server.settings)
        return sampler

    def sync_weights(self) -> None:
        """Send the adapter as it is now. All ranks call this."""
        # accelerate has prepared the model by now, and may have copied weights.
        if self.shared and not self.sampler.store.sent:
            self.shared.check(self.model)
        self.canary.wake()
        self.sampler.broadcast_adapter()
        # The check itself is in `generate`, because it needs the prompts.
        self.canary.due |= self.canary.agreed < 2

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> tuple:
        if any(image is not None for image in images or ()):
            raise UserError("vllm_sync=adapter supports text only: set vllm_sync to merged for prompts with images")
        self.canary.wake()
        if self.canary.due:
            self.canary.check(prompts)
        with profiler or nullcontext():
            # Only the main process has a `prefetch`. The others wait in the sampler for what it returns.
            completions = (self.prefetch or self.sampler).gather_completions(prompts, num_generations)
        if self.sampler.restarted:
            self.canary.check(prompts)
        # TRL expects a list of the top log-probs for each token. Only the sampled token's is requested.
        logps = [[[logp] for logp in completion.logps or ()] for completion in completions]
        token_ids = [completion.tokens for completion in completions]
        return list(prompts), token_ids, logps, [[[token] for token in row] for row in token_ids]


def training_settings(trl: Any) -> dict[str, Any]:
    """Return the settings of training's completions, which TRL's `VLLMGeneration` has under its arguments' names."""
    request = request_from({**vars(trl), "vllm_structured_outputs_regex": trl.structured_outputs_regex})
    # Other keys, such as a seed, are the user's own.
    return {"longest": trl.max_completion_length, "extra": {**trl.generation_kwargs, **request.for_vllm()}}
