"""`MathGRPOTrainer`: TRL's `GRPOTrainer` with verdicts, more advantages and surrogates, and packed updates.

The way of the data, each stop with the override that it begins in and the file that does the work:

    rollout          prompts -> completions              _generate_single_turn             generation/
    -> verdicts      each completion graded once         _grade                            grading/
    -> rewards       (B, F), then weighted (P, G)        _calculate_rewards                rewards/
                     dull groups give way to fresh ones  _generate_and_score_completions   resample.py
    -> advantages    (P, G)                              _set_advantages                   advantages.py
    -> arrange       a step's rows, by prompt            _prepare_inputs                   arrange.py
    -> parts         rows, and what their loss weighs    _compute_loss                     parts.py, budget.py
    -> log-probs     (B, T), from packed rows            _get_per_token_logps_...          scoring.py, packing.py
    -> loss          TRL's, with terms of ours           _loss_of                          losses.py, reference.py
    -> gradient      of each part, added up              training_step, _get_grad_norm     parts.py, nonfinite.py

This is the only file that overrides private methods of TRL; `tests/trainer/test_trl_contract.py` holds their
signatures. What TRL calls in between hands nothing on, so that a few attributes have to: ``_grades``,
``_rewards_per_func``, ``_logps``, ``Redo.running``. Where this differs from TRL:

- with ``tools``, turns are played by the loop that evaluations use too, right on several ranks (`turns.py`);
- completions are graded once where rows have an ``answer`` or a ``solution`` (`golds.py`), and the reward functions
  get the grades as ``grade``;
- a reward function that raises is called once more; one that fails ends the run on every rank (`rewards/guard.py`);
- advantages are those of `advantages.py`: TRL's with ``baseline=group_mean, advantage_eps=1e-4``, or the user's own;
- ``surrogate=reinforce`` drops the old log-probs; k1 or k2 takes the place of TRL's k3, and a surrogate of the user's
  own that of the clipped ratio (`losses.py`); TRL's ``policy_loss`` is then without that term, ``clip_ratio/*`` is 0;
- with ``pack_updates``, prompts are prefilled once a group; the rows of an optimizer step are put together by prompt,
  shared out among ranks (`arrange.py`) and scored packed; completions whose advantage is zero leave the update where no
  other term moves a weight by them. Gradients are TRL's, to rounding; entropy and clip fractions are logged as means
  over the completions that were trained on. A model that cannot be packed is scored as by TRL (`scoring.try_out`);
- ``resample_groups`` replaces groups that are all right or all wrong (`resample.py`);
- ``reference_refresh_steps`` makes the reference the policy (`reference.py`);
- checkpoints are written aside and renamed, and a run goes on from one as if it had not stopped (`state.py`);
- ``max_seq_length_train`` bounds what is trained on, not what is sampled and graded;
- before the first step the largest micro-batch is tried (`longest.py`), and activations can go to main memory;
- a step that runs out of memory is done once more in smaller parts (`budget.py`);
- a step whose gradient is not finite moves no weight (`nonfinite.py`);
- with vLLM and a PEFT adapter, the adapter alone goes to vLLM (`generation/sync.py`), and with ``staleness`` it samples
  the next batch while one is trained on (`ahead.py`);
- what a run directory holds is written by default (`run_files.py`).

Does not copy TRL's loss.
"""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig, GRPOTrainer
from trl.models import get_act_offloading_ctx_manager
from trl.trainer.utils import RepeatSampler

from grpo_math.errors import ConfigError, RewardError, UserError
from grpo_math.generation.decoding import cache_given_back, lean_generation
from grpo_math.generation.models import EMBEDDED, model_path
from grpo_math.generation.sync import ServerAway, adapter_sync
from grpo_math.grading import grade_batch, offending
from grpo_math.rewards import text_of
from grpo_math.rewards.columns import gold_of
from grpo_math.rewards.guard import Mishaps
from grpo_math.run import checkpoints, metrics
from grpo_math.run.own import is_own
from grpo_math.trainer import gradients, longest, losses, scoring, state, table, tiles
from grpo_math.trainer.advantages import advantages, weighted
from grpo_math.trainer.ahead import Ahead
from grpo_math.trainer.budget import Redo, TokenBudget
from grpo_math.trainer.config import MathGRPOConfig, settings_of
from grpo_math.trainer.endings import Endings
from grpo_math.trainer.golds import look_for_golds
from grpo_math.trainer.meter import StepMeter, over_tokens, shares, spread
from grpo_math.trainer.nonfinite import NonFiniteSteps
from grpo_math.trainer.packing import Unpackable
from grpo_math.trainer.parts import Cutter
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

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MathGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if model == EMBEDDED:
            model = model_path(model)
        self.settings = settings_of(args)
        self.meter = StepMeter(lambda: self._metrics[self._mode])
        self._grades: list[Any] | None = None
        self._mishaps, self._retries = Mishaps(), 0  # of this rank in these rewards; of all ranks in this rollout
        self._logps: Tensor | None = None  # what was scored last
        self._nonfinite = NonFiniteSteps(self.settings.max_nonfinite_steps)
        self._aside: Path | None = None  # where a checkpoint is being written
        self._held: dict[str, Any] | None = None  # of the checkpoint that this run goes on from
        self._last_step: dict[str, Any] | None = None  # the moment after it, for a run that fails in the next one
        self._sampler: Any = None
        said = look_for_golds(reward_funcs, kwargs.get("train_dataset", rest[0] if rest else None))
        talk = talk_of(model, args, rest, kwargs)
        with adapter_sync(self.settings.vllm_sync, args):
            super().__init__(model, resolved(reward_funcs, self._mishaps), args, *rest, **kwargs)
        self.turns = Turns(self, talk) if talk and self.tools else None  # an environment may have none
        if said:
            logger.warning(said)
        self.endings = Endings(self)
        self._set_up_updates()
        self._reference = follow(self, every) if (every := self.settings.reference_refresh_steps) else None
        rounds = self.settings.resample_groups
        self._resampler = Resampler(self.train_dataset, args.seed, rounds) if rounds else None
        if self.use_vllm:
            generation: Any = self.vllm_generation
            generation.sync_weights = self.meter.phase(metrics.SECONDS_SYNC)(generation.sync_weights)
        self.ahead = Ahead(self) if self.settings.staleness else None
        self.add_callback(RunFiles(self))

    def _set_up_updates(self) -> None:
        settings, accelerator = self.settings, self.accelerator
        models = [accelerator.unwrap_model(model) for model in (self.model, self.ref_model) if model is not None]
        packs = settings.pack_updates and scoring.set_up(self, models)
        self.tiled = tiles.set_up_as_asked(models, self.args, accelerator)
        whole = self._entropy_bonus_enabled or self.aux_loss_enabled or self.top_entropy_quantile < 1.0
        only_signal = self.beta == 0.0 and not whole and not is_own(settings.surrogate)
        self.cutter = Cutter(accelerator, self.loss_type, whole, only_signal, deepspeed=self.is_deepspeed_enabled)
        alone = accelerator.num_processes == 1 and not self.is_deepspeed_enabled
        self.budget = TokenBudget(settings.update_token_budget, cuts=packs and not whole, alone=alone)
        self._redo = Redo(accelerator, self.budget, self.cutter)
        self._places = gradients.places_of(self.model, alone=alone and not self.is_fsdp_enabled)
        self.scorer = scoring.PackedScorer(accelerator, self.budget, models) if packs else None
        self._offload: Any = nullcontext()
        if settings.activation_offloading:
            self._offload = get_act_offloading_ctx_manager(cast(Any, self.model), warn_if_no_head=False)
        if (limit := settings.max_seq_length_train) and self._is_vlm:
            raise ConfigError("max_seq_length_train", limit, "does not work with images", "leave it at 0")
        tries = longest.is_tried(settings.longest_first, accelerator)
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

    def _tool_call_loop(self, prompts: Any, *rest: Any) -> Any:
        return self.turns.play(*rest) if self.turns else super()._tool_call_loop(prompts, *rest)

    def _generate(self, prompts: list[Any]) -> Any:
        with self.turns.remembered() if self.turns else nullcontext():
            found = super()._generate(prompts)
        self.endings.count(self, found[1])
        return found

    # Verdicts, rewards, advantages

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        with self.meter.phase(metrics.SECONDS_GRADE):
            self._grades = self._grade(inputs, completions)
            own = {"max_completion_length": self.max_completion_length, "grade_timeout": self.settings.grade_timeout}
            inputs = [{**own, **row} for row in inputs]
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
        found = [gold_of(row) for row in inputs]
        if not any(gather_object([any(gold is not None for gold in found)])):
            return None
        golds, texts = [gold or "" for gold in found], [text_of(completion) for completion in completions]
        formats = [row.get("answer_format") for row in inputs]
        grades = grade_batch(golds, texts, answer_format=formats, timeout=self.settings.grade_timeout)
        table.keep_ungradable(self, gather_object(offending(grades, golds, texts)))
        return grades

    def _end_alike(self) -> None:
        """A reward function that failed on one rank ends the run on every rank, after the gather that all wait in."""
        own = self._mishaps.error
        of_ranks = gather_object([(self._mishaps.retries, own and str(own))])
        self._retries += sum(retries for retries, _ in of_ranks)
        self._mishaps.retries, self._mishaps.error = 0, None
        if failed := next((line for _, line in of_ranks if line), None):
            raise RewardError(state.saved_before(self, RewardError(failed))) from own

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self.meter.phase(metrics.SECONDS_SCORE):
            seen = self.state.num_input_tokens_seen
            output = super()._generate_and_score_completions(inputs)
            if self._grades is not None:
                of_all = gather_object([(str(grade.verdict), grade.in_format) for grade in self._grades])
                self._log(shares([v for v, _ in of_all], [kept for _, kept in of_all], self._group))
            if self._mode == "train":
                self.meter.rollout_tokens.append(self.state.num_input_tokens_seen - seen)
                if self._resampler is not None:
                    output = self._resampler(self, output, inputs, super()._generate_and_score_completions)
                output = self.endings.mask(output, self.accelerator)
                if self.settings.max_seq_length_train:
                    output = self._limit(output)
            self._set_advantages(output)
            self._log({metrics.REWARD_RETRIES: self._retries})
            self._retries = 0
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
            every = advantages(rewards, settings.baseline, self.scale_rewards, settings.advantage_eps).flatten()
            first = self.accelerator.process_index * n
            output["advantages"] = every[first : first + n]
            logged: Any = self._logs["advantages"]
            for _ in range(min(len(logged), len(every))):
                logged.pop()
            logged.extend(every.tolist())
        else:
            every = self.accelerator.gather(output["advantages"])
        self._log(spread(rewards, every))

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
        if not self.scorer or of_trl is buffered:
            return inputs
        # So many micro-batches in a row lie in one optimizer step, however the two numbers relate.
        window = math.gcd(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        cut = [self.cutter.parts(of_trl[i : i + window], self.budget.tokens) for i in range(0, len(of_trl), window)]
        self._buffered_inputs = [{"parts": parts} for steps in cut for parts in steps]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._places.make()
        if "parts" not in inputs:
            return self._loss_of(model, inputs)
        self._redo.running = inputs
        return self.cutter.added_up(inputs["parts"], lambda rows: self._loss_of(model, rows), model)

    def _loss_of(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of one micro-batch, with the surrogate and the KL estimator that were asked for."""
        beta, held, settings = self.beta, inputs, self.settings
        if settings.surrogate == "reinforce":
            held = losses.hold_ratio_at_one(inputs)
        elif is_own(settings.surrogate):  # TRL's own surrogate is 0 then, whatever the ratio
            held = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        our_kl = beta != 0.0 and settings.kl_estimator != "k3"  # TRL has k3 built in
        try:
            self.beta = 0.0 if our_kl else beta
            loss = super()._compute_loss(model, held)
        finally:
            self.beta = beta
        logps, self._logps = cast(Tensor, self._logps), None
        mask, now = scored(inputs), logps.detach()
        old = inputs.get("old_per_token_logps", now)
        means = {metrics.RATIO: (now - old).exp(), metrics.APPROX_KL: losses.kl_per_token(old, now, "k3")}
        if is_own(settings.surrogate):
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
        args: Any = self.args  # its num_items_in_batch are the tokens of the rollout batch, over all ranks
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
        plain = super()._get_per_token_logps_and_entropies
        rows = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
        with self._offload if torch.is_grad_enabled() else nullcontext():
            scores: scoring.Scores | None = None
            if self.scorer is not None and not compute_aux_loss:
                try:
                    scores = self.scorer(plain, *rows, **kwargs)
                except Unpackable as error:
                    self.scorer.leave(error)
                    self.scorer = None
            scores = scores or plain(*rows, compute_aux_loss, **kwargs)
        self._logps = scores[0]
        return scores

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
            args: Any = self.args
            rollouts = args.gradient_accumulation_steps / (args.steps_per_generation or 1)
            self.meter.write(rollouts, vllm=self.use_vllm, cuda=self.accelerator.device.type == "cuda")
        super().log(logs, start_time)
