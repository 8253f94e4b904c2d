"""The canary: a prompt on which vLLM's log-probs of a greedy continuation must agree with the trainer's.

The check follows the first sync, and the first sync after the adapter has changed. A few updates change log-probs by
less than rounding does. So the second check also sends the adapter, in the same way, with its effect multiplied until
the change is clearly visible.

vLLM may lose an adapter later. An effect above the tolerance is missed in the log-probs of every rollout (`differs`). A
smaller effect is checked again whenever vLLM may have lost it: after a restart, and after a sleep.
"""

import math
import random
import statistics
from collections import deque
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft.helpers import rescale_adapter_scale

from grpo_math.errors import UserError
from grpo_math.generation.adapters import logps
from grpo_math.generation.sampler import Sampler
from grpo_math.system.collectives import broadcast_from_main

TOKENS = 16
LARGEST_SCALE = 2.0**24
# Tokens in a block of vLLM's prefix cache: 16 on GPUs, 128 on CPUs. The larger number serves both.
BLOCK = 128


def rounding(model: Any, dtype: str, mixed_precision: str) -> float:
    """Return the mean difference of log-probs, in nats, that rounding may cause: several times the measured one (0.03
    in bfloat16).

    ``dtype``: vLLM's, or an empty text. ``mixed_precision``: accelerate's.

    >>> from types import SimpleNamespace as Model
    >>> [rounding(Model(dtype=torch.float32), dtype, "no") for dtype in ("torch.float32", "torch.bfloat16", "")]
    [0.02, 0.2, 0.2]
    >>> names = "is_loaded_in_4bit", "is_loaded_in_8bit"
    >>> [rounding(Model(dtype=torch.float32, **{name: True}), "torch.float32", "no") for name in names]
    [0.4, 0.4]
    """
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        return 0.4
    # Strict only if the model, vLLM and autocast all compute in float32.
    dtypes = {str(one).removeprefix("torch.") for one in (model.dtype, dtype, mixed_precision)} - {"no"}
    return 0.02 if dtypes == {"float32"} else 0.2


class Canary:
    """Compares the log-probs of a ``sampler`` with those of ``model``, the trainer's.

    ``tolerance``: see `rounding`. ``lags``: the sampler's adapter is usually older than the trainer's.
    """

    def __init__(self, model: Any, accelerator: Any, sampler: Sampler, tolerance: float, lags: bool = False) -> None:
        self.model = model
        self.accelerator = accelerator
        self.sampler = sampler
        self.tolerance = tolerance
        self.lags = lags
        self.prompt: list[int] = []
        # The checks that have passed. 1: the first sync. 2: a changed adapter, so no check is left.
        self.agreed = 0
        self.due = False
        self.effect = 0.0  # of the adapter on the log-probs, at the last check
        # The mean differences between the log-probs of vLLM and the trainer's in the last rollouts.
        self.differences = deque[float](maxlen=100)
        self.suspicious = 0  # the number of rollouts in a row with a larger difference

    def wake(self) -> None:
        """Wake vLLM. If it was asleep, a check is due unless `differs` would notice that the adapter is lost."""
        if self.sampler.wake():
            # Before 0.33 vLLM may lose an adapter while it sleeps (vllm-project/vllm#53888).
            self.due |= self.effect <= self.tolerance

    def watch(self, difference: float) -> None:
        """Compare the models again if ``difference``, the mean difference of the log-probs of a rollout, is too large
        in two rollouts in a row.

        All ranks call this, before the update of the rollout.
        """
        if self.differs(difference):
            self.wake()
            self.compare(1.0, self.sampler.store.sent)
            self.sampler.sleep()

    def check(self, prompts: list[list[int]]) -> None:
        """Raise `UserError` if vLLM's log-probs are not the trainer's. All ranks call this."""
        # The scaled adapter is sent, too, and is not counted in an error.
        self.due = False
        sync = self.sampler.store.sent
        self.prompt = self.prompt or broadcast_from_main(partial(self._prompt, prompts))
        if not self.agreed:
            self.effect = self.compare(1.0, sync)
            self.agreed = 1
            return

        scale = self._visible_scale()
        if scale is None:  # no update has changed the adapter yet
            return
        self.sampler.broadcast_adapter(scale)
        change = self.compare(scale, sync)
        # The true adapter replaces the scaled one. The second comparison shows that vLLM does not reuse the scaled one,
        # for example from its prefix cache.
        self.sampler.broadcast_adapter()
        self.effect = self.compare(1.0, sync)
        # If the adapter hardly changed the log-probs, the base could have agreed, too: check again after a later sync.
        if change > 2 * self.tolerance:
            self.agreed = 2

    def _prompt(self, prompts: list[list[int]]) -> list[int]:
        """Return tokens for two blocks of the prefix cache, or as many as fit into the context.

        They are the prompts, preceded by the same tokens in random order. A model would copy from repeated prompts, and
        a wrong model copies as well as the right one.

        >>> from types import SimpleNamespace as Engine
        >>> canary, prompts = Canary(None, None, Engine(context=4096), 0.02), [[5, 6], [7], [5, 6]]
        >>> len(canary._prompt(prompts)), canary._prompt(prompts)[-3:], set(canary._prompt(prompts))
        (257, [5, 6, 7], {5, 6, 7})
        >>> canary._prompt([list(range(300))]) == list(range(257))
        True
        >>> canary.sampler.context = 20  # 16 tokens of the continuation, and one more
        >>> len(canary._prompt(prompts))
        3
        """
        row = [token for ids in dict.fromkeys(map(tuple, prompts)) for token in ids]
        # vLLM always computes the last token of a prompt. With one more token it can reuse two whole blocks.
        length = min(2 * BLOCK + 1, self.sampler.context - TOKENS - 1)
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

    def differs(self, difference: float) -> bool:
        """Return True if the mean difference of log-probs was too large in two rollouts in a row.

        >>> [*map(Canary(None, None, None, 0.02).differs, (0.01, 0.03, 0.01, 0.03, math.nan, 0.03))]
        [False, False, False, False, True, False]
        >>> [*map(Canary(None, None, None, 0.02, lags=True).differs, (0.01, 0.03, 0.05, 0.06, 0.06))]
        [False, False, False, True, False]
        """
        usual = statistics.median(self.differences) if self.lags and self.differences else 0.0
        # Not `>`, which is False for NaN.
        self.suspicious = 0 if difference <= usual + self.tolerance else self.suspicious + 1
        self.differences.append(difference)
        return self.suspicious > 0 and self.suspicious % 2 == 0

    def compare(self, scale: float, sync: int) -> float:
        """Compare vLLM's log-probs with the trainer's. Return how much the adapter, times ``scale``, changes them.

        ``sync``: the number of the sync, for the error.

        All ranks call this.
        """
        change = math.inf
        for completion in self.sampler.gather_greedy(self.prompt, TOKENS):
            trainer_logps = self._broadcast_logps(scale, self.prompt, completion.tokens)
            base = self._broadcast_logps(0.0, self.prompt, completion.tokens)
            from_base = (trainer_logps - base).abs().mean().item()
            vllm_logps = torch.tensor([math.nan if logp is None else logp for logp in completion.logps or ()])
            difference = (trainer_logps - vllm_logps).abs().mean().item()
            limit = self.tolerance + 0.1 * from_base
            # Not `difference > limit`, which is False for NaN, a log-prob that vLLM could not compute.
            if not difference <= limit:
                raise UserError(
                    f"vLLM samples the wrong model: after sync {sync} its log-probs are "
                    f"{difference:.3f} nats from the trainer's, and at most {limit:.3f} is rounding: check that it "
                    "serves the base that is trained, in the same precision, and that nothing else loads adapters into "
                    "it"
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
