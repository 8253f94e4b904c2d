"""`Grader`: completions -> verdicts -> rewards, and the columns and metrics that explain a rollout.

TRL's `_generate_and_score_completions` requests the rewards. When it has returned, its rollout is explained.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_math.algorithm.advantages import weighted
from grpo_math.algorithm.rollout import Rollout
from grpo_math.algorithm.stop_conditions import StopConditions
from grpo_math.errors import RewardError, UserError, with_type
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
from grpo_math.system.collectives import Ranks, agree_on_all, agree_on_first
from grpo_math.system.replaced import replaced
from grpo_math.trainer.meter import verdict_metrics
from grpo_math.trainer.table import completion_columns

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer


@dataclass
class Graded:
    """This rank's completions of a rollout, with their tokens. ``grades``: None without gold answers."""

    completions: Sequence[Any]
    ids: Sequence[Sequence[int]]
    grades: list[Grade] | None


@dataclass(eq=False)
class Grader:
    """Grades the completions of a trainer, and calls its reward functions."""

    trainer: "TrlTrainer"
    ranks: Ranks
    timeout: float
    tokenizer: Any

    @property
    def stops(self) -> StopConditions:
        ends = (*self.trainer.eos_token_ids, self.tokenizer.pad_token_id)
        return StopConditions(self.tokenizer, request_from(vars(self.trainer.args)), ends)

    @property
    def group_size(self) -> int:
        trains = self.trainer.model.training
        return self.trainer.num_generations if trains else self.trainer.num_generations_eval

    def gather_rewards(
        self, trl_calculate_rewards: Callable[..., Tensor], inputs: Any, *arguments: Any
    ) -> tuple[Tensor, Graded]:
        """Return the rewards (B, F) of all ranks, and this rank's graded completions. All ranks call this.

        ``trl_calculate_rewards``: TRL's `_calculate_rewards`.
        """
        trainer, (_, completions, ids) = self.trainer, arguments
        added: dict[str, Any] = {GRADE_TIMEOUT: self.timeout, MAX_LENGTH: trainer.max_completion_length}
        grades = None
        # All ranks must decide alike, because `gather_explained` gathers the verdicts.
        if not agree_on_all(all(read_gold_answer(row) is None for row in inputs)):
            grades = added[GRADE] = self.grade(inputs, completions, ids)
            if REWARDS["brevity"] in trainer.reward_funcs:
                added[GROUPS] = self._gather_groups(grades, ids)
        errors: list[UserError] = []
        # Wrap for this call only; `reward_funcs` stays the user's list. TRL calls a model itself, with tokens
        # instead of columns.
        functions = [
            one if isinstance(one, torch.nn.Module) else guarded(one, added, errors) for one in trainer.reward_funcs
        ]
        with replaced(trainer, reward_funcs=functions):
            rewards = trl_calculate_rewards(inputs, *arguments)
        # After TRL's gather of the rewards: a rank that raised before it would leave the others waiting there.
        error = errors[0] if errors else None
        if message := agree_on_first(str(error) if error else None):
            raise self._agree_on_failure(RewardError(message), error and (error.__cause__ or error))
        return rewards, Graded(completions, ids, grades)

    def _agree_on_failure(self, failure: RewardError, original: BaseException | None) -> UserError:
        """Return the error of a reward function on all ranks: in a script, also of the type that it has raised."""
        failure.__cause__ = original
        if self.trainer.grpo_math.program.is_recipe:
            return failure
        # Ranks without the error get its type.
        kind = type(original)
        name = agree_on_first(f"{kind.__module__}:{kind.__qualname__}" if original else None) or ""
        return with_type(failure, original or _example(name))

    def grade(
        self, inputs: list[dict[str, Any]], completions: Sequence[Any], ids: Sequence[Sequence[int]]
    ) -> list[Grade]:
        """Grade this rank's completions, whose tokens are ``ids``."""
        trainer, texts = self.trainer, [completion_text(completion) for completion in completions]
        template = {**cast(dict[str, Any], trainer.chat_template_kwargs), "chat_template": trainer.chat_template}
        prompts = [row["prompt"] for row in inputs]
        return grade_batch(
            [read_gold_answer(row) or "" for row in inputs],
            with_open_thoughts(trainer.processing_class, prompts, texts, ids, **template),
            answer_format=[row_format(row) for row in inputs],
            problems=[row.get("problem") for row in inputs],
            timeout=self.timeout,
        )

    def _gather_groups(self, grades: list[Grade], ids: Sequence[Sequence[int]]) -> list[list[Sized]]:
        """Return the group of each of this rank's completions. Ranks may share a group, so all ranks call this."""
        local_rows = [(len(tokens), is_right(grade)) for tokens, grade in zip(ids, grades, strict=True)]
        rows = gather_object(local_rows)
        return grouped((row // self.group_size for row in range(len(rows))), rows)[self.ranks.local(len(local_rows))]

    def gather_explained(self, rollout: Rollout, graded: Graded, inputs: list[dict[str, Any]]) -> Rollout:
        """Return a rollout with verdicts, the columns that explain a row, and the metrics of verdicts and truncation.
        All ranks call this.
        """
        trainer, rows, ids, grades = self.trainer, rollout.tensors, graded.ids, graded.grades
        sums = weighted(rollout.rewards[self.ranks.local(len(inputs))], trainer.reward_weights.cpu())
        # 1 for a token of the model, 0 for a tool's.
        masks = [[1] * len(tokens) for tokens in ids]
        if "tool_mask" in rows:
            masks = [mask[: len(tokens)] for mask, tokens in zip(rows["tool_mask"].tolist(), ids, strict=True)]
        stops = self.stops
        truncated = [stops.is_truncated(tokens, mask) for tokens, mask in zip(ids, masks, strict=True)]
        local_columns = completion_columns(inputs, rows["group"].tolist(), grades, sums, ids, truncated)
        # The rows of most scripts name no format: then there is no format to check.
        verdicts_and_formats = [
            (grade.verdict, grade.in_format if row_format(row) else None)
            for grade, row in (zip(grades, inputs, strict=True) if grades else ())
        ]
        ranks = gather_object([(local_columns, verdicts_and_formats)])
        columns = dict(rollout.columns)
        for name in local_columns:
            # A script's column or reward function of the same name is kept.
            if name not in trainer.reward_func_names:
                columns.setdefault(
                    ("extra", name), [value for rank_columns, _ in ranks for value in rank_columns[name]]
                )
        values = stops.gather_metrics(masks, truncated, self.ranks)
        verdicts = None
        if grades is not None:
            verdicts, in_format = zip(*(pair for _, rank_graded in ranks for pair in rank_graded), strict=True)
            values |= verdict_metrics(verdicts, in_format, self.group_size)
        return replace(rollout, columns=columns, verdicts=verdicts).with_metrics(values)


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
