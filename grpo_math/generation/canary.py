"""The canary: a prompt on which vLLM's log-probs of a greedy continuation must agree with the trainer's.

The check follows the first sync, and the first sync after the adapter has changed. A few updates change log-probs by
less than rounding does. So the second check also sends the adapter, in the same way, with its effect multiplied until
the change is clearly visible.

vLLM may lose an adapter later. An effect above the tolerance is missed in the log-probs of every rollout (`differs`). A
smaller effect is checked again whenever vLLM may have lost it: after a restart, and after a sleep.

sync.py passes the functions that request a completion and send an adapter.
"""

import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft.helpers import rescale_adapter_scale

from grpo_math.errors import UserError
from grpo_math.generation.adapters import logps
from grpo_math.generation.completion import Completion
from grpo_math.system.collectives import broadcast_from_main

TOKENS = 16
LARGEST_SCALE = 2.0**24
# Tokens in a block of vLLM's prefix cache: 16 on GPUs, 128 on CPUs. The larger number serves both.
BLOCK = 128


class Canary:
    """Compares vLLM's log-probs with the trainer's.

    ``ask`` returns a greedy continuation of `TOKENS` from every engine. ``send`` sends the current adapter with its
    effect times a factor. ``context`` is the engine's longest context in tokens.

    Rounding may cause more in fewer bits:

    >>> from types import SimpleNamespace
    >>> [Canary(SimpleNamespace(), None, float32, None, None, 4096).tolerance for float32 in (True, False)]
    [0.02, 0.2]
    >>> names = "is_loaded_in_4bit", "is_loaded_in_8bit"
    >>> [Canary(SimpleNamespace(**{name: True}), None, True, None, None, 4096).tolerance for name in names]
    [0.4, 0.4]
    """

    def __init__(
        self,
        model: Any,
        accelerator: Any,
        float32: bool,
        ask: Callable[[list[int]], list[Completion]],
        send: Callable[[float], None],
        context: int,
    ) -> None:
        self.model = model
        self.accelerator = accelerator
        self.ask = ask
        self.send = send
        self.context = context
        self.prompt: list[int] = []
        # The checks that have passed. 1: the first sync. 2: a changed adapter, so no check is left.
        self.agreed = 0
        self.due = False
        self.effect = 0.0  # of the adapter on the log-probs, at the last check
        # The mean differences between the log-probs of vLLM and the trainer's in the last rollouts.
        self.differences = deque[float](maxlen=100)
        self.suspicious = 0  # the number of rollouts in a row with a larger difference
        # The mean difference of log-probs, in nats, that rounding may cause: several times the measured one (0.03 in
        # bfloat16).
        quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
        self.tolerance = 0.4 if quantised else 0.02 if float32 else 0.2

    def check(self, prompts: list[list[int]], sync: int) -> None:
        """Raise `UserError` if vLLM's log-probs are not the trainer's. All ranks call this."""
        self.due = False
        self.prompt = self.prompt or broadcast_from_main(partial(self._prompt, prompts))
        if not self.agreed:
            self.effect = self.compare(1.0, sync)
            self.agreed = 1
            return

        scale = self._visible_scale()
        if scale is None:  # no update has changed the adapter yet
            return
        self.send(scale)
        change = self.compare(scale, sync)
        # The true adapter replaces the scaled one. The second comparison shows that vLLM does not reuse the scaled one,
        # for example from its prefix cache.
        self.send(1.0)
        self.effect = self.compare(1.0, sync)
        # If the adapter hardly changed the log-probs, the base could have agreed, too: check again after a later sync.
        if change > 2 * self.tolerance:
            self.agreed = 2

    def _prompt(self, prompts: list[list[int]]) -> list[int]:
        """Return tokens for two blocks of the prefix cache, or as many as fit into the context.

        They are the prompts, preceded by the same tokens in random order. A model would copy from repeated prompts, and
        a wrong model copies as well as the right one.

        >>> canary, prompts = Canary(None, None, True, None, None, context=4096), [[5, 6], [7], [5, 6]]
        >>> len(canary._prompt(prompts)), canary._prompt(prompts)[-3:], set(canary._prompt(prompts))
        (257, [5, 6, 7], {5, 6, 7})
        >>> canary._prompt([list(range(300))]) == list(range(257))
        True
        >>> canary.context = 20  # 16 tokens of the continuation, and one more
        >>> len(canary._prompt(prompts))
        3
        """
        row = [token for ids in dict.fromkeys(map(tuple, prompts)) for token in ids]
        # vLLM always computes the last token of a prompt. With one more token it can reuse two whole blocks.
        length = min(2 * BLOCK + 1, self.context - TOKENS - 1)
        filler = random.Random(0).choices(row, k=max(0, length - len(row)))
        return (filler + row)[:length]

    def _visible_scale(self) -> float | None:
        """Return a power of 2 that makes the adapter's effect on the log-probs at least 5 tolerances, or None.

        All ranks call this.
        """
        # The prompt is its own continuation here, so vLLM is not asked. A power of 2 is exact both in lora_alpha, which
        # vLLM reads, and in peft's scaling.
        prompt, continuation = self.prompt[:1], self.prompt[1:]
        base, scale = self._broadcast_logps(0.0, prompt, continuation), 1.0
        while scale <= LARGEST_SCALE:
            change = (self._broadcast_logps(scale, prompt, continuation) - base).abs().mean().item()
            if change >= 5 * self.tolerance:
                return scale
            # A linear effect would reach 6 tolerances with this factor. An adapter's effect is not linear, so the
            # factor is at least 2 and at most 64.
            scale *= 2.0 ** min(6, max(1, math.ceil(math.log2(6 * self.tolerance / max(change, 1e-9)))))
        return None

    def differs(self, difference: float, lags: bool) -> bool:
        """Return True if the mean difference of log-probs was too large in two rollouts in a row.

        ``lags``: the sampler's adapter is older than the trainer's, which causes a usual difference.

        >>> canary = Canary(None, None, True, None, None, 4096)
        >>> [canary.differs(difference, lags=False) for difference in (0.01, 0.03, 0.01, 0.03, math.nan, 0.03)]
        [False, False, False, False, True, False]
        >>> canary = Canary(None, None, True, None, None, 4096)
        >>> [canary.differs(difference, lags=True) for difference in (0.01, 0.03, 0.05, 0.06, 0.06)]
        [False, False, False, True, False]
        """
        usual = statistics.median(self.differences) if lags and self.differences else 0.0
        # Not `>`, which is False for NaN.
        self.suspicious = 0 if difference <= usual + self.tolerance else self.suspicious + 1
        self.differences.append(difference)
        return self.suspicious > 0 and self.suspicious % 2 == 0

    def compare(self, scale: float, sync: int) -> float:
        """Compare vLLM's log-probs with the trainer's. Return how much the adapter, times ``scale``, changes them.

        All ranks call this.
        """
        change = math.inf
        for completion in self.ask(self.prompt):
            trainer_logps = self._broadcast_logps(scale, self.prompt, completion.tokens)
            base = self._broadcast_logps(0.0, self.prompt, completion.tokens)
            from_base = (trainer_logps - base).abs().mean().item()
            vllm_logps = torch.tensor([math.nan if logp is None else logp for logp in completion.logps or ()])
            difference = (trainer_logps - vllm_logps).abs().mean().item()
            limit = self.tolerance + 0.1 * from_base
            # Not `difference > limit`, which is False for NaN, a log-prob that vLLM could not compute.
            if not difference <= limit:
                raise UserError(
                    f"vLLM samples the wrong model: after sync {sync} its log-probs are {difference:.3f} nats from "
                    f"the trainer's, and at most {limit:.3f} is rounding: check that it serves the base that is "
                    "trained, in the same precision, and that nothing else loads adapters into it"
                )
            change = min(change, from_base)
        return change

    def _broadcast_logps(self, scale: float, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """Return the main process's log-probs on every process, so that all decide the same.

        Every process computes log-probs, because the others may need its share of the parameters.
        """
        with rescale_adapter_scale(self.model, scale), self.accelerator.autocast():
            values = [logps(self.model, prompt, completion)]
        broadcast_object_list(values, from_process=0)
        return values[0]
