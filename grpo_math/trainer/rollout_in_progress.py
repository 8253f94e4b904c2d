"""Rollouts: TRL's method samples and scores, and what it writes goes into a draft first.

TRL's `_generate_and_score_completions` writes metrics and a table of completions into its trainer. Here it writes them
into a `RolloutInProgress`, which becomes a `Rollout`. Only the rollout that is trained on is written into the trainer,
once, after resampling. The draft begins as a copy, because reward functions, tools and subclasses may read the metrics
since the last log line and the last rollout's completions.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.logging import get_logger
from torch import Tensor

from grpo_math.algorithm import correction
from grpo_math.algorithm.advantages import advantages, most_varied, normalized_sum, weighted
from grpo_math.algorithm.losses import prompt_weights
from grpo_math.algorithm.rollout import Columns, Rollout
from grpo_math.algorithm.rows import Rows, gather_masked, loss_mask
from grpo_math.errors import ConfigError
from grpo_math.run import metrics
from grpo_math.settings.fields import defaults
from grpo_math.system.collectives import Ranks, agree_on_all
from grpo_math.system.replaced import replaced
from grpo_math.trainer.grader import Graded, Grader
from grpo_math.trainer.loss_settings import loss_settings
from grpo_math.trainer.meter import StepMeter, reward_metrics

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.rollout_queue import RolloutQueue
    from grpo_math.trainer.trl_trainer import TrlTrainer

logger = get_logger(__name__)
PATCHED = "GRPOTrainer._generate_and_score_completions"
LISTS = ("images", "prompt", "completion", "advantages")  # of TRL's table


def empty_table() -> dict[str, Any]:
    """Return a table as TRL's, with room for any number of completions: an evaluation may be wider than TRL's."""
    lists: dict[str, Any] = {name: [] for name in LISTS}
    return {**lists, "rewards": defaultdict(list), "extra": defaultdict(list)}


@dataclass
class RolloutInProgress:
    """A rollout while TRL makes it. TRL writes into ``table`` and ``log``, which are those of all ranks.

    ``graded``: this rank's completions; None if a subclass computes rewards itself.
    """

    table: dict[str, Any] = field(default_factory=empty_table)
    log: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    graded: Graded | None = None

    def parts(self) -> list[dict[str, Any]]:
        """Return the parts of the table, and the log: each has lists by name."""
        return [{name: self.table[name] for name in LISTS}, self.table["rewards"], self.table["extra"], self.log]

    def copy(self) -> "RolloutInProgress":
        # A script's own entries of the table stay the same objects.
        copied = RolloutInProgress({**self.table, **empty_table()})
        for part, values in zip(copied.parts(), self.parts(), strict=True):
            for name in values:
                part[name].extend(values[name])
        return copied

    def drop(self, earlier: "RolloutInProgress", trainers: "RolloutInProgress") -> None:
        """Keep what was added to ``earlier``. Clear in ``trainers`` the values that TRL or a script has replaced.

        >>> trainers = RolloutInProgress(log={"reward": [0.5], "num_tokens": [7.0]})
        >>> draft = trainers.copy()
        >>> draft.log["reward"].append(0.25)
        >>> draft.log["num_tokens"] = [9.0]
        >>> draft.drop(trainers.copy(), trainers)
        >>> dict(draft.log), trainers.log
        ({'reward': [0.25], 'num_tokens': [9.0]}, {'reward': [0.5], 'num_tokens': []})
        """
        for part, before, own in zip(self.parts(), earlier.parts(), trainers.parts(), strict=True):
            for name, values in before.items():
                if part[name][: len(values)] == values:
                    del part[name][: len(values)]
                else:
                    own[name].clear()

    def rewards(self, names: Sequence[str]) -> Tensor:
        """Return the rewards (B, F) that TRL has used, on the CPU: a subclass may have changed ours.

        Two functions may have one name: their column then has 2 B entries.

        >>> draft = RolloutInProgress({"prompt": ["a", "b"], "rewards": {"short": [1.0, 2.0, 3.0, 4.0]}})
        >>> draft.rewards(["short", "short"])
        tensor([[1., 3.],
                [2., 4.]])
        """
        rows, seen, columns = len(self.table["prompt"]), Counter[str](), []
        for name in names:
            columns.append(self.table["rewards"][name][seen[name] * rows : (seen[name] + 1) * rows])
            seen[name] += 1
        return torch.tensor(columns, dtype=torch.float32).T

    def columns(self) -> Columns:
        """Return the columns of the table that have entries."""
        lists = {("", name): self.table[name] for name in LISTS}
        parts = {(part, name): column for part in ("rewards", "extra") for name, column in self.table[part].items()}
        return {key: values for key, values in {**lists, **parts}.items() if values}


@dataclass(eq=False)
class RolloutMaker:
    """Makes a trainer's rollouts: sampled, graded, resampled, with advantages. Reads its attributes when TRL does.

    ``draft``: the rollout that TRL makes. ``table``: TRL's table while the trainer has the draft's. ``patched``: a
    script has patched TRL's method, and has changed its advantages.
    """

    trainer: "TrlTrainer"
    settings: "MathGRPOConfig"
    ranks: Ranks
    meter: StepMeter
    queue: "RolloutQueue"
    grader: Grader
    draft: RolloutInProgress = field(default_factory=RolloutInProgress)
    table: dict[str, Any] | None = None
    patched: bool = False

    def gather_rows(self, trl_generate_and_score: Callable[[Any], Rows], inputs: list[dict[str, Any]]) -> Rows:
        """Return TRL's dict of this rank's rows of a rollout. All ranks call this.

        ``trl_generate_and_score``: TRL's `_generate_and_score_completions`.
        """
        trainer, gather = self.trainer, partial(self._gather_rollout, trl_generate_and_score)
        trains, tokens_seen = trainer.model.training, trainer.state.num_input_tokens_seen
        with self.queue.training_batch() if trains else nullcontext():
            rollout = gather(inputs, 0)
        if trains:
            # TRL adds the tokens of all ranks to this count when it has generated.
            self.meter.rollout_tokens.append(trainer.state.num_input_tokens_seen - tokens_seen)
            rollout, counts = self.queue.gather_resampled(rollout, inputs, gather)
            rollout = rollout.with_metrics(counts | correction.gather_metrics(rollout.tensors, self.ranks))
        if trainer.mask_truncated_completions:
            rollout = replace(rollout, tensors=self.grader.stops.gather_masked(rollout.tensors, self.ranks))
        # Advantages come last, because resampling replaces rows. TRL's advantages belong to a single draw.
        rollout = self._with_advantages(rollout)
        local = self.ranks.local(len(inputs))
        rows = rollout.rows(local)
        if self.patched:
            rows["advantages"] = rollout.tensors["advantages"]
        if trainer.loss_type == "prompt_mean":
            tokens = self.ranks.gather(loss_mask(rows).sum(dim=1))
            rows["prompt_weight"] = prompt_weights(tokens, self.grader.group_size)[local]
        rollout.write(trainer._logs, self.meter.log())
        return rows

    def _gather_rollout(
        self, trl_generate_and_score: Callable[[Any], Rows], inputs: list[dict[str, Any]], first: int
    ) -> Rollout:
        """Sample, score and grade a completion of each row. ``first``: the number of the first group.

        Writes nothing into the trainer except seconds and tokens. All ranks call this.
        """
        trainer, log = self.trainer, self.meter.log()
        trainers: RolloutInProgress = RolloutInProgress(cast(Any, trainer._logs), log)
        earlier, draft = trainers.copy(), trainers.copy()
        geometric = trainer.vllm_importance_sampling_mode == correction.GEOMETRIC
        mode = "train" if trainer.model.training else "eval"
        outputs = {"_logs": draft.table, "_metrics": {**trainer._metrics, mode: draft.log}}
        # A reward function may call `evaluate`, whose rollout has another draft.
        with replaced(self, draft=draft, table=trainer._logs), replaced(trainer, **outputs, **self._settings_for_trl()):
            rows = trl_generate_and_score(inputs)
        draft.drop(earlier, trainers)
        if "importance_sampling_ratio" in rows and geometric:
            # TRL's weights and their metrics are those of token_truncate.
            settings = loss_settings(trainer, self.settings)
            logps = rows["old_per_token_logps"], rows["sampling_per_token_logps"]
            rows["importance_sampling_ratio"] = correction.sampler_weights(*logps, loss_mask(rows), settings)
            for name in metrics.TRL_WEIGHTS:
                draft.log.pop(name)
        for name in {*metrics.PHASES} & {*draft.log}:
            log[name] += draft.log.pop(name)
        # TRL's count includes the tokens of earlier draws, so it replaces their count.
        if tokens := draft.log.pop(metrics.TOKENS, None):
            log[metrics.TOKENS] = tokens
        local, size = self.ranks.local(len(inputs)), self.grader.group_size
        self._agree_on_patch(rows["advantages"].tolist() == draft.table["advantages"][local])
        # TRL's sampler repeats each prompt ``size`` times in a row, and its gather keeps the order of ranks.
        groups = [first + row // size for row in range(local.start, local.stop)]
        tensors = {**rows, "group": torch.tensor(groups, device=rows["advantages"].device)}
        rewards = draft.rewards(trainer.reward_func_names)
        trl_advantages = torch.tensor(draft.table["advantages"], dtype=torch.float32)
        added = {name: values for name, values in draft.log.items() if values}
        rollout = Rollout(tensors, rewards, trl_advantages, None, draft.columns(), added)
        return rollout if draft.graded is None else self.grader.gather_explained(rollout, draft.graded, inputs)

    def _settings_for_trl(self) -> dict[str, Any]:
        """Return the settings that TRL's method gets in place of the trainer's, whose work is done here."""
        trainer, stops = self.trainer, self.grader.stops
        mode = trainer.vllm_importance_sampling_mode
        return {
            # TRL's advantages are replaced, but TRL would reject a scale that only advantages.py has.
            "scale_rewards": trainer.scale_rewards if trainer.scale_rewards in ("group", "batch") else "none",
            # TRL would mask every completion that does not end with an end token.
            "mask_truncated_completions": trainer.mask_truncated_completions and not stops.strings,
            # TRL would train on the padding behind a stop token of transformers.
            "eos_token_ids": [*trainer.eos_token_ids, *stops.tokens],
            # TRL raises for this mode, which only correction.py has.
            "vllm_importance_sampling_mode": "token_truncate" if mode == correction.GEOMETRIC else mode,
        }

    def _agree_on_patch(self, unchanged: bool) -> None:
        """Find out if a patch of TRL's method has changed the advantages. All ranks call this.

        ``unchanged``: the method returns the advantages that are in its table. Raises `ConfigError` if the settings ask
        for other advantages than TRL's.
        """
        was, self.patched = self.patched, not agree_on_all(unchanged)
        if not self.patched:
            return
        for name in ("resample_groups", "train_completions", "baseline", "advantage_eps", "scale_rewards"):
            value = getattr(self.trainer if name == "scale_rewards" else self.settings, name)
            if value != {**defaults(), **self._settings_for_trl()}[name]:
                remedy = f"override the method in a subclass of MathGRPOTrainer, or leave {name} out"
                raise ConfigError(name, value, f"does not work with a patch of {PATCHED}", remedy)
        if not was:
            logger.warning(f"A patch of {PATCHED} has changed the advantages: they are trained on.")

    def _with_advantages(self, rollout: Rollout) -> Rollout:
        """Set the advantages from the rewards. All ranks call this."""
        trainer, settings, weights = self.trainer, self.settings, self.trainer.reward_weights.cpu()
        size = self.grader.group_size
        sums = weighted(rollout.rewards, weights).view(-1, size)
        trained = settings.train_completions if trainer.model.training else 0
        places = most_varied(sums, trained) if trained else torch.arange(size).expand(sums.shape)
        sums = sums.gather(1, places)
        if trainer.multi_objective_aggregation == "sum_then_normalize":
            lengths = None
            if settings.baseline == "length_weighted":
                tokens = loss_mask(rollout.tensors).sum(dim=1)
                lengths = self.ranks.gather(tokens).cpu().view(-1, size).gather(1, places)
            options = (settings.baseline, trainer.scale_rewards, settings.advantage_eps, settings.k)
            values = advantages(sums, *options, lengths)
        else:
            rewards = rollout.rewards.view(-1, size, len(weights))
            values = normalized_sum(rewards.take_along_dim(places[:, :, None], dim=1), weights)
        shape, log = (len(places), size), reward_metrics(sums, values.flatten())
        rollout = replace(rollout, advantages=values.new_zeros(shape).scatter(1, places, values).flatten())
        if trained:
            kept = torch.zeros(shape, dtype=torch.long).scatter(1, places, 1).flatten()
            tensors = rollout.tensors
            kept = kept[self.ranks.local(len(tensors["completion_mask"]))]
            rollout = replace(rollout, tensors=gather_masked(tensors, kept, self.ranks))
        return rollout.with_metrics(log)
