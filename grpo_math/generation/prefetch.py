"""Completions that are sampled during training: a thread requests them, and the trainer takes them with their batch.

>>> prefetch = PrefetchedRollout([[1, 2]], step=3).start(lambda: [Completion([7], [-0.5])])
>>> prefetch.result()[0].tokens, prefetch.seconds > 0
([7], True)
>>> PrefetchedRollout.from_state_dict(prefetch.state_dict()).state_dict() == prefetch.state_dict()
True
>>> PrefetchedRollout([[1, 2]], step=3).start(lambda: 1 / 0).state_dict() is None
True

sync.py sends the requests, and trainer/rollout_queue.py chooses the prompts.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from grpo_math.generation.completion import Completion


class PrefetchedRollout(Future[list[Completion]]):
    """The completions of ``prompts`` by the adapter in ``folder``, as it was after ``step`` optimizer steps.

    ``seconds``: from the first request to the last answer.
    """

    def __init__(self, prompts: list[list[int]], step: int, folder: Path = Path()) -> None:
        super().__init__()
        self.prompts = prompts
        self.step = step
        self.folder = folder
        self.seconds = 0.0

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
