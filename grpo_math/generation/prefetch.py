"""Completions that are sampled during training: a thread requests them, and their batch takes them.

>>> prefetch = PrefetchedRollout([[1, 2]], step=3).start(lambda: [Completion([7], [-0.5])])
>>> prefetch.result()[0].tokens, prefetch.seconds > 0
([7], True)
>>> PrefetchedRollout.from_state_dict(prefetch.state_dict()).state_dict() == prefetch.state_dict()
True
>>> PrefetchedRollout([[1, 2]], step=3).start(lambda: 1 / 0).state_dict() is None
True

trainer/rollout_queue.py chooses the prompts.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_math.generation.completion import Completion
from grpo_math.run.speed_ups import switched_off

if TYPE_CHECKING:
    from grpo_math.generation.server_sampler import ServerSampler


class PrefetchedRollout(Future[list[Completion]]):
    """The completions of ``prompts`` by the adapter in ``folder``, as it was after ``step`` optimizer steps.

    ``seconds``: from the first request to the last answer. ``waited``: seconds of them that its batch waited.
    """

    def __init__(self, prompts: list[list[int]], step: int, folder: Path = Path()) -> None:
        super().__init__()
        self.prompts = prompts
        self.step = step
        self.folder = folder
        self.seconds = 0.0
        self.waited = 0.0

    def start(self, sample: Callable[[], list[Completion]]) -> "PrefetchedRollout":
        """Call ``sample`` in a thread. `result` raises what ``sample`` raises."""

        def run() -> None:
            started = time.perf_counter()
            try:
                completions = sample()
            # Without a result and an exception, `result` would wait forever.
            except BaseException as error:
                self.set_exception(error)
                return
            self.seconds = time.perf_counter() - started
            self.set_result(completions)

        # Not an executor, which would keep the interpreter from exiting while a server is unreachable.
        threading.Thread(target=run, daemon=True).start()
        return self

    def wait(self) -> None:
        """Wait until the completions have arrived or failed."""
        wait([self])

    def state_dict(self) -> dict[str, Any] | None:
        """Wait, and return plain types for a checkpoint; None if the completions failed."""
        if self.exception() is not None:
            return None
        rows = [(completion.tokens, completion.logps) for completion in self.result()]
        return {"prompts": self.prompts, "step": self.step, "seconds": self.seconds, "rows": rows}

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> "PrefetchedRollout":
        prefetch = PrefetchedRollout(state["prompts"], state["step"])
        prefetch.seconds = state["seconds"]
        prefetch.set_result([Completion(tokens, logps) for tokens, logps in state["rows"]])
        return prefetch


class Prefetch:
    """Samples each batch of training during the batch before it. Wraps a `ServerSampler`.

    ``requested``: the next batch. ``taken``: the last batch of training that was taken, on the main process.
    """

    def __init__(self, sampler: "ServerSampler") -> None:
        self.sampler = sampler
        self.requested: PrefetchedRollout | None = None
        self.taken: PrefetchedRollout | None = None
        # The arguments of `training_batch` inside its context. TRL, which samples there, does not pass them on.
        self._batch: tuple[int, list[list[int]]] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.requested}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        batch = state.get("asked")
        # A snapshot of a step contains the object itself, a checkpoint its state.
        self.requested = PrefetchedRollout.from_state_dict(batch) if isinstance(batch, dict) else batch

    @contextmanager
    def training_batch(self, step: int, following: list[list[int]]) -> Iterator[None]:
        """Inside this context the completions are those of a batch of training, after ``step`` optimizer steps.

        ``following``: the prompts to request then, if any.
        """
        self._batch = (step, following)
        try:
            yield
        finally:
            self._batch = None

    def request(self, prompts: list[list[int]], n: int, step: int) -> None:
        """Request the next batch from the adapter as it is now, after ``step`` optimizer steps, and do not wait."""
        self.requested = self._started(prompts, n, step)

    def gather_completions(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """Return a completion of each of this rank's prompts, as the sampler does. The main process calls this, and the
        others the sampler's."""
        return self.sampler.gather_from_main(prompts, n, self._sample)

    def _sample(self, prompts: list[list[int]], n: int) -> list[Completion]:
        if self._batch:
            completions = self._take(prompts, n, *self._batch)
        else:
            # An evaluation, or additional groups: the requested batch is kept for the next batch of training.
            if self.requested is not None:
                self.requested.wait()
            completions = self.sampler.sample(prompts, n)
        self.sampler.remove_unused()
        return completions

    def _take(self, prompts: list[list[int]], n: int, step: int, following: list[list[int]]) -> list[Completion]:
        if self.requested is not None and self.requested.prompts != prompts:
            switched_off("prefetch", "a batch differed from the prefetched prompts")
            self.requested = None
        batch, started = self.requested or self._started(prompts, n, step), time.perf_counter()
        # Finish this request first: after a restart two threads would load the same adapter.
        if batch.folder == self.sampler.store.current:
            batch.wait()
        self.requested = None
        # Before waiting, so that the server always has requests.
        if following:
            self.request(following, n, step)
        completions = batch.result()
        batch.waited = time.perf_counter() - started
        self.taken = batch
        return completions

    def _started(self, prompts: list[list[int]], n: int, step: int) -> PrefetchedRollout:
        rollout = PrefetchedRollout(prompts, step, self.sampler.store.current)
        return rollout.start(self.sampler.training_request(prompts, n))
