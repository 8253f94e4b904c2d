"""One step off policy (``staleness: 1``): while a batch is trained on, the servers sample the next one.

At rollout k the adapter of step k goes to the servers, the prompts of batch k+1 are asked of it, and batch k, which
was asked of the adapter of rollout k-1, is scored and trained on. The first batch is sampled on policy. TRL's old
log-probs are the policy's own, and its vLLM importance correction (their ratio to what the sampler said) is therefore
that of the older adapter too: the loss needs no term of ours.

The next prompts are read off the sampler, whose order follows from the seed. `Asked` (generation/ahead.py) runs the
requests; no collective is in its thread. A checkpoint keeps the batch that is under way, so that a run goes on as if
it had not stopped.

Does not sample: generation/sync.py does.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, cast

import torch
from trl.trainer.utils import RepeatSampler

from grpo_math.errors import ConfigError
from grpo_math.generation.ahead import Asked
from grpo_math.run import metrics


class Ahead:
    """What the servers are asked for ahead, of a trainer; its `AdapterGeneration` asks it."""

    def __init__(self, trainer: Any) -> None:
        asks = {"tools": trainer.tools, "rollout_func": trainer.rollout_func}
        asks |= {"environments": trainer.environment_factories}
        # The next batch is requested by its prompts, so nothing else may decide what a server is asked.
        if name := next((name for name, value in asks.items() if value), None):
            reason = f"cannot prefetch: {name} change what is requested from vLLM"
            raise ConfigError("staleness", 1, reason, "leave it at 0")
        if not isinstance(trainer.train_dataset, Sized):
            raise ConfigError("staleness", 1, "needs a train_dataset of known length", "leave it at 0")
        self.trainer, self.generation = trainer, trainer.vllm_generation
        self._at = -1  # the training step of the batch that was taken last
        self.generation.look = self

    @property
    def is_rollout(self) -> bool:
        """Whether what is sampled now is a batch of the training: no evaluation, and no groups drawn in addition."""
        return self.trainer._mode == "train" and self.trainer._step != self._at

    @property
    def step(self) -> int:
        """After how many optimizer steps the adapter that the servers have was sent."""
        return self.trainer._last_loaded_step

    def take(self, asked: Asked, waited: float) -> None:
        """Say of the batch that training goes on with how old it is, and what of its sampling was not waited for."""
        trainer = self.trainer
        self._at = trainer._step
        values = {metrics.STALENESS: trainer.state.global_step - asked.step, metrics.SECONDS_SAMPLING: asked.seconds}
        trainer._log({**values, metrics.SECONDS_OVERLAP: max(0.0, asked.seconds - waited)})

    def send(self, drawn: bool = False) -> None:
        """Ask for the next batch, where there is one; where groups are drawn again, once they are ``drawn``."""
        # Resampling asks the same servers. Their answers come first, because training waits for them.
        waits = self.trainer._resampler is not None and not drawn
        if self.trainer.accelerator.is_main_process and not waits and (prompts := self._next()):
            self.generation.ask(prompts, self.trainer.num_generations)

    def _next(self) -> list[list[int]]:
        """The prompts of the next batch, each once; none if training ends with this batch."""
        trainer, args = self.trainer, self.trainer.args
        sampler: RepeatSampler = trainer._sampler
        steps_per_batch = args.steps_per_generation * trainer.num_iterations  # training steps, as all counts here
        batches = sampler.num_samples // sampler.batch_size  # of an epoch
        batch, epoch = trainer._step // steps_per_batch % batches, int(trainer.state.epoch or 0)
        is_last = batch + 1 == batches
        # The optimizer steps of this epoch that are done when this batch begins, and when it ends. transformers takes
        # an optimizer step at the end of an epoch even if fewer training steps are left than it accumulates.
        before = batch * steps_per_batch // args.gradient_accumulation_steps
        after = (batch + 1) * steps_per_batch / args.gradient_accumulation_steps
        after = math.ceil(after) if is_last else math.floor(after)
        if trainer.state.global_step + after - before >= trainer.state.max_steps:
            return []
        epoch, batch = (epoch + 1, 0) if is_last else (epoch, batch + 1)
        rows = order(sampler, epoch)[batch * sampler.batch_size : (batch + 1) * sampler.batch_size]
        return trainer._tokenize_prompts([trainer.train_dataset[row]["prompt"] for row in rows])[0]


def order(sampler: RepeatSampler, epoch: int) -> list[int]:
    """The problems in the order in which a sampler of TRL's takes them in its ``epoch``-th pass, from 0.

    >>> sampler = RepeatSampler("abcdef", 1, seed=3)
    >>> [order(sampler, 0), order(sampler, 1)] == [list(sampler), list(sampler)]
    True
    """
    if not sampler.shuffle:
        return list(range(sampler.num_samples))
    generator = torch.Generator().manual_seed(cast(int, sampler.seed))
    # RepeatSampler draws one permutation an epoch from a generator that it keeps.
    for _ in range(epoch):
        torch.randperm(sampler.num_samples, generator=generator)
    return torch.randperm(sampler.num_samples, generator=generator).tolist()
