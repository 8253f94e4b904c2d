"""`ServerSampler`: token ids -> completions of the trained adapter, by a vLLM server.

The main process sends all requests, one for each prompt. A restarted server gets the adapter again, and lost
completions are sampled again. The seeds of the requests do not depend on that.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from grpo_math.errors import ConfigError
from grpo_math.generation.adapter_store import AdapterStore
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import ask_each, batch_seed
from grpo_math.generation.lost_server import repeat_after_restart, wait
from grpo_math.generation.sampler import Sampler
from grpo_math.generation.vllm_server import ANSWER_SECONDS, Server, answer_seconds, served_rank
from grpo_math.system.collectives import broadcast_from_main


class ServerSampler(Sampler):
    """Sends requests to the server at ``url``.

    ``training`` returns the settings of training's completions: ``longest`` and ``extra`` of `sampling`. ``start``: the
    line about the command that starts the server. ``seconds``: to wait for a server that does not answer.
    """

    SAVED = ("sampled",)

    def __init__(
        self,
        url: str,
        store: AdapterStore,
        training: Callable[[], dict[str, Any]],
        *,
        seed: int,
        start: str,
        seconds: float,
    ) -> None:
        super().__init__(store)
        # An answer may take long, so a server that no longer answers is noticed after an hour or more. The client does
        # not retry, because `_repeat_after_restart` does.
        self.server = Server(url, timeout=ANSWER_SECONDS, retries=0)
        self.training = training
        self.seed = seed
        self.start = start
        self.seconds = seconds
        # Batches requested so far. The seed of a batch follows from this number and the run's seed.
        self.sampled = 0
        self.lost_requests = 0  # requests that failed because the server was lost, on the main process
        self.seen_lost_requests = 0  # those before the last completions
        self.loading = threading.Lock()

    def broadcast_limits(self, rank: int, adapters: int, longest: int) -> None:
        """Wait for the server, and read its limits. All ranks call this.

        Raises `ConfigError` for a server that cannot serve adapters of this ``rank``, this number of ``adapters`` at a
        time, or completions of ``longest`` tokens.
        """
        self.dtype, self.context = broadcast_from_main(partial(self._read_limits, rank, adapters, longest))

    def _read_limits(self, rank: int, adapters: int, longest: int) -> tuple[str, int]:
        url = self.server.url
        self._wait()
        settings = self.server.settings()
        lora, context = settings["lora_config"], settings["model_config"]["max_model_len"]
        if lora is None or lora["max_lora_rank"] < rank:
            has = "takes no adapters" if lora is None else f"takes adapters up to rank {lora['max_lora_rank']}"
            remedy = f"start it with --enable-lora --max-lora-rank {served_rank(rank)}, or lower the rank"
            raise ConfigError("lora_r", rank, f"cannot be served: {url} {has}", remedy)
        if lora.get("max_loras", 1) < adapters:
            reason = f"has two adapters at work, and {url} serves one at a time"
            raise ConfigError("staleness", 1, reason, "start it with --max-loras 2")
        if longest >= context:
            reason = f"leaves no room for a prompt in the {context} tokens of {url}"
            raise ConfigError("max_completion_length", longest, reason, "start it with a larger --max-model-len")
        return settings["model_config"]["dtype"], context

    # Completions

    def gather_completions(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """See `Sampler`. One request samples the ``n`` completions of a prompt."""
        return self.gather_from_main(prompts, n, self.sample)

    def gather_from_main(
        self, prompts: list[list[int]], n: int, sample: Callable[[list[list[int]], int], list[Completion]]
    ) -> list[Completion]:
        """Return this rank's share of the completions that ``sample`` returns on the main process, ``n`` of each prompt
        of all ranks. All ranks call this."""
        all_prompts = gather_object(prompts)
        completions, lost_requests = broadcast_from_main(lambda: (sample(all_prompts[::n], n), self.lost_requests))
        self.restarted = lost_requests > self.seen_lost_requests
        self.seen_lost_requests = lost_requests
        # Ranks have equally many prompts, and `gather_object` keeps the order of ranks.
        first = PartialState().process_index * len(prompts)
        return completions[first : first + len(prompts)]

    def sample(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """Sample ``n`` completions of each prompt for training, with the adapter as it is now, on the main process."""
        return self.training_request(prompts, n)()

    def training_request(self, prompts: list[list[int]], n: int) -> Callable[[], list[Completion]]:
        """Return the call that samples ``n`` completions of each prompt for training.

        The seeds follow from the run's seed, so that another server or a restart does not change the samples.
        """
        self.sampled += 1
        return self.request(prompts, batch_seed(self.seed, self.sampled - 1), n=n, **self.training())

    def request(
        self, prompts: list[list[int]], seed: int, longest: int, n: int = 1, **settings: Any
    ) -> Callable[[], list[Completion]]:
        """Return the call that samples ``n`` completions of at most ``longest`` tokens after each prompt, with the
        adapter as it is now.

        ``settings`` are those of `Server.generate`.
        """
        settings |= {"n": n, "timeout": answer_seconds(len(prompts) * n * longest)}
        # Read now, because the call may run in a thread after a later sync.
        folder = self.store.current
        self.store.requested.append(folder)

        def ask(prompt: list[int], seed: int) -> list[Completion]:
            # The prompt of a later turn may be longer than TRL's limit.
            room = max(1, min(longest, self.context - len(prompt)))
            call = partial(self.server.generate, prompt, model=folder.name, seed=seed, max_tokens=room, **settings)
            # Requests are repeated one by one, so an error of one loses no other answer.
            return self._repeat_after_restart(call, folder)

        def ask_all() -> list[Completion]:
            try:
                return ask_each(ask, prompts, seed)
            finally:
                self.store.requested.remove(folder)

        return ask_all

    def gather_greedy(self, prompt: list[int], tokens: int) -> list[Completion]:
        """See `Sampler`. Each replica of the server has a copy of the model."""
        return broadcast_from_main(partial(self._ask_replicas, prompt, tokens))

    def _ask_replicas(self, prompt: list[int], tokens: int) -> list[Completion]:
        folder = self.store.current
        greedy: Any = {"temperature": 0.0, "max_tokens": tokens, "extra": {"ignore_eos": True}}
        ask = partial(self.server.generate, prompt, model=folder.name, **greedy)
        calls = [partial(ask, replica=one) for one in self._repeat_after_restart(self.server.replicas, folder)]
        return [answer for call in calls for answer in self._repeat_after_restart(call, folder)]

    # Adapters

    def broadcast_adapter(self, scale: float = 1.0) -> None:
        """See `Sampler`. The adapter is loaded under a new name."""
        # Outside of `broadcast_from_main`: every process takes part in gathering sharded tensors.
        tensors = self.store.gather_next()
        broadcast_from_main(partial(self._publish, tensors, scale))

    def _publish(self, tensors: dict[str, Tensor], scale: float) -> None:
        self.store.write(tensors, scale)
        self._repeat_after_restart(partial(self._load, self.store.current), self.store.current)
        self.remove_unused()

    def remove_unused(self) -> None:
        """Remove adapters from the server and the disk, except the newest and those that requests need."""
        for folder in self.store.unused():
            self._repeat_after_restart(partial(self.server.unload_adapter, folder.name), self.store.current)
            self.store.remove(folder)

    # A server may restart at any time, with the base and no adapters.

    def _repeat_after_restart(self, call: Callable[[], Any], folder: Path) -> Any:
        """Return what ``call`` returns. If the server was lost, repeat the call when the server is back and has the
        adapter of ``folder``."""

        def restore() -> None:
            self.lost_requests += 1
            self._wait()
            self._load(folder)

        return repeat_after_restart(self.server.url, call, restore, f"after sync {self.store.sent}")

    def _wait(self) -> None:
        wait(self.server, self.seconds, self.start, f"({self.store.sent} syncs so far) ")

    def _load(self, folder: Path) -> None:
        # With staleness, two threads may find a restarted server without the adapter, and vLLM refuses a second load.
        with self.loading:
            if folder.name not in self.server.models():
                self.server.load_adapter(folder.name, str(folder))
