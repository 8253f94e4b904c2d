"""The order of rollouts: which problems come next, which are drawn in addition, and what is requested in advance.

On policy, a rollout has the prompts of TRL's sampler. `Resampler` draws more.

With ``staleness: 1`` the servers sample the next rollout while this one is trained on. Rollout k sends the adapter of
step k to the servers and requests batch k+1 from them. Then batch k, which the adapter of rollout k-1 has sampled, is
scored and trained on. The first batch is sampled on policy. The loss needs no additional term: TRL's old log-probs are
the current policy's, so its vLLM importance correction (their ratio to the sampler's log-probs) corrects for the older
adapter, too. The next prompts follow from the sampler, whose order follows from the seed.

`PrefetchedRollout` (generation/prefetch.py) runs the requests in a thread without collectives. A checkpoint contains
the requested batch, so that a run can resume.
"""

import math
import time
from collections.abc import Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from trl.trainer.utils import RepeatSampler

from grpo_math.algorithm.resample import Resampler
from grpo_math.algorithm.rollout import Rollout
from grpo_math.errors import ConfigError
from grpo_math.generation.completion import Completion
from grpo_math.generation.prefetch import PrefetchedRollout
from grpo_math.run import metrics
from grpo_math.run.speed_ups import switched_off
from grpo_math.settings.vllm import NO_PREFETCH
from grpo_math.trainer.meter import StepMeter

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer

Inputs = list[dict[str, Any]]


class RolloutQueue:
    """Chooses the problems of a trainer's rollouts, and requests the next batch from the servers.

    ``sampler``: TRL's, of the current run. ``requested``: the next batch, with ``staleness``.
    """

    def __init__(self, trainer: "TrlTrainer", settings: "MathGRPOConfig", meter: StepMeter) -> None:
        self.trainer = trainer
        self.meter = meter
        self.sampler: Any = None
        self.resampler = None
        if settings.resample_groups:
            self.resampler = Resampler(
                settings.resample_groups,
                trainer.train_dataset,
                trainer.args.seed,
                trainer.num_generations,
                trainer.accelerator,
            )
        self.requested: PrefetchedRollout | None = None
        self._taken_at = -1  # the training step at which the last batch was taken
        self._samples_ahead = bool(settings.staleness)
        if self._samples_ahead:
            self._refuse_unknown_requests()
            self._generation.take = self.take_completions

    @property
    def _generation(self) -> Any:
        return self.trainer.vllm_generation

    def gather_resampled(
        self, rollout: Rollout, inputs: Inputs, sample: Callable[[Inputs, int], Rollout]
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to train on, and metrics. All ranks call this.

        ``sample`` samples the rows of a `Resampler`.
        """
        if self.resampler is None:
            return rollout, {}
        rollout, counts = self.resampler.gather_replaced(rollout, inputs, sample)
        # Not earlier: resampling uses the same servers, and training waits for its requests.
        self._request_next()
        return rollout, counts

    # With staleness

    def _refuse_unknown_requests(self) -> None:
        """Raise `ConfigError` if the requests of the next batch are not known from its prompts."""
        trainer = self.trainer
        requesters = {
            "tools": trainer.tools,
            "rollout_func": trainer.rollout_func,
            "environments": trainer.environment_factories,
        }
        if name := next((name for name, value in requesters.items() if value), None):
            raise ConfigError("staleness", 1, NO_PREFETCH.format(name), "leave it at 0")
        if not isinstance(trainer.train_dataset, Sized):
            raise ConfigError("staleness", 1, "needs a train_dataset of known length", "leave it at 0")

    def take_completions(self, prompts: list[list[int]], n: int) -> list[Completion]:
        """Return ``n`` completions of each prompt, on the main process: the requested ones, if this is their batch."""
        trainer, generation = self.trainer, self._generation
        # In an evaluation, and for additional groups, the requested batch is kept for the next training batch.
        if not trainer.model.training or trainer._step == self._taken_at:
            if self.requested is not None:
                self.requested.wait()
            return list(generation.sample(prompts, n))
        if self.requested is not None and self.requested.prompts != prompts:
            switched_off("prefetch", "a batch differed from the prefetched prompts")
            self.requested = None
        batch, started = (
            self.requested or generation.request(prompts, n, trainer.state.global_step),
            time.perf_counter(),
        )
        # Finish this request first: after a restart two threads would load the same adapter.
        if batch.folder == generation.folder:
            batch.wait()
        self.requested = None
        # Before waiting, so that the server always has requests.
        if self.resampler is None:
            self._request_next()
        completions = batch.result()
        self._taken_at = trainer._step
        waited = time.perf_counter() - started
        self.meter.add(
            {
                metrics.STALENESS: trainer.state.global_step - batch.step,
                metrics.SECONDS_SAMPLING: batch.seconds,
                metrics.SECONDS_OVERLAP: max(0.0, batch.seconds - waited),
            }
        )
        return completions

    def _request_next(self) -> None:
        """Request the next batch on the main process, if there is one and the run samples in advance."""
        if self.trainer.accelerator.is_main_process and self._samples_ahead and (prompts := self.next_prompts()):
            self.requested = self._generation.request(
                prompts, self.trainer.num_generations, self.trainer.state.global_step
            )

    def next_prompts(self) -> list[list[int]]:
        """Return the prompts of the next batch, each once; an empty list if training ends with this batch."""
        trainer, args = self.trainer, self.trainer.args
        batches = self.sampler.num_samples // self.sampler.batch_size  # per epoch
        # Training steps, not optimizer steps.
        steps_per_batch = args.steps_per_generation * trainer.num_iterations
        batch, epoch = trainer._step // steps_per_batch % batches, int(trainer.state.epoch or 0)
        is_last = batch + 1 == batches
        # A batch need not begin and end with an optimizer step. At the end of an epoch, transformers takes an optimizer
        # step even if fewer training steps are left than it accumulates: the last batch rounds up.
        steps_at_start = batch * steps_per_batch // args.gradient_accumulation_steps
        steps_at_end = (batch + 1) * steps_per_batch / args.gradient_accumulation_steps
        steps_at_end = math.ceil(steps_at_end) if is_last else math.floor(steps_at_end)
        if trainer.state.global_step + steps_at_end - steps_at_start >= trainer.state.max_steps:
            return []
        epoch, batch = (epoch + 1, 0) if is_last else (epoch, batch + 1)
        size = self.sampler.batch_size
        rows = order(self.sampler, epoch)[batch * size : (batch + 1) * size]
        return list(trainer._tokenize_prompts([trainer.train_dataset[row]["prompt"] for row in rows])[0])

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.requested}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        batch = state["asked"]
        # A snapshot of a step contains the object itself, a checkpoint its state.
        self.requested = PrefetchedRollout.from_state_dict(batch) if isinstance(batch, dict) else batch


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
