"""Completions that are under way while the trainer trains: asked for in a thread, taken when their batch comes.

>>> asked = Asked([[1, 2]], step=3, folder=None).start(lambda: Sampled([[7]], [[-0.5]]))
>>> asked.result().token_ids, Asked.of(asked.plain()).result() == asked.result()
([[7]], True)

Does not know what is asked, nor of whom (sync.py hands that in), nor which prompts come next (trainer/prefetch.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from grpo_math.generation.server import Sampled


class Asked:
    """The completions of ``prompts``, by the adapter in ``folder`` as it was after ``step`` optimizer steps.

    ``seconds``: what the servers took for them, from the request to the last answer.
    """

    def __init__(self, prompts: list[list[int]], step: int, folder: Path | None) -> None:
        self.prompts, self.step, self.folder, self.seconds = prompts, step, folder, 0.0
        self._found: Future[Sampled] = Future()

    def start(self, sample: Callable[[], Sampled]) -> Asked:
        """Ask, in a thread of its own; what ``sample`` raises is raised by `result`."""

        def run() -> None:
            started = time.perf_counter()
            try:
                sampled = sample()
            except BaseException as error:
                self._found.set_exception(error)
                return
            self.seconds = time.perf_counter() - started
            self._found.set_result(sampled)

        threading.Thread(target=run, daemon=True).start()
        return self

    def result(self) -> Sampled:
        """The completions, once all are there."""
        return self._found.result()

    def wait(self) -> None:
        """Until all are there, or have failed."""
        wait([self._found])

    def plain(self) -> dict[str, Any] | None:
        """The completions as a checkpoint keeps them, once all are there; None where they failed."""
        if self._found.exception() is not None:
            return None
        return {"prompts": self.prompts, "step": self.step, "seconds": self.seconds, **self.result()._asdict()}

    @staticmethod
    def of(kept: Asked | dict[str, Any] | None) -> Asked | None:
        """What `plain` gave; an `Asked`, and None, as it is."""
        if not isinstance(kept, dict):
            return kept
        asked = Asked(kept["prompts"], kept["step"], None)
        asked.seconds = kept["seconds"]
        asked._found.set_result(Sampled(kept["token_ids"], kept["logprobs"]))
        return asked
