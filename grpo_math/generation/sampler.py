"""`Sampler`: what `ServerSampler` and `ColocatedSampler` have in common."""

from abc import ABC, abstractmethod

from grpo_math.generation.adapter_store import AdapterStore
from grpo_math.generation.completion import Completion
from grpo_math.run.stateful import Stateful


class Sampler(Stateful, ABC):
    """vLLM with the newest adapter of ``store``.

    ``context``: the most tokens of a prompt with its completion. ``dtype``: in which vLLM computes, or an empty text if
    that is not known. ``restarted``: vLLM may have lost the adapter during the last completions.
    """

    context = 2**31
    dtype = ""
    restarted = False

    def __init__(self, store: AdapterStore) -> None:
        self.store = store

    @abstractmethod
    def broadcast_adapter(self, scale: float = 1.0) -> None:
        """Sample from the adapter as it is now, its effect times ``scale``. All ranks call this."""

    @abstractmethod
    def gather_completions(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """Return a completion of each of this rank's prompts. Each comes ``n`` times in a row. All ranks call this."""

    @abstractmethod
    def gather_greedy(self, prompt: list[int], tokens: int) -> list[Completion]:
        """Return the first ``tokens`` of a greedy continuation, with log-probs, by each copy of the model in vLLM.

        An end token does not end the continuation. All ranks call this.
        """

    def wake(self) -> bool:
        """Wake vLLM. Return True if its weights were asleep, so that it may have lost the adapter."""
        return False

    def sleep(self) -> None:
        """Let vLLM sleep until the next rollout, if this run lets it sleep."""
