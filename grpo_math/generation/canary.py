"""The canary: a prompt on which vLLM's log-probs of a greedy continuation have to agree with the trainer's.

It follows the first sync, and the first one after the adapter has moved. A few updates move log-probs by less than
rounding does; so the second time the adapter is also sent with its effect multiplied until it is plain to see, by the
same way.

Does not talk to vLLM: sync.py hands in how it is asked, and how an adapter is sent to it.
"""

import logging
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from grpo_math.errors import UserError
from grpo_math.generation.adapters import logps, scaled
from grpo_math.generation.completion import Completion
from grpo_math.run.main_process import on_main

logger = logging.getLogger(__name__)

TOKENS = 16
LARGEST_SCALE = 2.0**24


class Canary:
    """``ask``: a greedy continuation of `TOKENS` from every engine; ``send``: the adapter as it is now, its effect
    times a factor; ``room``: the size of a block of vLLM's prefix cache, and the longest context."""

    def __init__(
        self,
        model: Any,
        accelerator: Any,
        float32: bool,
        ask: Callable[[list[int]], list[Completion]],
        send: Callable[[float], None],
        room: Callable[[], tuple[int, int]],
    ) -> None:
        self.model, self.accelerator = model, accelerator
        self.ask, self.send, self.room = ask, send, room
        self.prompt: list[int] = []
        self.agreed = 0  # 2: with an adapter that had moved, and nothing is left to show
        self.due = False
        # Nats between the two forwards, on average over the tokens, that rounding may make: several times what was seen
        # (0.03 in bfloat16).
        quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
        self.tolerance = 0.4 if quantised else 0.02 if float32 else 0.2

    def check(self, prompts: list[list[int]], sync: int) -> None:
        """Raise `UserError` where vLLM's log-probs are not the trainer's."""
        self.due = False
        self.prompt = self.prompt or on_main(partial(self._prompt, prompts))
        if not self.agreed:
            self._compare(1.0, sync)
            self.agreed = 1
            return
        scale = self._visible_scale()
        if scale is None:  # no update has moved the adapter yet
            return
        self.send(scale)
        moved = self._compare(scale, sync)
        self.send(1.0)
        self._compare(1.0, sync)
        if moved > 2 * self.tolerance:
            self.agreed = 2

    def _prompt(self, prompts: list[list[int]]) -> list[int]:
        """Two blocks of the prefix cache (as far as the context has room): prompts, and before them their tokens in
        disorder. Prompts over and over would be copied from, which a wrong model does as well as the right one."""
        block, longest = self.room()
        row = [token for ids in dict.fromkeys(map(tuple, prompts)) for token in ids]
        length = min(2 * block + 1, longest - TOKENS - 1)
        filler = random.Random(0).choices(row, k=max(0, length - len(row)))
        return (filler + row)[:length]

    def _visible_scale(self) -> float | None:
        """A power of 2 that, times the adapter's effect, moves the trainer's log-probs by 5 tolerances; None where
        nothing does."""
        prompt, rest = self.prompt[:1], self.prompt[1:]
        base, scale = self._trainers(0.0, prompt, rest), 1.0
        while scale <= LARGEST_SCALE:
            moved = (self._trainers(scale, prompt, rest) - base).abs().mean().item()
            if moved >= 5 * self.tolerance:
                return scale
            scale *= 2.0 ** min(6, max(1, math.ceil(math.log2(6 * self.tolerance / max(moved, 1e-9)))))
        return None

    def _compare(self, scale: float, sync: int) -> float:
        """How far the adapter, with its effect times ``scale``, moves the trainer's log-probs of what vLLM samples."""
        farthest, moved = 0.0, math.inf
        for completion in self.ask(self.prompt):
            ours = self._trainers(scale, self.prompt, completion.tokens)
            base = self._trainers(0.0, self.prompt, completion.tokens) if scale != 1 else ours
            from_base = (ours - base).abs().mean().item()
            apart = (
                (ours - torch.tensor([math.nan if x is None else x for x in completion.logps or ()]))
                .abs()
                .mean()
                .item()
            )
            limit = self.tolerance + 0.1 * from_base
            if not apart <= limit:
                raise UserError(
                    f"vLLM samples the wrong model: after sync {sync} its log-probs are {apart:.3f} nats from "
                    f"the trainer's, and at most {limit:.3f} is rounding: see that it serves the base that is trained, "
                    "in the same precision, and that nothing else loads adapters into it"
                )
            farthest, moved = max(farthest, apart), min(moved, from_base)
        logger.info("canary: sync %d, adapter x %g, %.4f nats apart", sync, scale, farthest)
        return moved

    def _trainers(self, scale: float, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """The main process's, so that all decide alike; every process computes them, since its parameters may be
        needed for the others'."""
        with scaled(self.model, scale), self.accelerator.autocast():
            values = [logps(self.model, prompt, completion)]
        broadcast_object_list(values, from_process=0)
        return values[0]
