"""The order of rollouts: which problems come next, which are drawn in addition, and what is requested in advance.

On policy, a rollout has the prompts of TRL's sampler. `Resampler` draws more.

With ``staleness: 1`` the servers sample the next rollout while this one is trained on. Rollout k sends the adapter of
step k to the servers and requests batch k+1 from them. Then batch k, which the adapter of rollout k-1 has sampled, is
scored and trained on. The first batch is sampled on policy. The loss needs no additional term: TRL's old log-probs are
the current policy's, so its vLLM importance correction (their ratio to the sampler's log-probs) corrects for the older
adapter, too. The next prompts follow from the sampler, whose order follows from the seed.

`Prefetch` (generation/prefetch.py) sends the requests and keeps the requested batch. The queue tells it the prompts.
"""

import math
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.trainer.utils import RepeatSampler

from grpo_math.algorithm.resample import Resampler
from grpo_math.algorithm.rollout import Rollout
from grpo_math.errors import ConfigError
from grpo_math.generation.prefetch import Prefetch
from grpo_math.run import metrics
from grpo_math.settings.vllm import NO_PREFETCH

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer

Inputs = list[dict[str, Any]]


@dataclass(eq=False)
class RolloutQueue:
    """Chooses the problems of a trainer's rollouts.

    ``sampler``: TRL's, of the current run. ``resampler``: None without ``resample_groups``. ``prefetch``: samples the
    next batch with ``staleness``; None on other ranks than the first. ``step`` returns the number of the training step;
    ``tokenize`` is TRL's.
    """

    trainer: "TrlTrainer"
    resampler: Resampler | None
    prefetch: Prefetch | None
    step: Callable[[], int]
    tokenize: Callable[[list[Any]], Any]
    sampler: Any = None

    def gather_resampled(
        self, rollout: Rollout, inputs: Inputs, sample: Callable[[Inputs, int], Rollout]
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to train on, and metrics. All ranks call this.

        ``sample`` samples the rows of a `Resampler`.
        """
        counts: dict[str, float] = {}
        if self.resampler:
            rollout, counts = self.resampler.gather_replaced(rollout, inputs, sample)
            # Not in `training_batch`: resampling uses the same servers, and training waits for its requests.
            if self.prefetch and (prompts := self.next_prompts()):
                self.prefetch.request(prompts, self.trainer.num_generations, self.trainer.state.global_step)
        return rollout, counts | self._prefetch_metrics()

    # With staleness

    def training_batch(self) -> AbstractContextManager[None]:
        """Inside this context TRL samples a batch of training: the requested one. The next one is requested then, or
        after resampling.
        """
        if self.prefetch is None:
            return nullcontext()
        following = [] if self.resampler else self.next_prompts()
        return self.prefetch.training_batch(self.trainer.state.global_step, following)

    def _prefetch_metrics(self) -> dict[str, float]:
        """Return the metrics of the batch that `prefetch` has sampled, if any."""
        batch = self.prefetch and self.prefetch.taken
        if not batch:
            return {}
        return {
            metrics.STALENESS: self.trainer.state.global_step - batch.step,
            metrics.SECONDS_SAMPLING: batch.seconds,
            metrics.SECONDS_OVERLAP: max(0.0, batch.seconds - batch.waited),
        }

    def next_prompts(self) -> list[list[int]]:
        """Return the prompts of the next batch, each once; an empty list if training ends with this batch."""
        trainer, args = self.trainer, self.trainer.args
        size = self.sampler.batch_size
        batches = self.sampler.num_samples // size  # per epoch
        # Training steps, not optimizer steps.
        steps = args.steps_per_generation * trainer.num_iterations
        batch = self.step() // steps % batches
        updates = optimizer_steps(batch, batches, steps, args.gradient_accumulation_steps)
        if trainer.state.global_step + updates >= trainer.state.max_steps:
            return []
        epochs, following = divmod(batch + 1, batches)
        rows = order(self.sampler, int(trainer.state.epoch or 0) + epochs)[following * size : (following + 1) * size]
        return list(self.tokenize([trainer.train_dataset[row]["prompt"] for row in rows])[0])


def refuse_unknown_requests(trainer: "TrlTrainer") -> None:
    """Raise `ConfigError` if the requests of the next batch are not known from its prompts."""
    requesters = {
        "tools": trainer.tools,
        "rollout_func": trainer.rollout_func,
        "environments": trainer.environment_factories,
    }
    if name := next((name for name, value in requesters.items() if value), None):
        raise ConfigError("staleness", 1, NO_PREFETCH.format(name), "leave it at 0")
    if not isinstance(trainer.train_dataset, Sized):
        raise ConfigError("staleness", 1, "needs a train_dataset of known length", "leave it at 0")


def optimizer_steps(batch: int, batches: int, steps: int, accumulation: int) -> int:
    """Return the number of optimizer steps that end with a training step of number ``batch`` of an epoch's ``batches``.

    A batch has ``steps`` training steps, and an optimizer step has ``accumulation``. At the end of an epoch,
    transformers takes an optimizer step even if fewer training steps are left.

    >>> [optimizer_steps(batch, batches=3, steps=3, accumulation=2) for batch in range(3)]
    [1, 2, 2]
    """
    start, end = batch * steps // accumulation, (batch + 1) * steps / accumulation
    return (math.ceil(end) if batch + 1 == batches else math.floor(end)) - start


def order(sampler: RepeatSampler, epoch: int) -> list[int]:
    """Return the problems in the order of the ``epoch``-th pass, from 0, of TRL's sampler.

    >>> sampler = RepeatSampler("abcdef", 1, seed=3)
    >>> [order(sampler, 0), order(sampler, 1)] == [list(sampler), list(sampler)]
    True
    """
    again = RepeatSampler(sampler.data_source, 1, shuffle=sampler.shuffle, seed=sampler.seed)
    # RepeatSampler draws one permutation an epoch from a generator that it keeps.
    for _ in range(epoch):
        next(iter(again))
    return list(again)
