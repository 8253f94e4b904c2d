"""Rollouts: TRL's method samples and scores, and what it writes goes into a draft first.

TRL's `_generate_and_score_completions` writes metrics and a table of completions into its trainer. Here it writes them
into a `RolloutInProgress`, which becomes a `Rollout`. Only the rollout that is trained on is written into the trainer,
once, after resampling.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_math.algorithm import correction
from grpo_math.algorithm.advantages import advantages, most_varied, normalized_sum, weighted
from grpo_math.algorithm.losses import prompt_weights
from grpo_math.algorithm.rollout import Columns, Rollout
from grpo_math.algorithm.rows import Rows, gather_masked, loss_mask
from grpo_math.algorithm.stop_conditions import StopConditions
from grpo_math.errors import RewardError, UserError, with_type_of
from grpo_math.generation.canary import Canary
from grpo_math.generation.completions import with_open_thoughts
from grpo_math.generation.request import request_from
from grpo_math.grading import Grade, grade_batch
from grpo_math.rewards import REWARDS
from grpo_math.rewards.guard import guarded
from grpo_math.rewards.inputs import (
    GRADE,
    GRADE_TIMEOUT,
    GROUPS,
    MAX_LENGTH,
    Sized,
    completion_text,
    grouped,
    is_right,
    read_gold_answer,
    row_format,
)
from grpo_math.run import metrics
from grpo_math.system.collectives import Ranks, agree_on_all, agree_on_first
from grpo_math.system.replaced import replaced
from grpo_math.trainer.loss_settings import loss_settings
from grpo_math.trainer.meter import StepMeter, reward_metrics, verdict_metrics
from grpo_math.trainer.table import completion_columns
from grpo_math.trainer.tool_loop import ToolLoop

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.rollout_queue import RolloutQueue
    from grpo_math.trainer.trl_trainer import TrlTrainer


def empty_table() -> dict[str, Any]:
    """Return a table as TRL's, with room for any number of completions: an evaluation may be wider than TRL's."""
    lists: dict[str, Any] = {name: [] for name in ("images", "prompt", "completion", "advantages")}
    return {**lists, "rewards": defaultdict(list), "extra": defaultdict(list)}


@dataclass
class RolloutInProgress:
    """A rollout while TRL makes it. TRL writes into ``table`` and ``log``, which are those of all ranks.

    `gather_rewards` sets the other fields, for this rank's completions. They stay None if a subclass computes rewards
    itself.
    """

    table: dict[str, Any] = field(default_factory=empty_table)
    log: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    completions: Sequence[Any] | None = None
    ids: Sequence[Sequence[int]] | None = None
    grades: list[Grade] | None = None

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
        return torch.tensor(columns).T

    def columns(self) -> Columns:
        """Return the columns of the table that have entries."""
        lists = {("", name): self.table[name] for name in ("images", "prompt", "completion", "advantages")}
        parts = {(part, name): column for part in ("rewards", "extra") for name, column in self.table[part].items()}
        return {key: values for key, values in {**lists, **parts}.items() if values}


class RolloutMaker:
    """Makes a trainer's rollouts: sampled, graded, resampled, with advantages. Reads its attributes when TRL does.

    ``tools``: None if TRL's loop over turns runs, if any. ``canary``: compares vLLM with the policy, if
    vLLM gets adapters. ``draft``: the rollout that TRL makes now.
    """

    def __init__(
        self,
        trainer: "TrlTrainer",
        settings: "MathGRPOConfig",
        ranks: Ranks,
        meter: StepMeter,
        queue: "RolloutQueue",
        tools: ToolLoop | None,
        canary: Canary | None,
        tokenizer: Any,
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.ranks = ranks
        self.meter = meter
        self.queue = queue
        self.tools = tools
        self.canary = canary
        self.tokenizer = tokenizer
        self.draft = RolloutInProgress()

    @property
    def stops(self) -> StopConditions:
        trainer, tokenizer = self.trainer, self.tokenizer
        ends = (*trainer.eos_token_ids, tokenizer.pad_token_id)
        return StopConditions(tokenizer, request_from(vars(trainer.args)), ends)

    @property
    def group_size(self) -> int:
        trains = self.trainer.model.training
        return self.trainer.num_generations if trains else self.trainer.num_generations_eval

    def local(self, n: int) -> slice:
        """Return the slice of this rank's ``n`` rows in the rows of all ranks."""
        first = self.ranks.process_index * n
        return slice(first, first + n)

    def gather_rows(self, trl_method: Callable[[Any], Rows], inputs: list[dict[str, Any]]) -> Rows:
        """Return TRL's dict of this rank's rows of a rollout. ``trl_method``: TRL's `_generate_and_score_completions`.

        All ranks call this.
        """
        trainer, gather = self.trainer, partial(self._gather_rollout, trl_method)
        log = self.meter.log()
        with self.meter.phase(metrics.SECONDS_SCORE):
            tokens_seen = trainer.state.num_input_tokens_seen
            trains = trainer.model.training
            with self.queue.training_batch() if trains else nullcontext():
                rollout = gather(inputs, 0)
            if trains:
                # TRL adds the tokens of all ranks to this count when it has generated.
                self.meter.rollout_tokens.append(trainer.state.num_input_tokens_seen - tokens_seen)
                rollout, counts = self.queue.gather_resampled(rollout, inputs, gather)
                counts |= correction.gather_metrics(rollout.tensors, self.ranks)
                rollout = with_metrics(rollout, counts)
                differences = rollout.metrics.get(metrics.SAMPLER_DIFFERENCE)
                if differences and self.canary:
                    self.canary.watch(differences[-1])
            if trainer.mask_truncated_completions:
                rollout = replace(rollout, tensors=self.stops.gather_masked(rollout.tensors, self.ranks))
            # Advantages come last, because resampling replaces rows. TRL's advantages belong to a single draw.
            rollout = self._with_advantages(rollout)
            rows = rollout.rows(self.local(len(inputs)))
            if trainer.loss_type == "prompt_mean":
                tokens = self.ranks.gather(loss_mask(rows).sum(dim=1))
                rows["prompt_weight"] = prompt_weights(tokens, self.group_size)[self.local(len(inputs))]
            rollout.write(trainer._logs, log)
        return rows

    def _gather_rollout(self, trl_method: Callable[[Any], Rows], inputs: list[dict[str, Any]], first: int) -> Rollout:
        """Sample, score and grade a completion of each row. ``first``: the number of the first group.

        Writes nothing into the trainer except seconds and tokens. All ranks call this.
        """
        trainer, log, draft = self.trainer, self.meter.log(), RolloutInProgress()
        mode = "train" if trainer.model.training else "eval"
        # TRL's advantages are replaced, but TRL would reject a scale that only advantages.py has.
        scale = trainer.scale_rewards if trainer.scale_rewards in ("group", "batch") else "none"
        trl_outputs = {"_logs": draft.table, "_metrics": {**trainer._metrics, mode: draft.log}}
        # TRL would mask every completion that does not end with an end token.
        masks, stops = trainer.mask_truncated_completions, self.stops
        trl_settings = {"scale_rewards": scale, "mask_truncated_completions": masks and not stops.strings}
        # TRL would train on the padding behind a stop token of transformers.
        trl_settings["eos_token_ids"] = [*trainer.eos_token_ids, *stops.tokens]
        # TRL raises for this mode, which only correction.py has.
        geometric = trainer.vllm_importance_sampling_mode == correction.GEOMETRIC
        trl_settings |= {"vllm_importance_sampling_mode": "token_truncate"} if geometric else {}
        with replaced(self, draft=draft), replaced(trainer, **trl_outputs, **trl_settings):
            rows = trl_method(inputs)
        if "importance_sampling_ratio" in rows:
            # Computed by one function, as in each update: in a mode of TRL the weights are TRL's.
            settings = loss_settings(trainer, self.settings)
            logps = rows["old_per_token_logps"], rows["sampling_per_token_logps"]
            rows["importance_sampling_ratio"] = correction.sampler_weights(*logps, loss_mask(rows), settings)
            # In the geometric mode, TRL's metrics are those of token_truncate.
            for name in metrics.TRL_WEIGHTS if geometric else ():
                draft.log.pop(name)
        for name in {*metrics.PHASES} & {*draft.log}:
            log[name] += draft.log.pop(name)
        # TRL's count includes the tokens of earlier draws, so it replaces their count.
        log |= {metrics.TOKENS: draft.log.pop(metrics.TOKENS)} if metrics.TOKENS in draft.log else {}
        local = self.local(len(inputs))
        # TRL's sampler repeats each prompt ``group_size`` times in a row, and its gather keeps the order of ranks.
        groups = [first + row // self.group_size for row in range(local.start, local.stop)]
        tensors = {**rows, "group": torch.tensor(groups, device=rows["advantages"].device)}
        rewards = draft.rewards(trainer.reward_func_names)
        rollout = Rollout(
            tensors, rewards, torch.tensor(draft.table["advantages"]), None, draft.columns(), dict(draft.log)
        )
        return rollout if draft.ids is None else self._gather_explained(rollout, draft, inputs, draft.ids)

    def _gather_explained(
        self, rollout: Rollout, draft: RolloutInProgress, inputs: list[dict[str, Any]], ids: Sequence[Sequence[int]]
    ) -> Rollout:
        """Add verdicts, the columns that explain a row, and the metrics of verdicts, truncation and tools."""
        trainer, rows, grades, stops = self.trainer, rollout.tensors, draft.grades, self.stops
        sums = weighted(rollout.rewards[self.local(len(inputs))], trainer.reward_weights.cpu())
        # 1 for a token of the model, 0 for a tool's.
        masks = [[1] * len(tokens) for tokens in ids]
        if "tool_mask" in rows:
            masks = [mask[: len(tokens)] for mask, tokens in zip(rows["tool_mask"].tolist(), ids, strict=True)]
        truncated = [stops.is_truncated(tokens, mask) for tokens, mask in zip(ids, masks, strict=True)]
        local_columns = completion_columns(inputs, rows["group"].tolist(), grades, sums, ids, truncated)
        # The rows of most scripts name no format: then there is no format to check.
        graded = [
            (grade.verdict, grade.in_format if row_format(row) else None)
            for grade, row in (zip(grades, inputs, strict=True) if grades else ())
        ]
        ranks = gather_object([(local_columns, graded)])
        columns = dict(rollout.columns)
        for name in local_columns:
            # A script's column or reward function of the same name is kept.
            if name not in trainer.reward_func_names:
                columns.setdefault(
                    ("extra", name), [value for rank_columns, _ in ranks for value in rank_columns[name]]
                )
        values = stops.gather_metrics(masks, truncated, self.ranks)
        if self.tools:
            values |= self.tools.gather_metrics(draft.completions or ())
        if grades is None:
            return with_metrics(replace(rollout, columns=columns), values)
        verdicts, in_format = zip(*(pair for _, rank_graded in ranks for pair in rank_graded), strict=True)
        values |= verdict_metrics(verdicts, in_format, self.group_size)
        return with_metrics(replace(rollout, columns=columns, verdicts=verdicts), values)

    def gather_rewards(self, trl_method: Callable[..., Tensor], inputs: Any, *arguments: Any) -> Tensor:
        """Return the rewards (B, F) of all ranks. ``trl_method``: TRL's `_calculate_rewards`. All ranks call this."""
        trainer, draft = self.trainer, self.draft
        _, draft.completions, draft.ids = arguments
        with self.meter.phase(metrics.SECONDS_GRADE):
            # All ranks must decide alike, because `_gather_explained` gathers the verdicts.
            has_gold_answers = not agree_on_all(all(read_gold_answer(row) is None for row in inputs))
            draft.grades = self.grade(inputs, draft.completions) if has_gold_answers else None
            added: dict[str, Any] = {
                GRADE_TIMEOUT: self.settings.grade_timeout,
                MAX_LENGTH: trainer.max_completion_length,
                **({} if draft.grades is None else {GRADE: draft.grades}),
            }
            if draft.grades is not None and REWARDS["brevity"] in trainer.reward_funcs:
                added[GROUPS] = self._gather_groups(draft.grades, draft.ids)
            errors: list[UserError] = []
            # Wrap for this call only; `reward_funcs` stays the user's list. TRL calls a model itself, with tokens
            # instead of columns.
            functions = [
                one if isinstance(one, torch.nn.Module) else guarded(one, added, errors) for one in trainer.reward_funcs
            ]
            with replaced(trainer, reward_funcs=functions):
                rewards = trl_method(inputs, *arguments)
            # After TRL's gather of the rewards: a rank that raised before it would leave the others waiting there.
            error = errors[0] if errors else None
            if message := agree_on_first(str(error) if error else None):
                raise self._agree_on_failure(RewardError(message), error and (error.__cause__ or error))
        return rewards

    def _agree_on_failure(self, failure: RewardError, original: BaseException | None) -> UserError:
        """Return the error of a reward function on all ranks: in a script, also of the type that it has raised."""
        failure.__cause__ = original
        if self.trainer.grpo_math.is_recipe_run:
            return failure
        # Ranks without the error get its type.
        kind = type(original)
        name = agree_on_first(f"{kind.__module__}:{kind.__qualname__}" if original else None) or ""
        return with_type_of(failure, original or _example(name))

    def grade(self, inputs: list[dict[str, Any]], completions: Sequence[Any]) -> list[Grade]:
        """Grade this rank's completions."""
        trainer, texts = self.trainer, [completion_text(completion) for completion in completions]
        template = {**cast(dict[str, Any], trainer.chat_template_kwargs), "chat_template": trainer.chat_template}
        prompts, ids = [row["prompt"] for row in inputs], self.draft.ids or [[]] * len(inputs)
        return grade_batch(
            [read_gold_answer(row) or "" for row in inputs],
            with_open_thoughts(trainer.processing_class, prompts, texts, ids, **template),
            answer_format=[row_format(row) for row in inputs],
            timeout=self.settings.grade_timeout,
        )

    def _gather_groups(self, grades: list[Grade], ids: Sequence[Sequence[int]]) -> list[list[Sized]]:
        """Return the group of each of this rank's completions. Ranks may share a group, so all ranks call this."""
        local_rows = [(len(tokens), is_right(grade)) for tokens, grade in zip(ids, grades, strict=True)]
        rows = gather_object(local_rows)
        return grouped((row // self.group_size for row in range(len(rows))), rows)[self.local(len(local_rows))]

    def _with_advantages(self, rollout: Rollout) -> Rollout:
        """Set the advantages from the rewards. All ranks call this."""
        trainer, settings, weights = self.trainer, self.settings, self.trainer.reward_weights.cpu()
        sums = weighted(rollout.rewards, weights).view(-1, self.group_size)
        trained = settings.train_completions if trainer.model.training else 0
        places = most_varied(sums, trained or self.group_size)
        sums = sums.gather(1, places)
        if trainer.multi_objective_aggregation == "sum_then_normalize":
            lengths = None
            if settings.baseline == "length_weighted":
                tokens = loss_mask(rollout.tensors).sum(dim=1)
                lengths = trainer.accelerator.gather(tokens).cpu().view(-1, self.group_size).gather(1, places)
            options = (settings.baseline, trainer.scale_rewards, settings.advantage_eps, settings.k)
            values = advantages(sums, *options, lengths)
        else:
            rewards = rollout.rewards.view(-1, self.group_size, len(weights))
            values = normalized_sum(rewards.take_along_dim(places[:, :, None], dim=1), weights)
        shape, log = (len(places), self.group_size), reward_metrics(sums, values.flatten())
        rollout = replace(rollout, advantages=values.new_zeros(shape).scatter(1, places, values).flatten())
        if trained:
            kept = torch.zeros(shape, dtype=torch.long).scatter(1, places, 1).flatten()
            tensors = rollout.tensors
            kept = kept[self.local(len(tensors["completion_mask"]))]
            rollout = replace(rollout, tensors=gather_masked(tensors, kept, self.ranks))
        return with_metrics(rollout, log)


def _example(name: str) -> BaseException | None:
    """Return an exception of the class with this name, if this process has loaded it too."""
    module, _, path = name.partition(":")
    try:
        kind = attrgetter(path)(sys.modules[module])
        example: BaseException = kind.__new__(kind)
    # The class may be local, or made for this error alone.
    except Exception:
        return None
    return example


def with_metrics(rollout: Rollout, values: Mapping[str, float]) -> Rollout:
    """Return a rollout with these metrics, which replace TRL's of the same name."""
    return replace(rollout, metrics={**rollout.metrics, **{name: [value] for name, value in values.items()}})
