"""`MathGRPOTrainer`: TRL's `GRPOTrainer` with verdicts, more advantages and surrogates, and packed updates.

This is the only file that overrides private methods of TRL; `tests/test_trl_contract.py` holds their signatures. Where
it differs from TRL:

- completions of rows with an ``answer`` are graded once, and the reward functions get the grades as ``grade``;
- advantages are those of `advantages.py` (TRL's own with ``baseline=group_mean, advantage_eps=1e-4``);
- ``surrogate=reinforce`` drops the old log-probs (`losses.py`);
- with ``pack_updates``, prompts are prefilled once a group, rows are scored packed, and completions whose advantage is
  zero leave the update where no other term would move a weight by them. Gradients are TRL's, to rounding; the logged
  entropy and clip fractions are then means over the completions that were trained on.

Does not copy TRL's loss.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from grpo_math import attention, metrics
from grpo_math.advantages import advantages
from grpo_math.config import TRL_EQUAL, MathGRPOConfig
from grpo_math.grading import Verdict, grade_batch, offending
from grpo_math.losses import hold_ratio_at_one, without_zero_advantages
from grpo_math.packing import pack, unpack
from grpo_math.rewards import REWARDS, checked, text_of
from grpo_math.rollout import shared_prefill

logger = get_logger(__name__)


class MathGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` for mathematics: takes what it takes, does what it does, and what this module's head lists.

    ``args`` may be a plain `GRPOConfig`: the new settings are then at their TRL-equal values. A reward function may
    also be a key of `REWARDS`.
    """

    _tag_names = [*GRPOTrainer._tag_names, "grpo_math"]  # noqa: RUF012

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MathGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        self._math = {name: getattr(args, name, value) for name, value in TRL_EQUAL.items()}
        self._grades: list[Any] | None = None
        self._rollout_tokens: list[int] = []  # of the rollouts since the last line of the log
        super().__init__(model, _resolve(reward_funcs), args, *rest, **kwargs)
        self._packs = self._math["pack_updates"] and self._set_up_packing()
        if self.use_vllm:
            generation: Any = self.vllm_generation
            generation.sync_weights = self._timed(generation.sync_weights, metrics.SECONDS_SYNC)

    def _set_up_packing(self) -> bool:
        """Switch the model, and the reference where there is one, to the packed attention; False where it has none."""
        models = [self.accelerator.unwrap_model(model) for model in (self.model, self.ref_model) if model is not None]
        prompt_learning = any(
            is_peft_model(model) and any(adapter.is_prompt_learning for adapter in model.peft_config.values())
            for model in models
        )
        models = [model.get_base_model() if is_peft_model(model) else model for model in models]
        for model in models:
            reason = attention.unsupported(model.config)
            if self._is_vlm or prompt_learning:
                reason = "an image processor" if self._is_vlm else "a prompt-learning adapter"
            if reason:
                logger.warning(f"pack_updates: {type(model).__name__} has {reason}; rows are scored unpacked.")
                return False
        attention.register()
        for model in models:
            model.set_attn_implementation(attention.NAME)
        return True

    # Generation

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started, before = time.perf_counter(), self._in_phases()
        shares = self._packs and not self.use_vllm and not self.use_transformers_continuous_batching
        if shares:  # beams and several sequences repeat the rows themselves
            own = self.generation_config
            shares = own.cache_implementation is None and not {own.num_beams, own.num_return_sequences} - {None, 1}
        with shared_prefill(self.accelerator.unwrap_model(self.model_wrapped)) if shares else nullcontext():
            output = super()._generate_single_turn(*args, **kwargs)
        synced = self._in_phases() - before
        self._metrics[self._mode][metrics.SECONDS_GENERATE].append(time.perf_counter() - started - synced)
        return output

    # Verdicts, rewards, advantages

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        started = time.perf_counter()
        self._grades = self._grade(inputs, completions)
        limits = {"max_completion_length": self.max_completion_length, "grade_timeout": self._math["grade_timeout"]}
        inputs = [{**limits, **row} for row in inputs]
        if self._grades is not None:
            inputs = [{**row, "grade": grade} for row, grade in zip(inputs, self._grades, strict=True)]
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._metrics[self._mode][metrics.SECONDS_GRADE].append(time.perf_counter() - started)
        return self._rewards_per_func

    def _grade(self, inputs: list[dict[str, Any]], completions: list[Any]) -> list[Any] | None:
        """The grades of this rank's completions; None where the rows have no gold answer."""
        if not all(isinstance(row.get("answer"), str) for row in inputs):
            return None
        golds = [row["answer"] for row in inputs]
        texts = [text_of(completion) for completion in completions]
        formats = [row.get("answer_format") for row in inputs]
        grades = grade_batch(golds, texts, answer_format=formats, timeout=self._math["grade_timeout"])
        rows = gather_object(offending(grades, golds, texts))
        if rows and self.accelerator.is_main_process:
            with open(Path(str(self.args.output_dir)) / "ungradable.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps({metrics.STEP: self.state.global_step, **row}) + "\n" for row in rows)
        return grades

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started, before, seen = time.perf_counter(), self._in_phases(), self.state.num_input_tokens_seen
        output = super()._generate_and_score_completions(inputs)
        group = self.num_generations if self._mode == "train" else self.num_generations_eval
        weights = self.reward_weights.to(self._rewards_per_func.device)
        rewards = (self._rewards_per_func * weights).nansum(dim=1)
        rewards[self._rewards_per_func.isnan().all(dim=1)] = torch.nan
        rewards = rewards.view(-1, group)
        if self.multi_objective_aggregation == "sum_then_normalize":
            every = advantages(
                rewards, self._math["baseline"], self.scale_rewards, self._math["advantage_eps"]
            ).flatten()
            first = self.accelerator.process_index * len(inputs)
            output["advantages"] = every[first : first + len(inputs)]
            logged: Any = self._logs["advantages"]
            for _ in range(min(len(logged), len(every))):
                logged.pop()
            logged.extend(every.tolist())
        else:
            every = self.accelerator.gather(output["advantages"])
        self._log_rollout(rewards, every)
        if self._mode == "train":
            self._rollout_tokens.append(self.state.num_input_tokens_seen - seen)
        others = self._in_phases() - before
        self._metrics[self._mode][metrics.SECONDS_SCORE].append(time.perf_counter() - started - others)
        return output

    def _timed(self, call: Any, phase: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            output = call(*args, **kwargs)
            self._metrics[self._mode][phase].append(time.perf_counter() - started)
            return output

        return timed

    def _in_phases(self) -> float:
        """Seconds that the phases have taken since the last line of the log."""
        return sum(sum(self._metrics[self._mode].get(phase, ())) for phase in metrics.PHASES)

    def _log_rollout(self, rewards: Tensor, every_advantage: Tensor) -> None:
        """Rewards (P, G) and advantages (P * G,) of all ranks -> metrics of this step."""
        log = self._metrics[self._mode]
        graded = rewards[~rewards.isnan()]
        if graded.numel():
            log[metrics.REWARD_MIN].append(graded.min().item())
            log[metrics.REWARD_MAX].append(graded.max().item())
        log[metrics.ADVANTAGE_MEAN].append(every_advantage.mean().item())
        log[metrics.ADVANTAGE_STD].append(every_advantage.std(correction=0).item())
        if self._grades is None:
            return
        verdicts = gather_object([str(grade.verdict) for grade in self._grades])
        for verdict in Verdict:
            log[metrics.verdict_key(str(verdict))].append(verdicts.count(str(verdict)) / len(verdicts))
        right = torch.tensor([verdict == Verdict.CORRECT for verdict in verdicts]).view(rewards.shape)
        log[metrics.ACCURACY].append(right.float().mean().item())
        log[metrics.ALL_RIGHT].append(right.all(dim=1).float().mean().item())
        log[metrics.ALL_WRONG].append((~right).all(dim=1).float().mean().item())

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not (self._packs and model.training and self._only_advantages_move_weights()):
            return self._loss_of(model, inputs)
        inputs, factor = without_zero_advantages(inputs, self.loss_type)
        return self._loss_of(model, inputs) * factor

    def _loss_of(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of one micro-batch, with the surrogate that was asked for."""
        if self._math["surrogate"] == "reinforce":
            inputs = hold_ratio_at_one(inputs)
        return super()._compute_loss(model, inputs)

    def _only_advantages_move_weights(self) -> bool:
        return (
            self.beta == 0.0
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
            and self.top_entropy_quantile >= 1.0
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs and entropies (B, T) as TRL's method gives them, from packed rows; 0 where there is padding."""
        if not self._packs or compute_aux_loss:
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **kwargs,
            )
        chunk = batch_size or input_ids.size(0)
        logps, entropies = [], []
        for ids, mask in zip(input_ids.split(chunk), attention_mask.split(chunk), strict=True):
            row = pack(ids, mask, logits_to_keep)
            if row is None:  # not one token to score: TRL's own way still runs a forward, as DDP needs
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs
                )
            with self.accelerator.autocast():
                outputs = model(
                    input_ids=row.input_ids,
                    position_ids=row.position_ids,
                    # A mask in four dimensions is taken as it is: transformers builds none, and ours needs none.
                    attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
                    shift_labels=row.shift_labels,
                    fused_lm_head=True,
                    packed_groups=row.groups,
                )
            logps.append(unpack(outputs.log_probs, row))
            if compute_entropy:
                entropies.append(unpack(outputs.entropy, row))
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    # Logging

    @property
    def _mode(self) -> str:
        return "train" if self.model is not None and self.model.training else "eval"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._mode == "train" and self._metrics["train"].get(metrics.SECONDS_STEP):
            self._log_step()
        super().log(logs, start_time)

    def _log_step(self) -> None:
        """What only whole steps have: seconds by phase, of each step on average; tokens a second; memory."""
        log, args = self._metrics["train"], cast(GRPOConfig, self.args)
        steps = log[metrics.SECONDS_STEP]
        log[metrics.SECONDS_UPDATE] = [sum(steps) - self._in_phases()]
        for phase in (*metrics.PHASES, metrics.SECONDS_UPDATE):
            if phase != metrics.SECONDS_SYNC or self.use_vllm:
                log[phase] = [sum(log.get(phase, ())) / len(steps)]
        if self._rollout_tokens:  # else the step used an earlier rollout again
            tokens = sum(self._rollout_tokens) / len(self._rollout_tokens)
            self._tokens_per_step = tokens * args.gradient_accumulation_steps / (args.steps_per_generation or 1)
            self._rollout_tokens = []
        log[metrics.TOKENS_PER_SECOND] = [self._tokens_per_step * len(steps) / sum(steps)]
        if self.accelerator.device.type == "cuda":
            log[metrics.MEMORY_ALLOCATED] = [torch.cuda.max_memory_allocated()]
            log[metrics.MEMORY_RESERVED] = [torch.cuda.max_memory_reserved()]


def _resolve(reward_funcs: Any) -> Any:
    """Keys of `REWARDS` become their functions, and plain functions are checked; anything else is TRL's to read."""
    if isinstance(reward_funcs, list):
        return [_resolve(func) for func in reward_funcs]
    if isinstance(reward_funcs, str):
        reward_funcs = REWARDS.get(reward_funcs, reward_funcs)
    is_model = isinstance(reward_funcs, torch.nn.Module)
    return checked(reward_funcs) if callable(reward_funcs) and not is_model else reward_funcs
