"""Prefetch the next rollout (``staleness: 1``): while a batch is trained on, the servers sample the next one.

Rollout k sends the adapter of step k to the servers and requests batch k+1 from it. Then batch k, which the adapter of
rollout k-1 has sampled, is scored and trained on. The first batch is sampled on policy. The loss needs no additional
term: TRL's old log-probs are the current policy's, so its vLLM importance correction (their ratio to the sampler's
log-probs) corrects for the older adapter, too.

The next prompts follow from the sampler, whose order follows from the seed. `PrefetchedRollout`
(generation/prefetch.py) runs the requests in a thread without collectives. A checkpoint contains the prefetched batch,
so that a run can resume.
"""

import math
from collections.abc import Sized
from typing import TYPE_CHECKING

from trl.trainer.utils import RepeatSampler

from grpo_math.errors import ConfigError
from grpo_math.generation.prefetch import PrefetchedRollout
from grpo_math.run import metrics

if TYPE_CHECKING:
    from grpo_math.trainer.trainer import MathGRPOTrainer


class Prefetch:
    """Chooses what the trainer's `AdapterGeneration` requests in advance."""

    def __init__(self, trainer: "MathGRPOTrainer") -> None:
        requesters = {
            "tools": trainer.tools,
            "rollout_func": trainer.rollout_func,
            "environments": trainer.environment_factories,
        }
        # The next batch is requested by its prompts, so nothing else may decide what a server is asked.
        if name := next((name for name, value in requesters.items() if value), None):
            raise ConfigError(
                "staleness", 1, f"cannot prefetch: {name} change what is requested from vLLM", "leave it at 0"
            )
        if not isinstance(trainer.train_dataset, Sized):
            raise ConfigError("staleness", 1, "needs a train_dataset of known length", "leave it at 0")
        self.trainer = trainer
        self.generation = trainer.vllm_generation
        self._taken_at = -1  # the training step at which the last batch was taken
        self.generation.prefetch = self

    @property
    def is_rollout(self) -> bool:
        """Return True if the current samples are a training batch, and not an evaluation or additional groups."""
        return self.trainer.model.training and self.trainer.training_steps != self._taken_at

    @property
    def step(self) -> int:
        """The optimizer step at which the servers' adapter was sent: TRL sends the adapter before each rollout."""
        return self.trainer.state.global_step

    def take(self, batch: PrefetchedRollout, waited: float) -> None:
        """Log the age of the next training batch, and the seconds of its sampling that training did not wait for."""
        trainer = self.trainer
        self._taken_at = trainer.training_steps
        trainer.add_metrics(
            {
                metrics.STALENESS: trainer.state.global_step - batch.step,
                metrics.SECONDS_SAMPLING: batch.seconds,
                metrics.SECONDS_OVERLAP: max(0.0, batch.seconds - waited),
            }
        )

    def send(self, resampled: bool = False) -> None:
        """Request the next batch, if there is one. With resampling, only after the groups are ``resampled``."""
        # Resampling uses the same servers. Send its requests first, because training waits for them.
        waits = self.trainer.resampler is not None and not resampled
        if self.trainer.accelerator.is_main_process and not waits and (prompts := self._next_prompts()):
            self.generation.request(prompts, self.trainer.num_generations)

    def _next_prompts(self) -> list[list[int]]:
        """Return the prompts of the next batch, each once; none if training ends with this batch."""
        trainer, args = self.trainer, self.trainer.args
        sampler: RepeatSampler = trainer.train_sampler
        batches = sampler.num_samples // sampler.batch_size  # per epoch
        # Training steps, not optimizer steps.
        steps_per_batch = args.steps_per_generation * trainer.num_iterations
        batch, epoch = trainer.training_steps // steps_per_batch % batches, int(trainer.state.epoch or 0)
        is_last = batch + 1 == batches
        # A batch need not begin and end with an optimizer step. At the end of an epoch, transformers takes an optimizer
        # step even if fewer training steps are left than it accumulates: the last batch rounds up.
        steps_at_start = batch * steps_per_batch // args.gradient_accumulation_steps
        steps_at_end = (batch + 1) * steps_per_batch / args.gradient_accumulation_steps
        steps_at_end = math.ceil(steps_at_end) if is_last else math.floor(steps_at_end)
        if trainer.state.global_step + steps_at_end - steps_at_start >= trainer.state.max_steps:
            return []
        epoch, batch = (epoch + 1, 0) if is_last else (epoch, batch + 1)
        if trainer.unsolved is None:
            rows = order(sampler, epoch)[batch * sampler.batch_size : (batch + 1) * sampler.batch_size]
        else:
            rows = trainer.unsolved.next
        return trainer.prompt_tokens([trainer.train_dataset[row]["prompt"] for row in rows])


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
