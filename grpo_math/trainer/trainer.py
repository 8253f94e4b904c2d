"""`MathGRPOTrainer`: TRL's `GRPOTrainer` with verdicts, more advantages and surrogates, and packed updates.

The way of the data, each stop with the override that it begins in and the file that does the work:

    rollout          prompts -> completions              _generate_single_turn             generation/
    -> verdicts      each completion graded once         _grade                            grading/
    -> rewards       (B, F), then weighted (P, G)        _calculate_rewards                rewards/
                     uniform groups are replaced         _generate_and_score_completions   resample.py
    -> advantages    (P, G)                              _set_advantages                   advantages.py
    -> arrange       a step's rows, by prompt            _prepare_inputs                   arrange.py
    -> micro-batches rows, and the weight of their loss  _compute_loss                     micro_batches.py, budget.py
    -> log-probs     (B, T), from packed rows            _get_per_token_logps_...          scoring.py, packing.py
    -> loss          TRL's, with terms of ours           _loss_of                          losses.py, reference.py
    -> gradient      summed over micro-batches           training_step, _get_grad_norm     budget.py, nonfinite.py

This is the only file that overrides private methods of TRL, whose loss it does not copy. Attributes such as ``_grades``
carry values past TRL's own methods. Differences from TRL:

- advantages are TRL's or others (`advantages.py`), and so are surrogates and KL estimators (`losses.py`). With these,
  TRL's ``policy_loss`` lacks that term, and ``clip_ratio/*`` is 0;
- with ``pack_updates`` the rows of an optimizer step are grouped by prompt, shared among ranks (`arrange.py`) and
  scored packed, on all ranks or none (`scoring.try_out`). Completions without advantage are left out if no other term
  of the loss needs them. Gradients are TRL's to rounding; entropy and clip fractions are of trained rows;
- a resumed run ends as if it had not stopped (`state.py`); a step that runs out of memory is split (`budget.py`).
"""

import math
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer import TRAINING_ARGS_NAME
from trl import GRPOConfig, GRPOTrainer
from trl.models import get_act_offloading_ctx_manager
from trl.trainer.utils import RepeatSampler

from grpo_math.errors import ConfigError, RewardError, UserError
from grpo_math.generation.decoding import cache_given_back, lean_generation
from grpo_math.generation.models import model_path
from grpo_math.generation.sync import ServerAway, adapter_sync
from grpo_math.grading import grade_batch, offending
from grpo_math.rewards import text_of
from grpo_math.rewards.columns import gold_of
from grpo_math.rewards.guard import Mishaps
from grpo_math.run import checkpoints, metrics
from grpo_math.run.main_process import on_main
from grpo_math.run.user_functions import is_user_function
from grpo_math.trainer import console, correction, gradients, longest, losses, scoring, state, table, tiles
from grpo_math.trainer.advantages import advantages, trls, weighted
from grpo_math.trainer.ahead import Ahead
from grpo_math.trainer.budget import Redo, TokenBudget
from grpo_math.trainer.config import MathGRPOConfig, settings_of
from grpo_math.trainer.endings import Endings
from grpo_math.trainer.golds import look_for_golds
from grpo_math.trainer.meter import StepMeter, over_tokens, shares, spread
from grpo_math.trainer.micro_batches import Splitter
from grpo_math.trainer.nonfinite import NonFiniteSteps
from grpo_math.trainer.overrides import SCORING, replaced, results_of, sees_rows
from grpo_math.trainer.packing import Unpackable
from grpo_math.trainer.reference import follow, refuse_lost_reference
from grpo_math.trainer.resample import Resampler
from grpo_math.trainer.reward_funcs import resolved
from grpo_math.trainer.rows import Rows, limited, scored
from grpo_math.trainer.run_files import RunFiles
from grpo_math.trainer.turns import Turns, talk_of

logger = get_logger(__name__)


class MathGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` for mathematics: takes what it takes, does what it does, and what this module's head lists.

    ``args`` may be a plain `GRPOConfig`: the new settings are then at their TRL-equal values. A reward function may
    also be a key of `REWARDS`, and the model ``"embedded"``.
    """

    _tag_names = [*GRPOTrainer._tag_names, "grpo_math"]  # noqa: RUF012
    # TRL's tests call `_generate` on a trainer without `__init__`, and `_generate` reads these two.
    turns: Turns | None = None
    endings: Any = None

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *arguments: Any, **kwargs: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MathGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        model = model_path(model) if isinstance(model, str) else model
        self.settings = settings_of(args)
        self.meter = StepMeter(lambda: self._metrics[self._mode])
        self._grades: list[Any] | None = None
        self._mishaps, self._retries = Mishaps(), 0  # of this rank in these rewards; of all ranks in this rollout
        self._nonfinite = NonFiniteSteps(self.settings.max_nonfinite_steps)
        self._held: dict[str, Any] | None = None  # of the checkpoint that this run goes on from
        self._sampler: Any = None
        warning = look_for_golds(reward_funcs, kwargs.get("train_dataset", arguments[0] if arguments else None))
        talk = talk_of(model, args, arguments, kwargs)
        with adapter_sync(self.settings.vllm_sync, args), console.one_loading_bar():
            super().__init__(model, resolved(reward_funcs, self._mishaps), args, *arguments, **kwargs)
        self.scale_rewards = trls(self.scale_rewards)
        self.turns = Turns(self, talk) if talk and self.tools else None  # an environment may have none
        if warning:
            logger.warning(warning)
        self.endings = Endings(self)
        self._set_up_updates()
        self._reference = follow(self, n) if (n := self.settings.reference_refresh_steps) else None
        self._resampler = Resampler(self.train_dataset, args.seed, n) if (n := self.settings.resample_groups) else None
        if self.use_vllm:
            generation: Any = self.vllm_generation
            generation.sync_weights = self.meter.phase(metrics.SECONDS_SYNC)(generation.sync_weights)
        self.ahead = Ahead(self) if self.settings.staleness else None
        self.add_callback(RunFiles(self))
        console.replace_printers(self)

    def _set_up_updates(self) -> None:
        settings, accelerator = self.settings, self.accelerator
        # DDP warns if it looks for unused parameters and finds none. TRL lets it look in vision models, with some.
        if self.args.ddp_find_unused_parameters is None and accelerator.ddp_handler is not None:
            accelerator.ddp_handler.find_unused_parameters = False
        models = [accelerator.unwrap_model(model) for model in (self.model, self.ref_model) if model is not None]
        packs = settings.pack_updates and scoring.set_up(self, models)
        self.tiled = tiles.set_up_as_asked(models, self.args, accelerator)
        whole = self._entropy_bonus_enabled or self.aux_loss_enabled or self.top_entropy_quantile < 1.0
        whole = whole or (packs and sees_rows(self, MathGRPOTrainer))
        only_signal = self.beta == 0.0 and not whole and not is_user_function(settings.surrogate)
        self.splitter = Splitter(accelerator, self.loss_type, whole, only_signal, deepspeed=self.is_deepspeed_enabled)
        alone = accelerator.num_processes == 1 and not self.is_deepspeed_enabled
        self.budget = TokenBudget(settings.update_token_budget, splits=packs and not whole, alone=alone)
        self._redo = Redo(accelerator, self.budget, self.splitter)
        self._places = gradients.places_of(self.model, alone=alone and not self.is_fsdp_enabled)
        self.scorer = scoring.PackedScorer(accelerator, self.budget, models) if packs else None
        self._offload: Any = nullcontext()
        if settings.activation_offloading:
            self._offload = get_act_offloading_ctx_manager(cast(Any, self.model), warn_if_no_head=False)
        if (limit := settings.max_seq_length_train) and self._is_vlm:
            raise ConfigError("max_seq_length_train", limit, "does not work with images", "leave it at 0")
        tries = longest.is_tried(settings, accelerator)
        self._first_passes = [scoring.try_out] * packs + [longest.try_longest] * tries

    # Generation

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        shares, earlier = self.scorer and not self.use_vllm, self.turns.earlier if self.turns else None
        with (
            self.meter.phase(metrics.SECONDS_GENERATE),
            nullcontext() if self.use_vllm else cache_given_back(),
            lean_generation(self.accelerator.unwrap_model(self.model_wrapped), earlier) if shares else nullcontext(),
        ):
            try:
                return super()._generate_single_turn(*args, **kwargs)
            except ServerAway as error:
                raise UserError(state.saved_before(self, error)) from None

    def _tool_call_loop(self, prompts: Any, *arguments: Any) -> Any:
        return self.turns.play(*arguments) if self.turns else super()._tool_call_loop(prompts, *arguments)

    def _generate(self, prompts: list[Any]) -> Any:
        with self.turns.remembered() if self.turns else nullcontext():
            generated = super()._generate(prompts)
        if self.endings:
            self.endings.count(self, generated[1])
        return generated

    # Verdicts, rewards, advantages

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        with self.meter.phase(metrics.SECONDS_GRADE):
            self._grades = self._grade(inputs, completions)
            limits = {"max_completion_length": self.max_completion_length, "grade_timeout": self.settings.grade_timeout}
            inputs = [{**limits, **row} for row in inputs]
            if self._grades is not None:
                inputs = [{**row, "grade": grade} for row, grade in zip(inputs, self._grades, strict=True)]
            self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            self._end_alike()
            table.tell(self, inputs, completion_ids_list)
            if self.turns:
                self._log(self.turns.figures(completions, self._grades))
        return self._rewards_per_func

    def _grade(self, inputs: list[dict[str, Any]], completions: list[Any]) -> list[Any] | None:
        """The grades of this rank's completions; None where no row of any rank has a gold answer."""
        answers = [gold_of(row) for row in inputs]
        if not any(gather_object([any(gold is not None for gold in answers)])):
            return None
        gold_texts, texts = [gold or "" for gold in answers], [text_of(completion) for completion in completions]
        formats = [row.get("answer_format") for row in inputs]
        grades = grade_batch(gold_texts, texts, answer_format=formats, timeout=self.settings.grade_timeout)
        table.keep_ungradable(self, gather_object(offending(grades, gold_texts, texts)))
        return grades

    def _end_alike(self) -> None:
        """A reward function that failed on one rank ends the run on every rank, after the gather that all wait in."""
        error = self._mishaps.error
        of_ranks = gather_object([(self._mishaps.retries, error and str(error))])
        self._retries += sum(retries for retries, _ in of_ranks)
        self._mishaps.retries, self._mishaps.error = 0, None
        if failed := next((line for _, line in of_ranks if line), None):
            raise RewardError(state.saved_before(self, RewardError(failed))) from error

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if scoring.try_out in self._first_passes:  # the first of them: this evaluation comes before training
            self._first_passes.pop(0)(self, self.model)
        with self.meter.phase(metrics.SECONDS_SCORE):
            seen = self.state.num_input_tokens_seen
            output = self._rollout(inputs)
            if self._grades is not None:
                of_all = gather_object([(str(grade.verdict), grade.in_format) for grade in self._grades])
                self._log(shares([v for v, _ in of_all], [kept for _, kept in of_all], self._group))
            if self._mode == "train":
                self.meter.rollout_tokens.append(self.state.num_input_tokens_seen - seen)
                if self._resampler is not None:
                    output = self._resampler(self, output, inputs, self._rollout)
                self._log(correction.figures(output, self.accelerator))
                output = self.endings.mask(output, self.accelerator)
                if self.settings.max_seq_length_train:
                    output = self._limit(output)
            self._set_advantages(output)
            self._log({metrics.REWARD_RETRIES: self._retries})
            self._retries = 0
        self.meter.tell_first(self, len(inputs))
        return output

    def _rollout(self, inputs: list[dict[str, Any]]) -> Rows:
        with results_of(self, "_calculate_rewards") as rewards:
            output = super()._generate_and_score_completions(inputs)
        self._rewards_per_func = rewards[0]
        return output

    @property
    def _group(self) -> int:
        return cast(int, self.num_generations if self._mode == "train" else self.num_generations_eval)

    def _set_advantages(self, output: Rows) -> None:
        """This rank's advantages from the rewards of all; TRL's, where each reward function is normalized."""
        weights = self.reward_weights.to(self._rewards_per_func.device)
        rewards = weighted(self._rewards_per_func, weights).view(-1, self._group)
        settings, n = self.settings, len(output["advantages"])
        if self.multi_objective_aggregation == "sum_then_normalize":
            values = advantages(rewards, settings.baseline, settings.scale_rewards, settings.advantage_eps).flatten()
            first = self.accelerator.process_index * n
            output["advantages"] = values[first : first + n]
            logged: Any = self._logs["advantages"]
            for _ in range(min(len(logged), len(values))):
                logged.pop()
            logged.extend(values.tolist())
        else:
            values = self.accelerator.gather(output["advantages"])
        self._log(spread(rewards, values))

    def _limit(self, rows: Rows) -> Rows:
        rows, longer = limited(rows, self.settings.max_seq_length_train, self.settings.long_sequences)
        rows["num_items_in_batch"] = self.accelerator.gather(scored(rows).sum()).sum()
        self._log({metrics.OVER_TRAIN_LENGTH: self.accelerator.gather(longer.float()).mean().item()})
        return rows

    # The update

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """TRL's. Where memory runs out in the update: this optimizer step once more, with half the tokens a pass."""
        while self._first_passes:
            self._first_passes.pop(0)(self, model)
        step = super().training_step
        return self._redo.step(self, model, lambda: step(model, inputs, num_items_in_batch))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        skipped = self._nonfinite.seen(norm)
        self._metrics["train"][metrics.SKIPPED].append(float(skipped))
        if skipped:
            for parameter in model.parameters():
                parameter.grad = None
        if error := self._nonfinite.error(self.state.global_step):
            state.save_last_step(self)
            raise error
        return norm

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self._redo.running is not None:  # once more
            return self._redo.running
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        of_trl = self._buffered_inputs
        if not self.scorer or of_trl is buffered or sees_rows(self, MathGRPOTrainer):
            return inputs
        # So many micro-batches in a row lie in one optimizer step. TRL's rows stay in the buffer: callbacks read them.
        window = math.gcd(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        windows = (of_trl[i : i + window] for i in range(0, len(of_trl), window))
        steps = chain.from_iterable(self.splitter.split(rows, self.budget.tokens) for rows in windows)
        self._buffered_inputs = [{**rows, "micro_batches": step} for rows, step in zip(of_trl, steps, strict=True)]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._places.make()
        if "micro_batches" not in inputs:
            return self._loss_of(model, inputs)
        self._redo.running = inputs
        return self.splitter.accumulate(inputs["micro_batches"], lambda rows: self._loss_of(model, rows), model)

    def _loss_of(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of one micro-batch, with the surrogate and the KL estimator that were asked for."""
        beta, held, settings = self.beta, inputs, self.settings
        if settings.surrogate == "reinforce":
            held = losses.hold_ratio_at_one(inputs)
        elif is_user_function(settings.surrogate):  # TRL's own surrogate is 0 then, whatever the ratio
            held = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        our_kl = beta != 0.0 and settings.kl_estimator != "k3"  # TRL has k3 built in
        with replaced(self, beta=0.0 if our_kl else beta), results_of(self, SCORING) as scores:
            loss = super()._compute_loss(model, held)
        logps = cast(Tensor, scores[0][0])
        mask, now = scored(inputs), logps.detach()
        old = inputs.get("old_per_token_logps", now)
        means = {metrics.RATIO: (now - old).exp(), metrics.APPROX_KL: losses.kl_per_token(old, now, "k3")}
        if is_user_function(settings.surrogate):
            values = losses.own_surrogate(settings.surrogate, logps, old, inputs["advantages"], mask)
            if self.use_vllm and self.vllm_importance_sampling_correction:
                values = values * inputs["importance_sampling_ratio"]
            loss = loss + self._aggregated(values, mask, inputs)
        if our_kl:
            kl = losses.kl_per_token(logps, inputs["ref_per_token_logps"], settings.kl_estimator)
            if cast(Any, self.args).use_bias_correction_kl:
                sampler = held.get("old_per_token_logps", now)
                kl = kl * losses.importance_ratio(logps, sampler, mask, self.importance_sampling_level)
            means[metrics.KL] = kl.detach()
            loss = loss + beta * self._aggregated(kl, mask, inputs)
        self._log(over_tokens(means, mask, self.accelerator))
        return loss

    def _aggregated(self, values: Tensor, mask: Tensor, inputs: Rows) -> Tensor:
        """Values (B, T) as TRL's loss reduces them."""
        args: Any = self.args
        # num_items_in_batch counts the tokens of the rollout batch on all ranks.
        per_step, accumulation = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes, 1
        if self._mode == "train":
            accumulation = self.current_gradient_accumulation_steps
            per_step = per_step * accumulation / args.steps_per_generation
        return losses.aggregate(values, mask, self.loss_type, args.max_completion_length, per_step, accumulation)

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
    ) -> scoring.Scores:
        plain = scoring.next_to_rows(super()._get_per_token_logps_and_entropies)
        rows = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
        with self._offload if torch.is_grad_enabled() else nullcontext():
            if self.scorer is not None and not compute_aux_loss:
                try:
                    return self.scorer(plain, *rows, **kwargs)
                except Unpackable as error:
                    self.scorer.leave_alone(error)
                    self.scorer = None
            return plain(*rows, compute_aux_loss, **kwargs)

    _scores = _get_per_token_logps_and_entropies  # ours, whatever a subclass makes of it

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        resume = on_main(lambda: checkpoints.to_resume(Path(str(self.args.output_dir)), resume_from_checkpoint))
        self.saved_step: int | None = None  # the step of the last checkpoint
        self._last_step: dict[str, Any] | None = None  # the moment after a step, for a run that fails in the next one
        return super().train(resume, *args, **kwargs)

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
        """Transformers'. Earlier checkpoints are deleted, and this one is pushed, only when this one is whole."""
        run_dir, step, args = Path(self._get_output_dir(trial=trial)), self.state.global_step, self.args
        folder = run_dir / f"checkpoint-{step}"
        with checkpoints.sealed(folder, self.accelerator), replaced(args, save_total_limit=None, push_to_hub=False):
            super()._save_checkpoint(model, trial)
        self.saved_step = step
        if args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if args.should_save:
            checkpoints.rotate(run_dir, step, args.save_total_limit, self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._reference is not None:
            self._reference.save(Path(output_dir), writes=self.args.should_save)
        torch.save(state.to_keep(self), Path(output_dir) / checkpoints.STATE.format(self.accelerator.process_index))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._reference is not None:
            self._reference.load(Path(checkpoint))
        elif self.beta != 0.0:
            refuse_lost_reference(Path(checkpoint))
        self._held = state.read(Path(checkpoint), self.accelerator.process_index, self.accelerator.device)
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

    def _log(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics[self._mode][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._take_up()  # where no epoch is left to run
        if self._mode == "train" and self._metrics["train"].get(metrics.SECONDS_STEP):
            self.meter.write(self.args, vllm=self.use_vllm, cuda=self.accelerator.device.type == "cuda")
        # TRL prints every column of the table in one row, which no terminal has room for: 0 keeps TRL from printing.
        with replaced(self, num_completions_to_print=0):
            super().log(logs, start_time)
        if self.log_completions and self.accelerator.is_main_process and console.is_of_step(logs):
            console.print_completions(self._logs, self.state.global_step, self.num_completions_to_print)
