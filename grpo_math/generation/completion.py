"""`Completion`: the text of a model after a prompt, in training and evaluation, from transformers or vLLM.

Shapes: T is the number of tokens of a completion.

>>> Completion([5, 6, 2], logps=[-0.5, -0.1, -0.9]).truncated
False

A completion with a tool call: two tokens of the model, three of the result, and one of the next turn.

>>> Completion([5, 6, 7, 8, 9, 2], mask=[1, 1, 0, 0, 0, 1], calls=1).written
3

Imports no torch, because planner and doctor use the client of a server.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    Backends (`completions.with_model`, `vllm_server.Server.generate`) make the first turn, and `turns.run_tool_loop`
    adds the later turns.

    ``tokens`` (T,): token ids, with the end token. With tools, the results of calls and later turns follow.
    ``logps`` (T,): log-probs under the model that sampled, 0 for a token of a result. None for a log-prob that vLLM
    could not compute, or instead of the list if log-probs were not requested.
    ``mask`` (T,): 1 for a token that the model wrote, 0 for a token of a result. Empty without tools.
    ``truncated``: a limit ended the last turn (`is_truncated`).
    ``text``: the decoded tokens; with tools, the text of the last turn. ``messages``: the turns and results of a chat.
    ``failures``: calls that raised or timed out; ``timeouts``: those that timed out.
    """

    tokens: list[int]
    logps: list[float | None] | None = None
    text: str = ""
    truncated: bool = False
    mask: Sequence[int] = ()
    messages: Sequence[dict[str, Any]] = ()
    calls: int = 0
    failures: int = 0
    timeouts: int = 0

    @property
    def written(self) -> int:
        """Return the number of tokens that the model wrote."""
        return sum(self.mask) if self.mask else len(self.tokens)


def is_truncated(tokenizer: Any, ids: Sequence[int], ends: Collection[int], stop: Sequence[str] = ()) -> bool:
    """Return True if a limit ended a turn, and neither one of the tokens ``ends`` nor one of the texts ``stop``.

    vLLM removes a stop string from a completion's text, but its tokens contain the stop string.
    """
    if ids and ids[-1] in ends:
        return False
    text = tokenizer.decode(ids) if stop else ""
    return not any(end in text for end in stop)
