"""`Completion`: the text of a model after a prompt, in training and evaluation, from transformers or vLLM.

Shapes: T is the number of tokens of a completion.

>>> Completion([5, 6, 2], logps=[-0.5, -0.1, -0.9]).truncated
False

Imports no torch, because planner and doctor use the client of a server.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt.

    ``tokens`` (T,): token ids, with the end token.
    ``logps`` (T,): log-probs under the model that sampled. None for a log-prob that vLLM could not compute, or instead
    of the list if log-probs were not requested.
    ``text``: the decoded tokens. ``truncated``: a limit ended the completion (`is_truncated`).
    """

    tokens: list[int]
    logps: list[float | None] | None = None
    text: str = ""
    truncated: bool = False


def is_truncated(tokenizer: Any, ids: Sequence[int], ends: Collection[int], stop: Sequence[str] = ()) -> bool:
    """Return True if a limit ended a completion, and neither one of the tokens ``ends`` nor one of the texts ``stop``.

    vLLM removes a stop string from a completion's text, but its tokens contain the stop string.
    """
    if ids and ids[-1] in ends:
        return False
    text = tokenizer.decode(ids) if stop else ""
    return not any(end in text for end in stop)
