"""`MathGRPOTrainer`: TRL's `GRPOTrainer` with verdicts, more advantages and surrogates, and packed updates.

This is the only file that overrides private methods of TRL; `tests/test_trl_contract.py` holds their signatures. Where
it differs from TRL:

- completions of rows with an ``answer`` are graded once, and the reward functions get the grades as ``grade``;
- a reward function that raises is called once more, and one that fails ends the run on every rank, with a checkpoint
  (`rewards/guard.py`);
- advantages are those of `advantages.py` (TRL's own with ``baseline=group_mean, advantage_eps=1e-4``);
- ``surrogate=reinforce`` drops the old log-probs, and ``kl_estimator=k1`` or ``k2`` takes the place of TRL's k3
  (`losses.py`); ``policy_loss``, which TRL logs beside an entropy bonus, is then without the KL term;
- with ``pack_updates``, prompts are prefilled once a group; the rows of an optimizer step are put together by prompt,
  filled up to ``update_token_budget`` and shared out among ranks (`arrange.py`); they are scored packed; and
  completions whose advantage is zero leave the update where no other term would move a weight by them. Gradients are
  TRL's, to rounding; the logged entropy and clip fractions are then means over the completions that were trained on;
- ``resample_groups`` replaces groups that are all right or all wrong (`resample.py`);
- ``reference_refresh_steps`` makes the reference the policy (`reference.py`);
- checkpoints are written aside and renamed, and a run goes on from one as if it had not stopped (`state.py`);
- ``max_seq_length_train`` bounds what is trained on, not what is sampled and graded;
- before the first step the largest micro-batch is tried (`longest.py`), and activations can go to main memory;
- a step whose gradient is not finite moves no weight (`nonfinite.py`);
- with vLLM and a PEFT adapter, the adapter alone goes to vLLM (`generation/sync.py`).

Does not copy TRL's loss.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig, GRPOTrainer
from trl.models import get_act_offloading_ctx_manager
from trl.trainer.utils import RepeatSampler

from grpo_math.errors import ConfigError, OutOfMemory, RewardError, UserError
from grpo_math.generation.decoding import lean_generation
from grpo_math.generation.sync import ServerAway, adapter_sync
from grpo_math.grading import Verdict, grade_batch, offending
from grpo_math.rewards import REWARDS
from grpo_math.rewards.columns import text_of
from grpo_math.rewards.guard import Mishaps, checked
from grpo_math.run import checkpoints, metrics
from grpo_math.trainer import attention, state
from grpo_math.trainer.advantages import advantages
from grpo_math.trainer.arrange import arrange, fill, over_steps, packed_tokens
from grpo_math.trainer.config import TRL_EQUAL, MathGRPOConfig
from grpo_math.trainer.longest import longest_rows
from grpo_math.trainer.losses import aggregate, hold_ratio_at_one, importance_ratio, kl_per_token, weight_of_part
from grpo_math.trainer.nonfinite import NonFiniteSteps
from grpo_math.trainer.packing import layout, pack, unpack
from grpo_math.trainer.reference import Reference, refuse_lost_reference
from grpo_math.trainer.resample import Reserve, dull_groups, replacing
from grpo_math.trainer.rows import (
    Rows,
    filled,
    is_of_prompt,
    is_per_row,
    join,
    lay_out,
    limited,
    padded_tokens,
    scored,
    select,
    shortest,
)

logger = get_logger(__name__)

WORTH_PACKING = 0.97  # a packed row with more of the padded tokens than this is scored as TRL does
Part = tuple[Rows, Any]  # rows that are computed together, and the factor of their loss


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
        self._mishaps, self._retries = Mishaps(), 0  # of this rank in these rewards; of all ranks in this rollout
        self._running: dict[str, Any] | None = None  # the parts of the training step that is under way
        self._accumulated: list[Any] = []  # those of the optimizer step's training steps that are done
        self._logps: Tensor | None = None  # what was scored last
        self._rollout_tokens: list[int] = []  # of the rollouts since the last line of the log
        self._tokens_per_step = 0.0
        self._nonfinite = NonFiniteSteps(self._math["max_nonfinite_steps"])
        self._aside: Path | None = None  # where a checkpoint is being written
        self._held: dict[str, Any] | None = None  # of the checkpoint that this run goes on from
        self._last_step: dict[str, Any] | None = None  # the moment after it, for a run that fails in the next one
        self._sampler: Any = None
        self._halved_to: int | None = None  # the token budget, where memory ran out
        with adapter_sync(self._math["vllm_sync"], args):
            super().__init__(model, _resolve(reward_funcs, self._mishaps), args, *rest, **kwargs)
        self._packs = self._math["pack_updates"] and self._set_up_packing()
        self._offload: Any = nullcontext()
        if self._math["activation_offloading"]:
            self._offload = get_act_offloading_ctx_manager(cast(Any, self.model), warn_if_no_head=False)
        if self._math["max_seq_length_train"] and self._is_vlm:
            raise ConfigError(
                "max_seq_length_train", self._math["max_seq_length_train"], "knows no images", "leave it at 0"
            )
        self._longest_is_due = self._tries_longest()
        self._reference: Reference | None = None
        if self._math["reference_refresh_steps"]:
            self._reference = self._set_up_reference(self._math["reference_refresh_steps"])
        self._told_of_dull_groups = False
        self._reserve = self._set_up_reserve() if self._math["resample_groups"] else None
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
            if self._is_vlm:
                reason = "an image processor"
            elif prompt_learning:
                reason = "a prompt-learning adapter"
            elif self.use_transformers_continuous_batching:
                reason = "continuous batching to generate with, which knows no packed attention"
            if reason:
                logger.warning(f"pack_updates: {type(model).__name__} has {reason}; rows are scored unpacked.")
                return False
        attention.register()
        for model in models:
            model.set_attn_implementation(attention.NAME)
            model.base_model.register_forward_hook(attention.only_scored, with_kwargs=True)
        return True

    def _tries_longest(self) -> bool:
        """Whether the longest micro-batch is tried: on a GPU, or where it was asked for."""
        asked = self._math["longest_first"]
        zero: Any = self.accelerator.state.deepspeed_plugin
        if self.is_fsdp_enabled or (zero is not None and zero.zero_stage >= 3):
            if asked:
                reason = "needs the whole model on each process, and FSDP and ZeRO-3 split it"
                raise ConfigError("longest_first", True, reason, "leave it out")
            return False
        return self.accelerator.device.type == "cuda" if asked is None else asked

    def _set_up_reference(self, every: int) -> Reference:
        policy = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model = self.ref_model and self.accelerator.unwrap_model(self.ref_model, keep_torch_compile=False)
        reference = Reference(policy, model, every)
        self.add_callback(reference)
        return reference

    def _set_up_reserve(self) -> Reserve:
        rows: Any = self.train_dataset
        if "answer" not in (getattr(rows, "column_names", None) or ()) or not hasattr(rows, "__len__"):
            raise ConfigError(
                "resample_groups",
                self._math["resample_groups"],
                "needs a train_dataset of known length with a column `answer`: groups are judged by verdict",
                "leave it at 0",
            )
        return Reserve(rows, self.args.seed)

    # Generation

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started, before = time.perf_counter(), self._in_phases()
        shares = self._packs and not self.use_vllm
        with lean_generation(self.accelerator.unwrap_model(self.model_wrapped)) if shares else nullcontext():
            try:
                output = super()._generate_single_turn(*args, **kwargs)
            except ServerAway as error:
                raise UserError(self._saved_before(error)) from None
        synced = self._in_phases() - before
        self._metrics[self._mode][metrics.SECONDS_GENERATE].append(time.perf_counter() - started - synced)
        return output

    def _saved_before(self, error: Exception) -> str:
        """A checkpoint of the steps that are done, for a run that cannot go on; the error with where it is."""
        self._save_last_step()
        if not self.state.global_step:
            return str(error)
        return f"{error} (checkpoint-{self.state.global_step} is saved: the same command goes on from it)"

    def _save_last_step(self) -> None:
        """A checkpoint as it would have been before the step that is under way, which has drawn random numbers."""
        if self._last_step is not None:  # else none was done since the run started, or went on from a checkpoint
            state.put_back(self, self._last_step)
            self._save_checkpoint(self.model, trial=None)
        self.accelerator.wait_for_everyone()  # torch's agent ends the others with the first

    # Verdicts, rewards, advantages

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        started = time.perf_counter()
        self._grades = self._grade(inputs, completions)
        limits = {"max_completion_length": self.max_completion_length, "grade_timeout": self._math["grade_timeout"]}
        inputs = [{**limits, **row} for row in inputs]
        if self._grades is not None:
            inputs = [{**row, "grade": grade} for row, grade in zip(inputs, self._grades, strict=True)]
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._end_alike()
        self._metrics[self._mode][metrics.SECONDS_GRADE].append(time.perf_counter() - started)
        return self._rewards_per_func

    def _end_alike(self) -> None:
        """A reward function that failed on one rank ends the run on every rank, after the gather that all wait in."""
        own = self._mishaps.error
        of_ranks = gather_object([(self._mishaps.retries, own and str(own))])
        self._retries += sum(retries for retries, _ in of_ranks)
        self._mishaps.retries, self._mishaps.error = 0, None
        if failed := next((line for _, line in of_ranks if line), None):
            raise RewardError(self._saved_before(RewardError(failed))) from own

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
        if self._mode == "train":
            self._rollout_tokens.append(self.state.num_input_tokens_seen - seen)
        self._log_verdicts()
        if self._reserve is not None and self._mode == "train":
            output = self._resample(output, inputs)
        if self._math["max_seq_length_train"] and self._mode == "train":
            output = self._limit(output)
        weights = self.reward_weights.to(self._rewards_per_func.device)
        rewards = (self._rewards_per_func * weights).nansum(dim=1)
        rewards[self._rewards_per_func.isnan().all(dim=1)] = torch.nan
        rewards = rewards.view(-1, self._group)
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
        self._log_rewards(rewards, every)
        self._metrics[self._mode][metrics.REWARD_RETRIES].append(self._retries)
        self._retries = 0
        others = self._in_phases() - before
        self._metrics[self._mode][metrics.SECONDS_SCORE].append(time.perf_counter() - started - others)
        return output

    @property
    def _group(self) -> int:
        size: Any = self.num_generations if self._mode == "train" else self.num_generations_eval
        return size

    def _resample(self, output: Rows, inputs: list[dict[str, Any]]) -> Rows:
        """Groups that are all right or all wrong give way to groups of fresh prompts that are neither, round by round.

        What is logged of rewards, verdicts and lengths stays that of the first draw: what replaces it was chosen.
        """
        group, ranks = self._group, self.accelerator.num_processes
        reserve: Any = self._reserve
        prompts = gather_object([row["prompt"] for row in inputs])
        rows, rewards, right = self._of_all_ranks(output), self._rewards_per_func, self._right()
        logs = [list(column) for column in self._log_columns()]
        wanted = drawn = len(right) // group
        for _ in range(self._math["resample_groups"]):
            dull = dull_groups(right, group)
            if not dull:
                break
            together = ranks // math.gcd(ranks, group)  # so many groups have as many rows on every rank
            fresh = reserve.take(-(-len(dull) // together) * together, avoid=prompts)
            prompts += [row["prompt"] for row in fresh]
            drawn += len(fresh)
            share = len(fresh) * group // ranks
            first = self.accelerator.process_index * share
            of_groups = [dict(row) for row in fresh for _ in range(group)]
            with self._only_seconds_logged():
                more = super()._generate_and_score_completions(of_groups[first : first + share])
            more_right = self._right()
            index = replacing(right, more_right, group)
            rows = select(join([rows, self._of_all_ranks(more)]), index)
            rewards = torch.cat([rewards, self._rewards_per_func])[index]
            logs = [
                [(kept + list(column)[-len(more_right) :])[i] for i in index]
                for kept, column in zip(logs, self._log_columns(), strict=True)
            ]
            right = [(right + more_right)[i] for i in index]
        for column, values in zip(self._log_columns(), logs, strict=True):
            column.clear()
            column.extend(values)
        log, left = self._metrics["train"], len(dull_groups(right, group))
        log[metrics.PROMPTS_DRAWN].append(drawn)
        log[metrics.PROMPTS_KEPT].append(wanted - left)
        log[metrics.PROMPTS_THROWN_AWAY].append(drawn - wanted)
        if left and not self._told_of_dull_groups:
            self._told_of_dull_groups = True
            logger.warning(
                f"resample_groups: {left} of {wanted} groups are all right or all wrong after {drawn - wanted} more "
                f"prompts; the step goes on with them. Later steps say it in {metrics.PROMPTS_KEPT} alone."
            )
        self._rewards_per_func = rewards
        rows["num_items_in_batch"] = scored(rows).sum()
        first = self.accelerator.process_index * len(inputs)
        return select(rows, range(first, first + len(inputs)))

    def _limit(self, rows: Rows) -> Rows:
        rows, longer = limited(rows, self._math["max_seq_length_train"], self._math["long_sequences"])
        rows["num_items_in_batch"] = self.accelerator.gather(scored(rows).sum()).sum()
        share = self.accelerator.gather(longer.float()).mean().item()
        self._metrics["train"][metrics.OVER_TRAIN_LENGTH].append(share)
        return rows

    def _right(self) -> list[bool | None]:
        """Of every completion of all ranks, whether it is right; None where it could not be graded."""
        grades: Any = self._grades
        if grades is None:
            raise UserError(
                "resample_groups: a row's `answer` is not a string, so that its completions have no verdict"
            )
        return gather_object([None if g.verdict.ungradable else g.verdict == Verdict.CORRECT for g in grades])

    def _log_columns(self) -> list[Any]:
        """The columns of the completions table, each with an entry for every row of a rollout."""
        logs: Any = self._logs
        columns = [logs["prompt"], logs["completion"], logs["advantages"]]
        return [*columns, *logs["rewards"].values(), *logs["extra"].values()]

    @contextmanager
    def _only_seconds_logged(self) -> Iterator[None]:
        log = self._metrics[self._mode]
        before = {name: len(values) for name, values in log.items()}
        yield
        for name, values in log.items():
            if name not in (*metrics.PHASES, metrics.TOKENS):
                del values[before.get(name, 0) :]

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

    def _log_rewards(self, rewards: Tensor, every_advantage: Tensor) -> None:
        """Rewards (P, G) and advantages (P * G,) of all ranks -> metrics of this step."""
        log = self._metrics[self._mode]
        graded = rewards[~rewards.isnan()]
        if graded.numel():
            log[metrics.REWARD_MIN].append(graded.min().item())
            log[metrics.REWARD_MAX].append(graded.max().item())
        log[metrics.ADVANTAGE_MEAN].append(every_advantage.mean().item())
        log[metrics.ADVANTAGE_STD].append(every_advantage.std(correction=0).item())

    def _log_verdicts(self) -> None:
        if self._grades is None:
            return
        log = self._metrics[self._mode]
        verdicts = gather_object([str(grade.verdict) for grade in self._grades])
        for verdict in Verdict:
            log[metrics.verdict_key(str(verdict))].append(verdicts.count(str(verdict)) / len(verdicts))
        right = torch.tensor([verdict == Verdict.CORRECT for verdict in verdicts]).view(-1, self._group)
        log[metrics.ACCURACY].append(right.float().mean().item())
        log[metrics.ALL_RIGHT].append(right.all(dim=1).float().mean().item())
        log[metrics.ALL_WRONG].append((~right).all(dim=1).float().mean().item())

    # The update

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """TRL's. Where memory runs out in the update: this optimizer step once more, with half the tokens a pass."""
        memory_ran_out = False
        self._running = None
        if self._longest_is_due:
            self._longest_is_due = False
            self._try_longest(model)
        while True:
            try:
                if memory_ran_out:
                    self._start_again(model)
                loss = super().training_step(model, inputs, num_items_in_batch)
            except torch.OutOfMemoryError as error:
                if self._running is None:  # in generation
                    raise
                memory_ran_out, reason = True, str(error)
            else:
                break
            self._halve_budget(reason)  # outside of the handler, whose traceback holds the activations
        if self._running is not None:
            self._accumulated.append(self._running)
        if self.accelerator.sync_gradients:
            self._accumulated.clear()
        self._running = None
        return loss

    def _halve_budget(self, reason: str) -> None:
        """Cut the parts of this optimizer step and of waiting rollouts to half of the largest that can be cut."""
        steps = {id(step): step for step in (*self._accumulated, *(self._buffered_inputs or ()))}.values()
        tokens = [
            (packed_tokens(*lay_out(rows)), len(rows["advantages"])) for step in steps for rows, _ in step["parts"]
        ]
        budget = self._half_of(max((n for n, rows in tokens if rows > 1), default=0), max(tokens)[0], reason)
        for step in steps:
            step["parts"] = [small for part in step["parts"] for small in self._cut(part, budget)]

    def _half_of(self, several: int, largest: int, reason: str) -> int:
        """The new token budget, half of ``several``: the most tokens of a pass that can be cut (0: none can)."""
        reason = reason.splitlines()[0]
        if not self._packs or self._needs_whole_micro_batches():
            raise OutOfMemory(
                f"out of memory in an update of {largest} tokens: lower per_device_train_batch_size, or turn "
                f"gradient_checkpointing on ({reason})"
            )
        if self.accelerator.num_processes > 1 or self.is_deepspeed_enabled:
            raise OutOfMemory(
                f"out of memory in an update of {largest} tokens: set update_token_budget to {largest // 2}, or turn "
                f"gradient_checkpointing on ({reason})"
            )
        if not several:
            raise OutOfMemory(
                f"out of memory in an update of one completion, {largest} tokens with its prompt: turn "
                f"gradient_checkpointing on, or lower max_completion_length or max_seq_length_train ({reason})"
            )
        self._math["update_token_budget"] = self._halved_to = several // 2
        logger.warning(f"Out of memory in an update of {several} tokens: update_token_budget is now {several // 2}.")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return several // 2

    def _try_longest(self, model: Any) -> None:
        """The largest micro-batch that can come, forward and backward, and all of it thrown away again.

        On the bare model, with gradients that are asked for and not accumulated: neither DDP nor DeepSpeed hears of it.
        """
        args, prompt, group = cast(MathGRPOConfig, self.args), self._longest_prompt(), cast(int, self.num_generations)
        length, limit = cast(int, self.max_completion_length), self._math["max_seq_length_train"]
        rows = args.per_device_train_batch_size
        arranges = self._packs and not self._needs_whole_micro_batches()
        in_step = rows if self.loss_type == "bnpo" else rows * args.gradient_accumulation_steps
        group = group if arranges else 1  # TRL shuffles: each row may have another prompt
        if limit:  # a short prompt leaves its completion more room, and the budget follows the longest of both
            length = max(1, min(length, limit - 1))
        budget = self._math["update_token_budget"] or rows * (len(prompt) + length)
        if limit:
            prompt = prompt[: max(1, limit - length)]
        device, model = self.accelerator.device, self.accelerator.unwrap_model(model)
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        while True:
            full, last = fill(budget, len(prompt), length, group, in_step) if arranges else (rows, 0)
            lengths = [length] * full + [last] * bool(last)
            try:
                with torch.random.fork_rng([device] if device.type == "cuda" else []), self._only_seconds_logged():
                    with self.compute_loss_context_manager():
                        loss = self._loss_of(model, longest_rows(prompt, lengths, group, self.eos_token_ids[0], device))
                    torch.autograd.grad(loss, trained, allow_unused=True)
                return
            except torch.OutOfMemoryError as error:
                reason = str(error)
            tokens = sum(lengths) + -(-len(lengths) // group) * (len(prompt) - 1)
            budget = self._half_of(tokens if len(lengths) > 1 else 0, tokens, reason)

    def _longest_prompt(self) -> list[int]:
        """The token ids of the prompt with the most characters, of the first 100,000."""
        rows: Any = self.train_dataset
        prompts = rows[:100_000]["prompt"] if hasattr(rows, "__len__") else [next(iter(rows))["prompt"]]
        return self._tokenize_prompts([max(prompts, key=lambda prompt: len(str(prompt)))])[0][0]  # text or messages

    def _cut(self, part: Part, budget: int) -> list[Part]:
        rows, weight = part
        plan = arrange(*lay_out(rows), budget)[0]
        if len(plan) < 2:
            return [part]
        n_rows = len(rows["advantages"])
        smaller = [self._part(rows, index, len(index), n_rows) for index in plan]
        return [(own, weight * share) for own, share in smaller]

    def _start_again(self, model: Any) -> None:
        """The gradient of this optimizer step's training steps that were done, from zero."""
        model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        running = self._running
        for step in self._accumulated:
            self.accelerator.backward(self._compute_loss(model, step))
        self._running = running

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        skipped = self._nonfinite.seen(norm)
        self._metrics["train"][metrics.SKIPPED].append(float(skipped))
        if skipped:
            for parameter in model.parameters():
                parameter.grad = None
        if self._nonfinite.too_many:
            error = self._nonfinite.error(self.state.global_step)
            self._save_last_step()
            raise error
        return norm

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self._running is not None:  # once more
            return self._running
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self._packs or self._buffered_inputs is buffered:
            return inputs
        # So many micro-batches in a row lie in one optimizer step, however the two numbers relate.
        window = math.gcd(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        of_trl = self._buffered_inputs
        steps = [step for i in range(0, len(of_trl), window) for step in self._arrange(of_trl[i : i + window])]
        self._buffered_inputs = [{"parts": parts} for parts in steps]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _arrange(self, micro_batches: list[Rows]) -> list[list[Part]]:
        """TRL's micro-batches of one optimizer step -> the parts to compute in each of its training steps.

        Every rank gets the same number of parts, since each is a forward and a backward pass that the others wait for.
        The last step has one in any case: the optimizer has to see gradients, if only of 0.
        """
        if self._needs_whole_micro_batches():
            return [[(rows, 1.0)] for rows in micro_batches]
        n_rows = len(micro_batches[0]["advantages"])
        if self.loss_type == "bnpo":  # divides by the tokens of TRL's micro-batch, which stays together
            sources = micro_batches
            of_steps = [[(rows, index) for index in self._plan(rows, n_rows)[0]] for rows in sources]
        else:
            rows = self._of_all_ranks(join(micro_batches))
            sources = [rows] * len(micro_batches)
            plan = self._plan(rows, n_rows, self.accelerator.num_processes)
            own = [(rows, index) for index in plan[self.accelerator.process_index]]
            own += [(rows, [])] * (max(map(len, plan)) - len(own))
            of_steps = over_steps(own, len(micro_batches))
        sizes = gather_object([[[len(index) for _, index in parts] for parts in of_steps]])
        steps: list[list[Part]] = []
        for step, (rows, parts) in enumerate(zip(sources, of_steps, strict=True)):
            largest = [max(of_ranks) for of_ranks in zip_longest(*(rank[step] for rank in sizes), fillvalue=0)]
            own = parts + [(rows, [])] * (len(largest) - len(parts))
            steps.append([self._part(*part, n, n_rows) for part, n in zip(own, largest, strict=True)])
        if not any(steps):
            steps[-1] = [(shortest(micro_batches[-1]), 0.0)]
        if self.is_deepspeed_enabled:  # its offloaded gradients need the first backward pass of a step, too
            steps = [parts or [(shortest(micro_batches[0]), 0.0)] for parts in steps]
        return steps

    def _needs_whole_micro_batches(self) -> bool:
        """Whether a term of the loss is a mean or a quantile over TRL's very micro-batch."""
        return self._entropy_bonus_enabled or self.top_entropy_quantile < 1.0 or self.aux_loss_enabled

    def _plan(self, rows: Rows, n_rows: int, ranks: int = 1) -> list[list[list[int]]]:
        """The micro-batches of each rank, as numbers of ``rows``; ``n_rows`` is how many TRL's micro-batch has."""
        budget = self._math["update_token_budget"] or n_rows * padded_tokens(rows) // len(rows["advantages"])
        prompts, prompt_tokens, tokens = lay_out(rows)
        if self._only_advantages_move_weights():
            signal = rows["advantages"].reshape(len(tokens), -1).ne(0).any(dim=1).tolist()
            tokens = [n if has else 0 for n, has in zip(tokens, signal, strict=True)]
        return arrange(prompts, prompt_tokens, tokens, budget, ranks)

    def _part(self, rows: Rows, index: list[int], size: int, n_rows: int) -> Part:
        """Some rows, and what their loss weighs in the loss of the micro-batches of ``n_rows`` that they came from.

        Filled up to ``size``: TRL gathers a number of each row, as many from every rank.
        """
        part = filled(rows, index, size)
        return part, weight_of_part(self.loss_type, scored(part), n_rows, scored(rows).sum())

    def _of_all_ranks(self, rows: Rows) -> Rows:
        """The rows of every rank, in the order of ranks."""
        if self.accelerator.num_processes == 1:
            return rows
        gathered = dict(rows)
        for name, value in rows.items():
            if is_per_row(value):
                if value.dim() > 1:
                    value = self.accelerator.pad_across_processes(value, dim=1, pad_first=is_of_prompt(name))
                gathered[name] = self.accelerator.gather(value)
        return gathered

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if "parts" not in inputs:
            return self._loss_of(model, inputs)
        self._running = inputs
        if not inputs["parts"]:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        *first, (rows, weight) = inputs["parts"]
        done = torch.zeros((), device=self.accelerator.device)
        for part in first:
            done += self._accumulate(model, *part)
        return self._loss_of(model, rows) * weight + done  # the caller runs the last backward pass, and synchronises

    def _accumulate(self, model: Any, rows: Rows, weight: Any) -> Tensor:
        """Forward and backward of a part that others follow."""
        state = self.accelerator.gradient_state
        synchronises = state.sync_gradients
        with self.accelerator.no_sync(model):
            loss = self._loss_of(model, rows) * weight
            state._set_sync_gradients(False)
            try:
                # As in transformers' own training step: the loss is already divided by the accumulation steps.
                options = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
                self.accelerator.backward(loss, **options)
            finally:
                state._set_sync_gradients(synchronises)
        return loss.detach()

    def _loss_of(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of one micro-batch, with the surrogate and the KL estimator that were asked for."""
        held = hold_ratio_at_one(inputs) if self._math["surrogate"] == "reinforce" else inputs
        beta = self.beta
        ours = beta != 0.0 and self._math["kl_estimator"] != "k3"  # TRL has k3 built in
        try:
            self.beta = 0.0 if ours else beta
            loss = super()._compute_loss(model, held)
        finally:
            self.beta = beta
        logps: Any = self._logps
        self._logps = None
        mask = scored(inputs)
        now = logps.detach()
        old = inputs.get("old_per_token_logps", now)
        means = {metrics.RATIO: (now - old).exp(), metrics.APPROX_KL: kl_per_token(old, now, "k3")}
        if ours:
            kl = self._kl(logps, held, mask)
            means[metrics.KL] = kl.detach()
            loss = loss + beta * self._aggregated(kl, mask, inputs["num_items_in_batch"])
        self._log_over_tokens(means, mask)
        return loss

    def _kl(self, logps: Tensor, inputs: dict[str, Any], mask: Tensor) -> Tensor:
        kl = kl_per_token(logps, inputs["ref_per_token_logps"], self._math["kl_estimator"])
        args: Any = self.args
        if not args.use_bias_correction_kl:
            return kl
        old = inputs.get("old_per_token_logps", logps.detach())
        return kl * importance_ratio(logps, old, mask, self.importance_sampling_level)

    def _aggregated(self, values: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """Values (B, T) as TRL's loss reduces them; ``tokens`` are those of the rollout batch, over all ranks."""
        args: Any = self.args
        per_step, accumulation = tokens.clamp(min=1) / self.accelerator.num_processes, 1
        if self._mode == "train":
            accumulation = self.current_gradient_accumulation_steps
            per_step = per_step * accumulation / args.steps_per_generation
        return aggregate(values, mask, self.loss_type, args.max_completion_length, per_step, accumulation)

    def _log_over_tokens(self, values: dict[str, Tensor], mask: Tensor) -> None:
        """Log the mean of each (B, T) over the scored tokens of all ranks."""
        sums = torch.stack([*((value * mask).sum() for value in values.values()), mask.sum().float()])
        *totals, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        for name, total in zip(values, totals, strict=True):
            self._metrics[self._mode][name].append(total / max(count, 1.0))

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
        with self._offload if torch.is_grad_enabled() else nullcontext():
            if not self._packs or compute_aux_loss:
                flags = (batch_size, compute_entropy, compute_aux_loss)
                result = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *flags, **kwargs
                )
            else:
                chunk = (logits_to_keep, batch_size, compute_entropy)
                result = self._packed_logps_and_entropies(model, input_ids, attention_mask, *chunk, **kwargs)
        self._logps = result[0]
        return result

    def _packed_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        score = super()._get_per_token_logps_and_entropies
        logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        entropies = torch.zeros_like(logps)
        for index in self._score_batches(input_ids, attention_mask, logits_to_keep, batch_size):
            at = torch.tensor(index, device=input_ids.device)
            row = pack(input_ids[at], attention_mask[at], logits_to_keep)
            # Not one token to score, while other ranks may wait for this forward pass; or next to none to save.
            if row is None or row.input_ids.numel() > WORTH_PACKING * input_ids[at].numel():
                plain = score(
                    model, input_ids[at], attention_mask[at], logits_to_keep, compute_entropy=compute_entropy, **kwargs
                )
                logps = logps.index_put((at,), plain[0].to(logps.dtype))
                if compute_entropy:
                    entropies = entropies.index_put((at,), plain[1].to(logps.dtype))
                continue
            with self.accelerator.autocast():
                outputs = model(
                    input_ids=row.input_ids,
                    position_ids=row.position_ids,
                    # A mask in four dimensions is taken as it is: transformers builds none, and ours needs none.
                    attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
                    shift_labels=row.shift_labels,
                    fused_lm_head=True,
                    packed_groups=row.groups,
                    scored_index=row.scored_index,
                )
            logps = logps.index_put((at,), unpack(outputs.log_probs, row).to(logps.dtype))
            if compute_entropy:
                entropies = entropies.index_put((at,), unpack(outputs.entropy, row).to(logps.dtype))
        return logps, entropies if compute_entropy else None, None

    def _score_batches(
        self, input_ids: Tensor, attention_mask: Tensor, completion_length: int, batch_size: int | None
    ) -> list[list[int]]:
        """The rows of each forward pass. A part of the update is one; other rows are filled to the token budget, in as
        many passes on every rank."""
        if torch.is_grad_enabled():
            return [list(range(len(input_ids)))]
        prompts, prompt_tokens, tokens = layout(input_ids, attention_mask, completion_length)
        budget = self._math["update_token_budget"] or (batch_size or len(tokens)) * input_ids.size(1)
        batches = arrange(prompts, prompt_tokens, tokens, budget)[0] or [[0]]
        passes = int(self.accelerator.gather(torch.tensor([len(batches)], device=input_ids.device)).max())
        return batches + batches[-1:] * (passes - len(batches))

    # Checkpoints

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Transformers', which would train one more step than ``max_steps`` after a checkpoint of the last one."""
        self._take_up(kwargs["steps_trained_in_current_epoch"])
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with self._reference.left_out() if self._reference is not None else nullcontext():
            super()._save(output_dir, state_dict)
        if self.args.should_save:  # a pickle that nothing reads, with whatever token stands among the arguments
            Path(str(output_dir or self.args.output_dir), TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _take_up(self, position: int = 0) -> None:
        if self._held is not None:
            state.go_on(self, self._held, position)
            self._held = None

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._last_step = state.moment(self)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir, args = Path(super()._get_output_dir(trial)), self.args
        with checkpoints.written_aside(run_dir / f"checkpoint-{self.state.global_step}", self.accelerator) as folder:
            self._aside = folder.parent
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._aside = None
        if args.should_save:  # by number, and not by time as transformers: clocks jump
            rotate_checkpoints(str(run_dir), args.save_total_limit, self.state.best_model_checkpoint, use_mtime=False)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside or super()._get_output_dir(trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._reference is not None:
            self._reference.save(Path(output_dir), writes=self.args.should_save)
        torch.save(state.state_of(self), Path(output_dir) / checkpoints.STATE.format(self.accelerator.process_index))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._reference is not None:
            self._reference.load(Path(checkpoint))
        elif self.beta != 0.0:
            refuse_lost_reference(Path(checkpoint))
        held = Path(checkpoint) / checkpoints.STATE.format(self.accelerator.process_index)
        if held.exists():
            device = self.accelerator.device  # torch.load knows no cpu:0, which DeepSpeed says
            device = torch.device("cpu") if device.type == "cpu" else device
            self._held = torch.load(held, map_location=device, weights_only=True)
        if isinstance(self._sampler, RepeatSampler) and self._sampler.shuffle:
            for _ in range(int(self.state.epoch or 0)):  # the orders of the epochs that are done
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    # Logging

    @property
    def _mode(self) -> str:
        return "train" if self.model is not None and self.model.training else "eval"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._take_up()  # where no epoch is left to run
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
        if self.use_vllm:
            log[metrics.SYNC_SHARE] = [log[metrics.SECONDS_SYNC][0] * len(steps) / sum(steps)]
        log[metrics.TOKENS_PER_SECOND] = [self._tokens_per_step * len(steps) / sum(steps)]
        if self.accelerator.device.type == "cuda":
            log[metrics.MEMORY_ALLOCATED] = [torch.cuda.max_memory_allocated()]
            log[metrics.MEMORY_RESERVED] = [torch.cuda.max_memory_reserved()]
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        log[metrics.MEMORY_RESIDENT] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]


def _resolve(reward_funcs: Any, mishaps: Mishaps) -> Any:
    """Keys of `REWARDS` become their functions, and plain functions are checked; anything else is TRL's to read."""
    if isinstance(reward_funcs, list):
        return [_resolve(func, mishaps) for func in reward_funcs]
    if isinstance(reward_funcs, str):
        reward_funcs = REWARDS.get(reward_funcs, reward_funcs)
    is_model = isinstance(reward_funcs, torch.nn.Module)
    return checked(reward_funcs, mishaps) if callable(reward_funcs) and not is_model else reward_funcs
