"""`MathGRPOTrainer`: TRL's `GRPOTrainer` with verdicts, more advantages and surrogates, and packed updates.

This is the only file that overrides private methods of TRL's trainer. docs/internals.md ("One training step") has the
data flow.
Differences from TRL:

- the loss is algorithm/losses.py, which has more surrogates and KL estimators. A test compares it with TRL's;
- advantages that TRL lacks;
- with ``pack_updates`` the rows of an optimizer step are grouped by prompt, shared among ranks and scored packed.
  Completions without advantage are skipped if no other term of the loss needs them. Gradients are TRL's to rounding;
  logged figures are means over the tokens of the step;
- a resumed run ends as if it had not stopped; a step that runs out of memory is split.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig, GRPOTrainer
from trl.models import get_act_offloading_ctx_manager

from grpo_math.algorithm import correction
from grpo_math.algorithm.advantages import advantages, relative_brevity, weighted
from grpo_math.algorithm.endings import Endings
from grpo_math.algorithm.figures import StepFigures
from grpo_math.algorithm.losses import Loss, LossInputs, LossSettings, compute_loss, prompt_weights
from grpo_math.algorithm.reference import Reference, refuse_lost_reference
from grpo_math.algorithm.resample import Resampler, Unsolved, refuse_ungraded, repeated_rows, right_or_wrong
from grpo_math.algorithm.rows import Rollout, Rows, scored
from grpo_math.errors import ConfigError, RewardError, UserError
from grpo_math.generation.decoding import lean_generation, release_cached_memory
from grpo_math.generation.models import model_path
from grpo_math.generation.names import experts_for_trl
from grpo_math.generation.request import request_from
from grpo_math.generation.sync import AdapterGeneration, ServerUnavailable, adapter_sync
from grpo_math.grading import Grade, grade_batch
from grpo_math.packing import scoring
from grpo_math.packing.micro_batches import MicroBatch, OptimizerStep, Splitter, TokenBudget, TrainingStep
from grpo_math.rewards import REWARDS, completion_text
from grpo_math.rewards.columns import GRADE, GRADE_TIMEOUT, MAX_LENGTH, read_gold_answer, row_format
from grpo_math.rewards.guard import checked
from grpo_math.rewards.rules import is_right
from grpo_math.run import checkpoints, lock, metrics, speed_ups
from grpo_math.run.failures import failure
from grpo_math.run.files import write_json
from grpo_math.run.ranks import agree_on_all, agree_on_first, broadcast_from_main
from grpo_math.run.replaced import replaced
from grpo_math.run.speed_ups import switched_off
from grpo_math.run.user_functions import event_loop, is_foreign, is_user_function
from grpo_math.settings.rules import steps_in_backward
from grpo_math.trainer import console, float16, gradients, longest, state, table, tiled_mlp
from grpo_math.trainer.config import MathGRPOConfig, as_math_config, pickled_without_tokens
from grpo_math.trainer.meter import StepMeter, shares, spread
from grpo_math.trainer.nonfinite import NonFiniteSteps
from grpo_math.trainer.overrides import sees_rows
from grpo_math.trainer.prefetch import Prefetch, order
from grpo_math.trainer.reward_funcs import check_gold_answers, resolved
from grpo_math.trainer.run_files import RunFiles, unpublished
from grpo_math.trainer.teacher import load_teacher, refuse_teacher
from grpo_math.trainer.turns import Turns, make_conversation

logger = get_logger(__name__)


class MathGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` for mathematics, with its arguments. A reward function may also be a key of `REWARDS`.

    With a plain `GRPOConfig` as ``args``, the new settings have their TRL-equal values.
    """

    _tag_names = [*GRPOTrainer._tag_names, "grpo_math"]  # noqa: RUF012
    # Never None in a trainer, unlike in TRL's annotations.
    args: Any
    model: Any
    train_dataset: Any
    num_generations: Any
    max_completion_length: Any
    vllm_generation: Any
    # TRL's tests call `_generate` on a trainer without `__init__`, and `_generate` reads these two.
    turns: Turns | None = None
    endings: Any = None
    # Evaluates the held-out sets of a recipe, and returns their metrics.
    evaluate_heldout: Callable[[], dict[str, float]] | None = None
    # TRL's rows, or ours, of the training steps of a rollout.
    _buffered_inputs: Any = None
    _optimizer_options: Any = None  # before a checkpoint was loaded
    of_recipe = False  # build.py sets it: the same command then resumes the run
    keep_best = False  # save each step whose evaluation is the best so far

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        """Take TRL's arguments. Long because each of them is named twice, for `help` and for TRL."""
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MathGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        model = model_path(model) if isinstance(model, str) else model
        self.settings = as_math_config(args)
        speed_ups.forget()
        self.meter = StepMeter(
            lambda: self._metrics[self.mode],
            rollouts_per_step=args.gradient_accumulation_steps / (args.steps_per_generation or 1),
        )
        self._grades: list[Grade] | None = None
        self._first_group = 0  # the number of the next group in this rollout
        self.nonfinite = NonFiniteSteps(self.settings.max_nonfinite_steps)
        self._optimizer_step = OptimizerStep()
        self._policy_loss = 0.0  # of the last optimizer step, on all ranks
        # The state in the checkpoint that this run resumes from.
        self._checkpoint_state: dict[str, Any] | None = None
        # A snapshot of the last complete step, for a run that fails in the next one.
        self.last_step: dict[str, Any] | None = None
        self.saved_step = 0  # the step of the last checkpoint, or 0
        self.train_sampler: Any = None
        # Before TRL's constructor loads weights: the data may be refused, and `make_conversation` chooses a tokenizer
        # whose template supports tool calls.
        warning = check_gold_answers(reward_funcs, train_dataset, environment_factory is not None)
        conversation = make_conversation(model, args, processing_class, tools, environment_factory)
        teacher = self.settings.reference_model
        if teacher:
            refuse_teacher(teacher, model, args, processing_class)
        # With beta 0, TRL loads no reference.
        without = replaced(args, beta=0.0) if teacher else nullcontext()
        with adapter_sync(self.settings.vllm_sync, self.settings), console.one_loading_bar(), without:
            super().__init__(
                model,
                resolved(reward_funcs),
                args,
                train_dataset,
                eval_dataset,
                conversation.tokenizer if conversation else processing_class,
                reward_processing_classes,
                callbacks,
                optimizers,
                quantization_config,
                peft_config,
                tools,
                rollout_func,
                environment_factory,
            )
        if self._has_async_funcs:
            # The tools, the rewards, and the checks of rewards before the run may share a client.
            self.async_loop = event_loop()
        gradients.keep_gradients_of_4_bit(self.model)
        float16.make_adapter_float32(self.model, self.accelerator)
        if teacher:
            self.beta = args.beta
            self.ref_model = load_teacher(self.settings, self.model, self.accelerator)
        self.turns = Turns(self, conversation) if conversation else None
        if warning:
            logger.warning(warning)
        self.endings = Endings(
            request_from(vars(self.args)),
            (*self.eos_token_ids, self._tokenizer.pad_token_id),
            self.mask_truncated_completions,
        )
        # TRL would mask every completion that does not end with EOS.
        self.mask_truncated_completions &= not self.endings.masks
        self._set_up_updates()
        self._reference = self._followed_reference()
        self.unsolved = self._unsolved_problems() if self.settings.drop_solved else None
        self.resampler = (
            Resampler(
                self.settings.resample_groups,
                self.train_dataset,
                args.seed,
                self.num_generations,
                self.table,
                self.accelerator,
                self.unsolved,
            )
            if self.settings.resample_groups
            else None
        )
        if self.use_vllm:
            # TRL syncs weights within generation. Without a separate phase, the sync would count as generation.
            timed = self.meter.phase(metrics.SECONDS_SYNC)
            self.vllm_generation.sync_weights = timed(self.vllm_generation.sync_weights)
        self.prefetch = Prefetch(self) if self.settings.staleness else None
        self.add_callback(RunFiles(self))
        console.replace_printers(self)

    def _unsolved_problems(self) -> Unsolved:
        """Return what chooses the problems of a rollout, in the order of TRL's sampler."""
        settings, data = self.settings, cast(Any, self.train_dataset)
        refuse_ungraded(data, "drop_solved", settings.drop_solved)
        sampler = self._get_train_sampler()
        # TRL leaves out the end of a pass that does not fill a rollout.
        whole = len(data) // sampler.batch_size * sampler.batch_size
        order_of_pass = lru_cache(maxsize=2)(lambda number: order(sampler, number)[:whole])
        return Unsolved(len(data), sampler.batch_size, settings.drop_solved, order_of_pass, settings.staleness)

    def _followed_reference(self) -> Reference | None:
        """Return the reference of the KL term if it moves in training, with the callback that moves it."""
        steps = self.settings.reference_refresh_steps
        if not steps and not self.args.sync_ref_model:
            return None
        bare = partial(self.accelerator.unwrap_model, keep_torch_compile=False)
        reference = Reference(bare(self.model), self.ref_model and bare(self.ref_model), steps)
        self.add_callback(reference)
        return reference

    def _has_unused_parameters(self) -> bool:
        """Return True if DDP has to look for parameters without a gradient. It warns if it looks and finds none."""
        # Text leaves the vision tower of a model unused.
        unused = bool(set(self.model.config.sub_configs) - {"text_config"})
        kwargs = self.args.gradient_checkpointing_kwargs or {}
        reentrant = self.args.gradient_checkpointing and kwargs.get("use_reentrant")
        if (
            unused
            and reentrant
            and self.accelerator.num_processes > 1
            and all(p.requires_grad for p in self.model.parameters())
        ):
            raise ConfigError(
                "gradient_checkpointing_kwargs",
                kwargs,
                "DDP cannot train a model whose vision tower gets no gradient",
                "set use_reentrant to false",
            )
        return unused and not reentrant

    def _set_up_updates(self) -> None:
        settings, accelerator = self.settings, self.accelerator
        if self.args.ddp_find_unused_parameters is None and accelerator.ddp_handler is not None:
            accelerator.ddp_handler.find_unused_parameters = self._has_unused_parameters()
        models = [accelerator.unwrap_model(model) for model in (self.model, self.ref_model) if model is not None]
        packs = settings.pack_updates and scoring.agree_to_register(
            models,
            self.args,
            {
                "an image processor": self._is_vlm,
                "continuous batching, which has no packed attention": self.use_transformers_continuous_batching,
                "an optimizer that steps in each backward pass": (
                    steps_in_backward(self.args.optim) or gradients.have_foreign_hooks(models)
                ),
            },
        )
        # Each of these is a mean or a quantile over TRL's own micro-batch.
        row_means = {
            "router_aux_loss_coef": self.aux_loss_enabled,
            "an entropy bonus": self._entropy_bonus_enabled,
            "top_entropy_quantile": self.top_entropy_quantile < 1.0,
        }
        for name, applies in row_means.items():
            if packs and applies:
                switched_off("shared updates", f"{name} is computed over the rows of a micro-batch")
        self.tiled_layers = tiled_mlp.tile_as_configured(models, self.args, accelerator)
        if self._is_vlm:
            if self._exceeds_trls_loss:
                raise ConfigError(
                    "surrogate",
                    settings.surrogate,
                    "does not work with images, of which TRL computes the loss",
                    "use clip, with kl_estimator k3 and another loss_type than prompt_mean",
                )
            logger.warning("TRL computes the loss, because the model has images.")
        whole = self._keeps_trls_rows() or any(row_means.values())
        only_signal = self.beta == 0.0 and not whole and not is_user_function(settings.surrogate)
        self.splitter = Splitter(accelerator, self.loss_type, whole, only_signal, deepspeed=self.is_deepspeed_enabled)
        # DeepSpeed collects gradients in its own buffers, even in one process. A failed backward pass is not undone
        # by dropping ``.grad``.
        single = accelerator.num_processes == 1 and not self.is_deepspeed_enabled
        self.budget = TokenBudget(
            settings.max_tokens_per_micro_batch, splits=packs and not whole, is_single_process=single
        )
        self._gradients = gradients.make_gradient_buffer(
            self.model, is_single_process=single and not self.is_fsdp_enabled
        )
        self.scorer = scoring.PackedScorer(accelerator, self.budget, models) if packs else None
        self._offload: Any = (
            get_act_offloading_ctx_manager(self.model, warn_if_no_head=False)
            if settings.activation_offloading
            else nullcontext()
        )
        self._dry_run_due = longest.dry_run_enabled(settings, accelerator)

    # Generation

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # ``pack_updates: false`` computes as TRL does, in generation, too.
        shares = self.scorer and not self.use_vllm
        if self.scorer is None and self.settings.pack_updates and not self.use_vllm:
            switched_off("shared prefill", "the model is not packed")
        with (
            self.meter.phase(metrics.SECONDS_GENERATE),
            nullcontext() if self.use_vllm else release_cached_memory(),
            lean_generation(self.accelerator.unwrap_model(self.model_wrapped)) if shares else nullcontext(),
        ):
            return super()._generate_single_turn(*args, **kwargs)

    def _tool_call_loop(self, prompts: Any, *arguments: Any) -> Any:
        if self.turns is None:
            return super()._tool_call_loop(prompts, *arguments)
        functions = [a | b for a, b in zip(self._sync_tool_dicts, self._async_tool_dicts, strict=True)]
        return self.turns.play(self._generate_single_turn, functions, *arguments)

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        if self.endings:
            for name, value in self.endings.gather_metrics(*generated[1:3], self.accelerator).items():
                # TRL has appended its value of this rollout just now.
                self._metrics[self.mode][name][-1] = value
        return generated

    # Verdicts, rewards, advantages

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        with self.meter.phase(metrics.SECONDS_GRADE):
            # All ranks decide the same, because `_gather_rollout` gathers the verdicts.
            has_golds = not agree_on_all(all(read_gold_answer(row) is None for row in inputs))
            self._grades = self._grade(inputs, completions) if has_golds else None
            added = {
                GRADE_TIMEOUT: self.settings.grade_timeout,
                MAX_LENGTH: self.max_completion_length,
                **({} if self._grades is None else {GRADE: self._grades}),
            }
            errors: list[UserError] = []
            # Only while TRL calls them: elsewhere the list holds the user's own functions, with their exceptions. TRL
            # calls a model itself, with tokens instead of columns.
            functions = [
                one if isinstance(one, torch.nn.Module) else checked(one, added, errors) for one in self.reward_funcs
            ]
            with replaced(self, reward_funcs=functions):
                rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            # After TRL's gather of the rewards: a rank that raised before it would leave the others waiting there.
            error = errors[0] if errors else None
            if message := agree_on_first(str(error) if error else None):
                raise RewardError(message) from error
            self._gather_brevity(rewards)
            self._log_columns(inputs, self._grades, rewards, completion_ids_list)
            if self.turns:
                self.add_metrics(self.turns.gather_metrics(completions))
        return rewards

    def _local_rows(self, n: int) -> slice:
        """Return the place of this rank's ``n`` rows among those of all ranks."""
        first = self.accelerator.process_index * n
        return slice(first, first + n)

    def _local_groups(self, n: int) -> list[int]:
        """Return the number of the group of each of this rank's ``n`` rows. A resampled rollout continues the numbers.

        TRL's sampler repeats each prompt ``group_size`` times in a row, and its gather keeps the order of ranks.
        """
        rows = range(n * self.accelerator.num_processes)[self._local_rows(n)]
        return [self._first_group + row // self.group_size for row in rows]

    def _gather_brevity(self, rewards: Tensor) -> None:
        """Relate the lengths of the reward ``brevity`` to the right completions of their groups, which ranks share."""
        if self._grades is None or REWARDS["brevity"] not in self.reward_funcs:
            return
        flags = gather_object([is_right(grade) for grade in self._grades])
        right = torch.tensor([torch.nan if flag is None else flag for flag in flags]).to(rewards)
        column = rewards[:, self.reward_funcs.index(REWARDS["brevity"])]
        column[:] = relative_brevity(-column.view(-1, self.group_size), right.view(-1, self.group_size)).flatten()

    def _log_columns(self, inputs: Any, grades: list[Grade] | None, rewards: Tensor, ids: list[list[int]]) -> None:
        """Add this rank's columns to the table of completions, unless a reward function logs a column of that name."""
        # TRL has gathered the rewards of all ranks. It gathers the columns when `_calculate_rewards` has returned.
        sums = weighted(rewards[self._local_rows(len(inputs))], self.reward_weights.to(rewards.device))
        columns = table.completion_columns(
            inputs, self._local_groups(len(inputs)), grades, sums, ids, self.endings.is_truncated
        )
        for name, values in columns.items():
            if name not in (*self._pending_extra_logs, *self.reward_func_names):
                self._log_completion_extra(name, values)

    def _grade(self, inputs: list[dict[str, Any]], completions: list[Any]) -> list[Grade]:
        """Grade this rank's completions."""
        return grade_batch(
            [read_gold_answer(row) or "" for row in inputs],
            [completion_text(completion) for completion in completions],
            answer_format=[row_format(row) for row in inputs],
            timeout=self.settings.grade_timeout,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # An evaluation may come before training.
        self._agree_to_pack()
        with self.meter.phase(metrics.SECONDS_SCORE):
            # TRL adds the tokens of all ranks to this count when it has generated.
            tokens_seen = self.state.num_input_tokens_seen
            self._first_group = 0
            unsolved = self.unsolved if self.mode == "train" else None
            chosen = unsolved.take() if unsolved else []
            if unsolved:
                inputs = repeated_rows(self.train_dataset, chosen, self.group_size)[self._local_rows(len(inputs))]
                self.add_metrics({metrics.SOLVED: len(unsolved.dropped())})
            rollout = self._gather_rollout(inputs)
            if unsolved:
                unsolved.record(chosen, right_or_wrong(rollout.verdicts or []), self.group_size)
            if self.mode == "train":
                self.meter.rollout_tokens.append(self.state.num_input_tokens_seen - tokens_seen)
                if self.resampler is not None:
                    # Metrics stay those of the first draw, because the replacements are selected.
                    sample = self.meter.only_seconds()(self._gather_rollout)
                    rollout, counts = self.resampler.gather_replaced(rollout, inputs, sample)
                    self.add_metrics(counts)
                    if self.prefetch is not None:
                        self.prefetch.send(resampled=True)
            if self.mode == "train":
                self.add_metrics(correction.gather_figures(rollout.rows, self.accelerator))
                differences = self.step_metrics.get(metrics.SAMPLER_DIFFERENCE)
                if differences and isinstance(self.vllm_generation, AdapterGeneration):
                    self.vllm_generation.watch(differences[-1])
            output = self.endings.gather_masked(rollout.rows, self.accelerator)
            # Last, because resampling replaces rows. TRL's advantages are those of one draw.
            self._gather_advantages(output, rollout.rewards)
            if self.loss_type == "prompt_mean":
                tokens = self.accelerator.gather(scored(output).sum(dim=1))
                output["prompt_weight"] = prompt_weights(tokens, self.group_size)[self._local_rows(len(inputs))]
        return output

    def _gather_rollout(self, inputs: list[dict[str, Any]]) -> Rollout:
        calculate, results = self._calculate_rewards, list[Tensor]()
        self._grades = None

        def calculated(*arguments: Any) -> Tensor:
            results.append(calculate(*arguments))
            return results[0]

        # TRL's advantages are replaced, but TRL would reject a scale that only advantages.py has.
        scale = self.scale_rewards if self.scale_rewards in ("group", "batch") else "none"
        # The rewards are those that TRL gets: a subclass may change what our method returns, and TRL's table has room
        # for one rollout only.
        with replaced(self, _calculate_rewards=calculated, scale_rewards=scale):
            rows = super()._generate_and_score_completions(inputs)
        rewards = results[0]
        rows["group"] = torch.tensor(self._local_groups(len(inputs)), device=rows["advantages"].device)
        self._first_group += len(rewards) // self.group_size
        if self._grades is None:
            return Rollout(rows, rewards, None)
        # A row that names no format, as in most scripts, asks for none.
        local = [
            (grade.verdict, grade.in_format if row_format(row) else None)
            for grade, row in zip(self._grades, inputs, strict=True)
        ]
        verdicts, in_format = zip(*gather_object(local), strict=True)
        self.add_metrics(shares(verdicts, in_format, self.group_size))
        return Rollout(rows, rewards, verdicts)

    @property
    def group_size(self) -> int:
        return cast(int, self.num_generations if self.mode == "train" else self.num_generations_eval)

    def _gather_advantages(self, output: Rows, rewards_per_func: Tensor) -> None:
        """Set this rank's advantages from the rewards of all; TRL's, if each reward function is normalized."""
        settings, sums = self.settings, weighted(rewards_per_func, self.reward_weights.to(rewards_per_func.device))
        # TRL's sampler repeats each prompt ``group_size`` times in a row, and its gather keeps the order of ranks.
        # On the CPU, where they are logged: a few numbers, and one transfer.
        rewards = sums.view(-1, self.group_size).cpu()
        if self.multi_objective_aggregation == "sum_then_normalize":
            values = advantages(
                rewards, settings.baseline, self.scale_rewards, settings.advantage_eps, settings.k
            ).flatten()
            local = values[self._local_rows(len(output["advantages"]))]
            output["advantages"] = local.to(output["advantages"].device)
            table.replace_advantages(self.table["advantages"], values.tolist())
        else:
            values = self.accelerator.gather(output["advantages"]).cpu()
        self.add_metrics(spread(rewards, values))

    # The update

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Call TRL's. If memory runs out in the update, repeat this optimizer step with smaller micro-batches."""
        self._agree_to_pack()
        # Not in the constructor, because `train` prepares the model.
        if self._dry_run_due:
            self._dry_run_due = False
            longest.dry_run(self, lambda *rows: self._loss_of(*rows).loss, model, inputs)
        number = self._step % self.args.steps_per_generation  # of this training step in its rollout
        failure: str | None = None
        started = time.perf_counter()
        while True:
            try:
                if failure is not None:
                    self._repeat(model)
                    # TRL measures the last attempt alone.
                    self._current_train_step_time += time.perf_counter() - started
                    started = time.perf_counter()
                # TRL's calls `_prepare_inputs`, which splits a new rollout, and `_compute_loss`.
                loss = super().training_step(model, inputs, num_items_in_batch)
                break
            except torch.OutOfMemoryError as error:
                # Memory ran out while sampling, or in TRL's loss: there is nothing to split.
                if not self._is_split:
                    raise
                # As text, because the error's traceback keeps the activations alive.
                failure = str(error)
            # The rows of later optimizer steps would not fit either.
            self.budget.split([*self._optimizer_step.done, *self._buffered_inputs], self.splitter, failure)
            inputs = self._buffered_inputs[number]
        if self._is_split:
            self._optimizer_step.done.append(self._buffered_inputs[number])
        # The optimizer's step follows: the next training step is the first of another optimizer step. TRL's loss, or a
        # script's, logs its own figures.
        if self.accelerator.sync_gradients:
            if self._optimizer_step.figures.sums:
                self._reduce_figures(self._optimizer_step.figures, self.current_gradient_accumulation_steps)
            self._optimizer_step = OptimizerStep()
        return loss

    def _repeat(self, model: Any) -> None:
        """Compute the earlier training steps of this optimizer step again.

        Some parameters may have the gradient of the failed training step already, so all gradients are dropped.
        """
        # None, not zeros: `FlatGradientBuffer` allocates its buffer only if there are no gradients.
        model.zero_grad(set_to_none=True)
        self._optimizer_step.figures = StepFigures()
        for step in self._optimizer_step.done:
            self.accelerator.backward(self._compute_loss(model, step))

    @property
    def _is_split(self) -> bool:
        """True if the rollout is split into our micro-batches, and False while a rollout is sampled."""
        return bool(self._buffered_inputs) and isinstance(self._buffered_inputs[0], TrainingStep)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        scale = float16.loss_scale(self.accelerator, self.deepspeed)
        # With an infinite loss, or a scale that does not enlarge the gradients, the scale is not the reason for a
        # gradient that is not finite.
        may_overflow = scale is not None and scale > 1 and abs(self._policy_loss) < math.inf
        skipped = self.nonfinite.seen(norm, may_overflow)
        self.add_metrics({metrics.SKIPPED: float(skipped and not may_overflow)})
        if scale is not None:
            self.add_metrics({metrics.LOSS_SCALE: scale, metrics.OVERFLOWED: skipped and may_overflow})
        if skipped:
            # Optimizers skip a parameter without a gradient, so its weight and its moments do not change.
            model.zero_grad()
        if error := self.nonfinite.error(self.state.global_step):
            # transformers counts a step after the optimizer. So this is the checkpoint of the step before.
            state.agree_to_save_last_step(self)
            raise error
        return norm

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        # Memory ran out: the same rows, in smaller micro-batches.
        if isinstance(generation_batch, TrainingStep):
            return generation_batch
        steps_per_rollout = self.args.steps_per_generation
        if self.mode == "train" and not self.in_rollout:
            # TRL samples, and a failure before it has must not repeat a step of the last rollout.
            self._buffered_inputs = None
        is_new = self.mode == "train" and self._buffered_inputs is None
        inputs = super()._prepare_inputs(generation_batch)
        # In each rollout, because a script may replace a method after the constructor.
        if not is_new or self._keeps_trls_rows():
            return inputs
        of_trl, steps = self._buffered_inputs, list[TrainingStep]()
        width = of_trl[0]["prompt_ids"].size(1) + of_trl[0]["completion_ids"].size(1)
        packs = self.scorer is not None and self.scorer.agree_on_width(width)
        splitter = self.splitter if packs else replace(self.splitter, whole=True)
        # This many training steps always belong to one optimizer step. Rows change places within these only.
        window = math.gcd(steps_per_rollout, self.args.gradient_accumulation_steps)
        for start in range(0, steps_per_rollout, window):
            steps += splitter.gather_steps(of_trl[start : start + window], self.budget.tokens)
        self._buffered_inputs = steps
        return self._buffered_inputs[self._step % steps_per_rollout]

    @property
    def _exceeds_trls_loss(self) -> bool:
        """True if the loss has a term that TRL's lacks."""
        own_kl = self.beta != 0.0 and self.settings.kl_estimator != "k3"
        return self.settings.surrogate != "clip" or self.loss_type == "prompt_mean" or own_kl

    def _keeps_trls_rows(self) -> bool:
        """Return True if an update is not split: it has images, or a script's method gets its rows."""
        return self._is_vlm or sees_rows(self)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """Return the loss of a training step, for the last backward pass. Earlier micro-batches have theirs here."""
        self._gradients.allocate()
        if isinstance(inputs, TrainingStep):
            figures = self._optimizer_step.figures
            figures.skipped_rows += inputs.skipped_rows
            figures.skipped_tokens += inputs.skipped_tokens
            loss_of = partial(self._micro_batch_loss, model, figures)
            return self.splitter.accumulate(inputs.micro_batches, loss_of, model)
        # TRL's loss, whole, unless it lacks a term.
        if self._keeps_trls_rows() and not self._exceeds_trls_loss:
            return super()._compute_loss(model, inputs)
        # In an evaluation, or a method of a script has to see the rows of an update.
        rows = {name: value for name, value in inputs.items() if name != "group"}
        figures = self._optimizer_step.figures if self.mode == "train" else StepFigures()
        loss = self._micro_batch_loss(model, figures, MicroBatch(rows, 1.0, len(rows["advantages"])))
        if self.mode == "eval":
            self._reduce_figures(figures, 1)
        return loss

    def _micro_batch_loss(self, model: Any, figures: StepFigures, micro_batch: MicroBatch) -> Tensor:
        """Return the weighted loss of a micro-batch, and add its figures to those of the step."""
        loss = self._loss_of(model, micro_batch.rows)
        figures.add(loss, scored(micro_batch.rows), micro_batch.completions, micro_batch.weight)
        return loss.loss * micro_batch.weight

    def _loss_of(self, model: Any, rows: Rows) -> Loss:
        """Score rows, and return their loss. Changes no attribute of the trainer."""
        # Without the argument for rows without the number, because a subclass may have TRL's signature.
        group = {"group": rows["group"]} if "group" in rows else {}
        logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),
            torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
            rows["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **group,
        )
        inputs = self._loss_inputs(rows, logps, cast(Tensor, entropies))
        return compute_loss(replace(inputs, aux_loss=aux_loss), self._loss_settings())

    def _loss_inputs(self, rows: Rows, logps: Tensor, entropies: Tensor) -> LossInputs:
        mask, advantages = scored(rows), rows["advantages"]
        # This rank's part of an optimizer step, as a share of the rollout on all ranks.
        share, accumulation = 1 / self.accelerator.num_processes, 1
        if self.mode == "train":
            # An evaluation does not accumulate. TRL's loss is divided in training only.
            accumulation = self.current_gradient_accumulation_steps
            share = share * accumulation / self.args.steps_per_generation
        old_logps = rows.get("old_per_token_logps", logps.detach())
        sampling_logps = rows.get("sampling_per_token_logps")
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        sampler_ratio = rows.get("importance_sampling_ratio") if corrects or self.loss_type == "vespo" else None
        if corrects and self._uses_rollout_once and sampling_logps is not None:
            # TRL scored the old log-probs in other rows, and in 16 bits the rows of a batch move log-probs. The policy
            # is still the one that was scored, so these log-probs are the old ones, and the ratio is exactly 1.
            old_logps = logps.detach()
            sampler_ratio = correction.sampler_ratio(
                correction.log_ratios(old_logps, sampling_logps, mask),
                self.vllm_importance_sampling_mode,
                self.vllm_importance_sampling_clip_min,
                self.vllm_importance_sampling_clip_max,
            )
        return LossInputs(
            logps=logps,
            old_logps=old_logps,
            advantages=advantages if advantages.dim() > 1 else advantages[:, None],
            mask=mask,
            entropies=entropies,
            ref_logps=rows["ref_per_token_logps"] if self.beta != 0.0 else None,
            sampling_logps=sampling_logps,
            sampler_ratio=sampler_ratio,
            entropy_mask=(
                self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
                if self.top_entropy_quantile < 1.0
                else None
            ),
            micro_batch_tokens=rows["micro_batch_tokens"][:, None] if "micro_batch_tokens" in rows else None,
            # num_items_in_batch counts the tokens of the rollout.
            tokens_per_step=rows["num_items_in_batch"].clamp(min=1) * share,
            row_weights=rows["prompt_weight"][:, None] / share if self.loss_type == "prompt_mean" else 1.0,
            accumulation=accumulation,
        )

    @property
    def _uses_rollout_once(self) -> bool:
        """True if no optimizer step lies between a rollout and its update. Without vLLM TRL scores nothing then."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        return self.mode == "train" and self.args.gradient_accumulation_steps % generate_every == 0

    def _loss_settings(self) -> LossSettings:
        coefficient = self.entropy_coef if self._entropy_bonus_enabled else None
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            coefficient = 0.0
        return LossSettings(
            surrogate=self.settings.surrogate,
            loss_type=self.loss_type,
            kl_estimator=self.settings.kl_estimator,
            beta=self.beta,
            use_bias_correction_kl=self.args.use_bias_correction_kl,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=self.args.delta,
            dppo_high=self.settings.dppo_high,
            dppo_low=self.settings.dppo_low,
            importance_sampling_level=self.importance_sampling_level,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
            sapo_temperature_pos=self.args.sapo_temperature_pos,
            sapo_temperature_neg=self.args.sapo_temperature_neg,
            vespo_k_pos=self.args.vespo_k_pos,
            vespo_lambda_pos=self.args.vespo_lambda_pos,
            vespo_k_neg=self.args.vespo_k_neg,
            vespo_lambda_neg=self.args.vespo_lambda_neg,
            max_completion_length=self.max_completion_length,
            entropy_coef=coefficient,
            router_aux_loss_coef=self.router_aux_loss_coef,
        )

    def _reduce_figures(self, figures: StepFigures, training_steps: int) -> None:
        """Log the figures of a step's loss, and update the coefficient of the entropy bonus. All ranks call this."""
        means, policy_loss, entropy = figures.reduce_means(self.accelerator, training_steps)
        self._policy_loss = policy_loss
        self.add_metrics(means)
        if not self._entropy_bonus_enabled:
            return
        self.add_metrics({metrics.POLICY_LOSS: self._policy_loss})
        if self.mode == "eval":
            return
        if self.use_adaptive_entropy:
            # As in TRL: above the target the coefficient falls, and the bonus is left out.
            if entropy <= self.args.entropy_target:
                self.entropy_coef = min(self.entropy_coef + self.args.entropy_coef_delta, self.args.entropy_coef_max)
            else:
                self.entropy_coef = max(self.entropy_coef - self.args.entropy_coef_delta, self.args.entropy_coef_min)
            self._last_world_entropy = entropy
        self.add_metrics({metrics.ENTROPY_COEF: self.entropy_coef})

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        *,
        group: Tensor | None = None,
        **kwargs: Any,
    ) -> scoring.Scores:
        plain = super()._get_per_token_logps_and_entropies
        rows = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
        # Offloading intercepts what autograd saves for the backward pass.
        offload = self._offload if torch.is_grad_enabled() else nullcontext()
        config = self.accelerator.unwrap_model(model).config.get_text_config()
        with offload, experts_for_trl(config) if compute_aux_loss else nullcontext():
            # A script may have replaced TRL's method.
            if self.scorer is not None and not is_foreign(plain):
                return self.scorer(plain, *rows, group, compute_aux_loss, **kwargs)
            logps, *others = plain(*rows, compute_aux_loss=compute_aux_loss, **kwargs)
        # With device_map, the LM head may be on another GPU than the rows.
        entropies, loss = (value if value is None else value.to(input_ids.device) for value in others)
        return logps.to(input_ids.device), entropies, loss

    def _agree_to_pack(self) -> None:
        """Stop packing if packed scores differ from those of TRL's method. All ranks call this."""
        # Not in the constructor, because the model is not on its device yet.
        plain = super()._get_per_token_logps_and_entropies
        models = [model for model in (self.model, self.ref_model) if model is not None]
        if self.scorer and not self.scorer.agree_to_pack(plain, models, self._tokenizer, self.args.tf32):
            self.scorer = None

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Call TRL's, or evaluate the held-out sets of a recipe, whose trainer has no data set to evaluate."""
        # The evaluation may fail. It also draws random numbers, and fills the table of completions.
        state.remember_step(self)
        if self.evaluate_heldout is not None and eval_dataset is None:
            values = self.evaluate_heldout()
            # Not TRL's method: it would log and clear the metrics of a step that is not complete.
            super(GRPOTrainer, self).log(values)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, values)
            return values
        generation: Any = getattr(self, "vllm_generation", None)
        self._restore_state()  # eval_on_start comes before the first epoch
        # The seeds of training continue as if nothing had been evaluated.
        seeds = {"rollouts": generation.rollouts} if hasattr(generation, "rollouts") else {}
        with replaced(generation or self, **seeds):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        # transformers saves the best step under ``save_strategy: best`` only, which saves no other step.
        self.control.should_save |= is_best and self.keep_best
        return is_best

    @property
    def _saves_whole_model(self) -> bool:
        """True if a checkpoint has the weights as `save_pretrained` writes them, and not an adapter."""
        return isinstance(self.model, PreTrainedModel) and not (self.is_deepspeed_enabled or self.is_fsdp_enabled)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if self._saves_whole_model:
            state.load_weights(self.model, resume_from_checkpoint)
        else:
            with state.unchanged_dtypes(self.model):
                super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        if self._saves_whole_model:
            state.load_weights(self.model, cast(str, self.state.best_model_checkpoint))
        else:
            with state.unchanged_dtypes(self.model):
                super()._load_best_model()
        if self.use_vllm:
            self._last_loaded_step = -1  # vLLM has the weights of the last step

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        run_dir = Path(str(self.args.output_dir))

        def begin() -> Any:
            # A recipe has locked the folder already, until its report is written.
            if self.writes_run_files:
                lock.hold(run_dir)
            return checkpoints.to_resume(run_dir, resume_from_checkpoint)

        self.last_step = None
        self.saved_step = 0
        # An earlier call may have ended within an optimizer step.
        self._optimizer_step = OptimizerStep()
        try:
            # One process reads the folder: on a network file system ranks may see different checkpoints.
            return super().train(broadcast_from_main(begin), *args, **kwargs)
        # All ranks raise these alike, in a step or in an evaluation, so all of them can save.
        except (RewardError, ServerUnavailable) as error:
            saved = state.agree_to_save_last_step(self)
            raise type(error)(f"{error}{saved}") from error.__cause__
        except UserError:
            raise
        except Exception as error:
            # Without the chain, which is a page about torch or tokenizers.
            if reported := failure(error, run_dir, state.how_to_continue(self)):
                raise reported from None
            raise
        finally:
            # A notebook may stay open for days after its training.
            if self.writes_run_files:
                lock.release(run_dir)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Call transformers', which would train a step beyond ``max_steps`` after a checkpoint of the last step."""
        self._restore_state(kwargs["steps_trained_in_current_epoch"])
        if self.state.global_step >= self.state.max_steps:
            self._evaluate_failed_step()
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        # After the random states are restored: the evaluation draws what it would have drawn before the next step.
        self._evaluate_failed_step()

    def _evaluate_failed_step(self) -> None:
        """Evaluate the step of the checkpoint, if its evaluation has failed and ended the run."""
        if self.control.should_evaluate:
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model, None, self.state.epoch, None, 0.0)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with pickled_without_tokens(self.args):
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(str(output_dir or self.args.output_dir))
            # The run directory of a recipe contains its settings as text. A script may read the pickle.
            if self.of_recipe:
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            if self._reference is not None:
                self._reference.remove_adapter(folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with unpublished(self):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with pickled_without_tokens(self.args), unpublished(self):
            super()._push_from_checkpoint(checkpoint_folder)

    def _restore_state(self, position: int = 0) -> None:
        # Not when the checkpoint is read: transformers then sets its own attributes to zero.
        if self._checkpoint_state is not None:
            state.restore(self, self._checkpoint_state, position)
            self._checkpoint_state = None

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # After transformers' method, because logging clears the metrics of the step.
        self.last_step = state.snapshot(self)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Call transformers'. Delete earlier checkpoints, and push this one, only when this one is complete."""
        run_dir, step, args = Path(self._get_output_dir(trial=trial)), self.state.global_step, self.args
        folder = run_dir / f"checkpoint-{step}"
        with checkpoints.sealed(folder, self.accelerator), replaced(args, save_total_limit=None, push_to_hub=False):
            super()._save_checkpoint(model, trial)
            # Before the checkpoint is complete: a run that is killed between the two writes both again.
            if self.accelerator.is_main_process and self.state.best_model_checkpoint is not None:
                best = {
                    "step": self.state.best_global_step,
                    "metric": f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}",
                    "value": self.state.best_metric,
                    "path": Path(self.state.best_model_checkpoint).name,
                }
                write_json(run_dir / checkpoints.BEST, best)
        self.saved_step = step
        if args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if args.should_save:
            # By step: a clock that was set back would make this checkpoint the oldest. In the folder of a script, the
            # checkpoints of an earlier run may have later steps.
            by_time = not self.of_recipe
            rotate_checkpoints(str(run_dir), args.save_total_limit, self.state.best_model_checkpoint, by_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        # With FSDP a rank has parts of weights. `Reference.load` refuses a checkpoint without the file.
        if self._reference is not None and not self.is_fsdp_enabled:
            self._reference.save(Path(output_dir), writes=self.args.should_save)
        # Every rank writes a file, because every rank trains on its own rows of the rollout.
        torch.save(
            state.agree_on_saved_state(self),
            Path(output_dir) / checkpoints.STATE.format(self.accelerator.process_index),
        )

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers', and remember the options of the optimizer before a checkpoint replaces them."""
        scheduler = super().create_scheduler(*args, **kwargs)
        self._optimizer_options = state.optimizer_options(self.optimizer)
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # DeepSpeed has loaded its checkpoint already. A script may replace `create_scheduler`.
        options = self._optimizer_options or state.optimizer_options(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state.set_options(self.optimizer, self.lr_scheduler, options)
        self.saved_step = self.state.global_step
        if self._reference is not None:
            self._reference.load(Path(checkpoint))
        # Without a KL term no reference is used.
        elif self.beta != 0.0:
            refuse_lost_reference(Path(checkpoint))
        self._checkpoint_state = state.agree_on_state(
            Path(checkpoint), self.accelerator.process_index, self.accelerator.device
        )
        if self.train_sampler is not None:
            # TRL's sampler draws one order per epoch from a generator that no checkpoint saves.
            for _ in range(int(self.state.epoch or 0)):
                next(iter(self.train_sampler))

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    # For collaborators, which read no private attribute of TRL

    @property
    def table(self) -> Any:
        """TRL's table of completions: a dict of columns, with the rows of the last rollout."""
        return self._logs

    @property
    def step_metrics(self) -> dict[str, list[float]]:
        """The metrics of training since the last log line."""
        return cast(dict[str, list[float]], self._metrics["train"])

    @property
    def training_steps(self) -> int:
        """The number of training steps so far: calls of `training_step`, several of which make an optimizer step."""
        return self._step

    @property
    def in_rollout(self) -> bool:
        """True if the next training step uses the rows of the current rollout."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) != 0

    def prompt_tokens(self, prompts: list[Any]) -> list[list[int]]:
        return cast(list[list[int]], self._tokenize_prompts(prompts)[0])

    @property
    def writes_completions(self) -> bool:
        """True if the run directory has a file of completions for each log line."""
        return self.log_completions or self.writes_run_files

    @property
    def writes_run_files(self) -> bool:
        """True if this trainer of a script writes a run directory: the script may remove the callback."""
        return any(isinstance(callback, RunFiles) for callback in self.callback_handler.callbacks)

    @property
    def mode(self) -> str:
        return "train" if self.model is not None and self.model.training else "eval"

    def add_metrics(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics[self.mode][name].append(value)

    def _log_metric(self, name: str, value: float) -> None:
        super()._log_metric(metrics.reserved(name), value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._restore_state()  # if no epoch was left to run
        # TRL logs the seconds of a step at its end. The last log entry of a run belongs to no step.
        if self.mode == "train" and self._metrics["train"].get(metrics.SECONDS_STEP):
            self.meter.write(vllm=self.use_vllm, cuda=self.accelerator.device.type == "cuda")
        metrics.prefer_scripts(self._metrics[self.mode])
        # The run directory of a script has TRL's file of completions, too. Trackers get the table only if it is asked
        # for with ``log_completions``.
        file_only = self.writes_completions and metrics.LOSS in logs and not self.log_completions
        # TRL would print a table without rows, too.
        writes = (self.log_completions or file_only) and bool(self.table["prompt"])
        with table.storable_table(self, [] if file_only else self.args.report_to):
            # TRL prints all columns of the table next to each other, wider than a terminal: 0 keeps TRL from printing.
            with replaced(self, num_completions_to_print=0, log_completions=writes):
                super().log(logs, start_time)
            if self.log_completions and self.accelerator.is_main_process and console.is_step_log(logs):
                console.print_completions(self.table, self.state.global_step, self.num_completions_to_print)
