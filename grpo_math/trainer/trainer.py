"""`MathGRPOTrainer`: TRL's `GRPOTrainer` with verdicts, more advantages and surrogates, and packed updates.

This is the only file that overrides methods of TRL's trainer. It adds ``trainer.grpo_math`` alone (trainer_parts.py):
TRL's other names are TRL's, and free for a user's subclass. docs/internals.md ("One training step") has the data flow.

=====================================  ===============================================================================
TRL or transformers calls              and gets
=====================================  ===============================================================================
_get_train_sampler                     TRL's sampler, which `RolloutQueue` reads ahead
training_step, _prepare_inputs         TRL's rows, which are planned into micro-batches (`Updates`)
_generate_and_score_completions        TRL's rollout, resampled, with our advantages (`RolloutMaker`)
_generate_single_turn                  TRL's completions, of a group whose prompt is computed once
_get_per_token_logps_and_entropies     TRL's scores, from packed rows (`RowScorer`)
_calculate_rewards                     the rewards of graded completions (`Grader`)
_compute_loss                          the loss of the planned micro-batches (algorithm/losses.py), compared in a test
_get_grad_norm                         the norm; a gradient that is not finite is dropped (`NonFiniteSteps`)
_save..., _load..., _run_epoch, train  checkpoints that end as if the run had not stopped (`RunState`)
evaluate, log, push_to_hub             held-out sets, a table that Parquet can hold, a repository without run files
=====================================  ===============================================================================

With ``pack_updates`` the rows of an optimizer step are grouped by prompt, shared among ranks and scored packed.
Completions without advantage are skipped if no other term of the loss needs them. Gradients are TRL's to rounding;
logged metrics are means over the tokens of the step.
"""

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig

from grpo_math.algorithm.reference import refuse_lost_reference, remove_reference
from grpo_math.errors import OutOfMemory, RewardError, UserError, with_type
from grpo_math.generation.decoding import lean_generation, release_cached_memory
from grpo_math.generation.lost_server import ServerUnavailable
from grpo_math.generation.models import absolute_path, model_path
from grpo_math.packing import scoring
from grpo_math.packing.pack import PaddedRows
from grpo_math.run import checkpoints, lock, metrics, speed_ups
from grpo_math.run.failures import failure
from grpo_math.run.files import write_json
from grpo_math.run.resume import script_checkpoint
from grpo_math.run.speed_ups import switched_off
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.replaced import replaced
from grpo_math.trainer import console, contract, float16, loading, state, table
from grpo_math.trainer.config import MathGRPOConfig, as_math_config, pickled_without_tokens
from grpo_math.trainer.constructor import changed_trl, prepare_loaded, refuse_mixed_turns
from grpo_math.trainer.reward_funcs import check_gold_answers, may_make_prompts, resolved
from grpo_math.trainer.run_files import RunFiles, without_run_files, writes_run_files
from grpo_math.trainer.teacher import check_teacher
from grpo_math.trainer.trainer_parts import Parts

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer as GRPOTrainer
else:
    from trl import GRPOTrainer

logger = get_logger(__name__)


class MathGRPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` for mathematics, with its arguments. A reward function may also be a key of `REWARDS`.

    With a plain `GRPOConfig` as ``args``, the new settings have their TRL-equal values.
    """

    _tag_names = [*GRPOTrainer._tag_names, "grpo_math"]  # noqa: RUF012
    grpo_math: Parts

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
        """Take TRL's arguments. Long because each of them is named twice, for `help` and for TRL's constructor."""
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = MathGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        for line in contract.warnings(args):
            logger.warning(line)
        model = absolute_path(model_path(model)) if isinstance(model, str) else model
        settings = as_math_config(args)
        speed_ups.forget()
        # Before TRL's constructor loads weights: the settings and the data may be refused.
        refuse_mixed_turns(args, tools=tools, environment_factory=environment_factory)
        warning = None
        if not may_make_prompts(type(self), train_dataset):
            warning = check_gold_answers(reward_funcs, train_dataset, environment_factory is not None)
        if settings.reference_model:
            check_teacher(settings, model, processing_class)
        with changed_trl(settings, args):
            super().__init__(
                model,
                resolved(reward_funcs),
                args,
                train_dataset,
                eval_dataset,
                processing_class,
                reward_processing_classes,
                callbacks,
                optimizers,
                quantization_config,
                peft_config,
                tools,
                rollout_func,
                environment_factory,
            )
        prepare_loaded(self, settings)
        if warning:
            logger.warning(warning)
        trl: Any = super()
        self.grpo_math = Parts(self, settings, lambda: trl._get_per_token_logps_and_entropies)
        self.add_callback(state.RestoreState(self.grpo_math.run))
        self.add_callback(RunFiles(self))

    # A run begins, or continues

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        parts, run_dir = self.grpo_math, Path(str(self.args.output_dir))

        def begin() -> Any:
            # A recipe has locked the folder already, until its report is written.
            if writes_run_files(self):
                lock.acquire(run_dir)
            return script_checkpoint(run_dir, resume_from_checkpoint)

        parts.run.last_step = None
        parts.run.saved_step = 0
        # An earlier call may have ended within an optimizer step.
        parts.updates.reset()
        try:
            # One process reads the folder: on a network file system ranks may see different checkpoints.
            resume = broadcast_from_main(begin)
            with warnings.catch_warnings():
                # In each step transformers warns about names that TRL uses.
                warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
                # torch warns that it ignores transformers' default on a CPU.
                warnings.filterwarnings("ignore", ".*pin_memory.* no accelerator", UserWarning)
                return super().train(resume, *args, **kwargs)
        # All ranks raise these alike, in a step or in an evaluation, so all of them can save.
        except (RewardError, ServerUnavailable) as error:
            # The same object: in a script it has the type of what a reward function has raised, too.
            error.args = (f"{error}{parts.run.agree_to_save_last_step(parts.program.is_recipe)}",)
            raise
        except OutOfMemory as error:
            raise error if parts.program.is_recipe else with_type(error, torch.OutOfMemoryError(str(error))) from None
        except UserError:
            raise
        except Exception as error:
            # Without the chained exception, whose traceback is a page about torch or tokenizers.
            if reported := failure(error, run_dir, state.how_to_continue(parts.program.is_recipe)):
                raise reported if parts.program.is_recipe else with_type(reported, error) from None
            raise
        finally:
            console.end_bar(self)
            # A notebook may stay open for days after its training.
            if writes_run_files(self):
                lock.release(run_dir)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        self.grpo_math.queue.sampler = sampler
        return sampler

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' method, and remember the optimizer's options before a checkpoint replaces them."""
        scheduler = super().create_scheduler(*args, **kwargs)
        self.grpo_math.optimizer_options = loading.optimizer_options(self.optimizer)
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        parts = self.grpo_math
        # DeepSpeed has loaded its checkpoint already. A script may replace `create_scheduler`.
        options = parts.optimizer_options or loading.optimizer_options(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        loading.set_options(self.optimizer, self.lr_scheduler, options)
        parts.run.saved_step = self.state.global_step
        if parts.reference is not None:
            parts.reference.load(Path(checkpoint))
        # Without a KL term no reference is used.
        elif self.beta != 0.0:
            refuse_lost_reference(Path(checkpoint))
        # Loaded when training begins: transformers first sets its own attributes to zero.
        parts.run.loaded = state.agree_on_state(
            Path(checkpoint), self.accelerator.process_index, self.accelerator.device
        )
        if parts.queue.sampler is not None:
            # TRL's sampler draws one order per epoch from a generator that no checkpoint saves.
            for _ in range(int(self.state.epoch)):
                next(iter(parts.queue.sampler))

    @property
    def _saves_whole_model(self) -> bool:
        """True if a checkpoint has the weights as `save_pretrained` writes them, and not an adapter."""
        return isinstance(self.model, PreTrainedModel) and not (self.is_deepspeed_enabled or self.is_fsdp_enabled)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if self._saves_whole_model:
            loading.load_weights(self.model, resume_from_checkpoint)
        else:
            with loading.unchanged_dtypes(self.model):
                super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Call transformers' method, which would train a step beyond ``max_steps`` after the last step's checkpoint."""
        # Without the rows of the checkpoint TRL samples at once. It selects rows by ``_step``, which must agree with
        # the data loader.
        if state.in_rollout(self) and self._buffered_inputs is None:
            self._step = kwargs["steps_trained_in_current_epoch"]
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

    # A training step: its rollout

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return self.grpo_math.updates.training_step(super().training_step, model, inputs, num_items_in_batch)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return self.grpo_math.updates.gather_inputs(super()._prepare_inputs, generation_batch)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        parts = self.grpo_math
        # An evaluation may come before training.
        parts.scorer.agree_to_pack()
        with parts.meter.phase(metrics.SECONDS_SCORE):
            rows = parts.rollouts.gather_rows(super()._generate_and_score_completions, inputs)
            differences = parts.meter.log().get(metrics.SAMPLER_DIFFERENCE)
            if parts.adapters and differences and self.model.training:
                parts.adapters.canary.watch(differences[-1])
        return rows

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # ``pack_updates: false`` computes as TRL does, in generation, too.
        parts = self.grpo_math
        shares_prefill = parts.scorer.packed and not self.use_vllm
        if not shares_prefill and parts.settings.pack_updates and not self.use_vllm:
            switched_off("shared prefill", "the model is not packed")
        with (
            parts.meter.phase(metrics.SECONDS_GENERATE),
            nullcontext() if self.use_vllm else release_cached_memory(),
            lean_generation(self.accelerator.unwrap_model(self.model_wrapped)) if shares_prefill else nullcontext(),
        ):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        arguments, parts = (inputs, prompts, completions, completion_ids_list), self.grpo_math
        with parts.meter.phase(metrics.SECONDS_GRADE):
            rewards, parts.rollouts.draft.graded = parts.grader.gather_rewards(super()._calculate_rewards, *arguments)
        return rewards

    def _log_metric(self, name: str, value: float) -> None:
        super()._log_metric(metrics.reserved(name), value)

    # A training step: its update

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return self.grpo_math.updates.compute_loss(super()._compute_loss, model, inputs)

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
        return self.grpo_math.scorer.score(
            super()._get_per_token_logps_and_entropies,
            model,
            PaddedRows(input_ids, attention_mask, logits_to_keep, group),
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
            **kwargs,
        )

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        parts, norm = self.grpo_math, super()._get_grad_norm(model, grad_norm)
        scale = float16.loss_scale(self.accelerator, self.deepspeed)
        # With an infinite loss, or a scale that does not enlarge the gradients, the scale is not the reason for a
        # gradient that is not finite.
        may_overflow = scale is not None and scale > 1 and abs(parts.updates.result.policy_loss) < math.inf
        skipped = parts.nonfinite.count(norm, may_overflow)
        parts.meter.add({metrics.SKIPPED: float(skipped and not may_overflow)})
        if scale is not None:
            parts.meter.add({metrics.LOSS_SCALE: scale, metrics.OVERFLOWED: skipped and may_overflow})
        if skipped:
            # Optimizers skip a parameter without a gradient, so its weight and its moments do not change.
            model.zero_grad()
        if error := parts.nonfinite.error(self.state.global_step):
            # transformers counts a step after the optimizer. So this is the checkpoint of the step before.
            parts.run.agree_to_save_last_step(parts.program.is_recipe)
            raise error
        return norm

    # A step is done

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # After transformers' method, because logging clears the metrics of the step.
        self.grpo_math.run.take_snapshot()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # TRL logs the seconds of a step at its end. The last log entry of a run belongs to no step.
        if self.model.training and self._metrics["train"].get(metrics.SECONDS_STEP):
            self.grpo_math.meter.write(vllm=self.use_vllm, cuda=self.accelerator.device.type == "cuda")
        if self.model.training and metrics.LOSS in logs:
            logs = {**logs, **self.grpo_math.meter.without_value()}
        metrics.prefer_scripts(self._metrics["train" if self.model.training else "eval"])
        # The run directory of a script has TRL's file of completions, too. Trackers get the table only with
        # ``log_completions``.
        file_only = writes_run_files(self) and metrics.LOSS in logs and not self.log_completions
        # TRL would print a table without rows, too.
        writes = (self.log_completions or file_only) and bool(self._logs["prompt"])
        with table.storable_table(self, [] if file_only else self.args.report_to):
            # TRL prints all columns of the table next to each other, wider than a terminal: 0 keeps TRL from printing.
            with replaced(self, num_completions_to_print=0, log_completions=writes):
                super().log(logs, start_time)
            # The last log entry of a run is about no step.
            if self.log_completions and self.accelerator.is_main_process and "train_runtime" not in logs:
                console.print_completions(self._logs, self.state.global_step, self.num_completions_to_print)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Call TRL's method, or evaluate the held-out sets of a recipe, whose trainer has no data set to evaluate."""
        parts = self.grpo_math
        # The evaluation may fail. It also draws random numbers, and fills the table of completions.
        parts.run.take_missing_snapshot()
        if parts.program.evaluate_heldout is not None and eval_dataset is None:
            values = parts.program.evaluate_heldout()
            # Not TRL's method: it would log and clear the metrics of a step that is not complete.
            super(GRPOTrainer, self).log(values)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, values)
            return values
        # A reward function may call this method: its completions are not those of the rollout in progress.
        logs = parts.rollouts.table or self._logs
        # The seeds of training continue as if nothing had been evaluated.
        sampler = parts.adapters and parts.adapters.sampler
        seeds = replaced(sampler, **sampler.state_dict()) if sampler else nullcontext()
        with replaced(self, _logs=logs), seeds:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        # transformers saves the best step under ``save_strategy: best`` only, which saves no other step.
        self.control.should_save |= is_best and self.grpo_math.program.keep_best
        return is_best

    # A checkpoint

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Call transformers' method. Delete earlier checkpoints, and push this one, only when this one is complete."""
        run_dir, step, args = Path(self._get_output_dir(trial=trial)), self.state.global_step, self.args
        folder = run_dir / f"checkpoint-{step}"
        with checkpoints.sealed(folder, self.accelerator), replaced(args, save_total_limit=None, push_to_hub=False):
            super()._save_checkpoint(model, trial)
            # Written before the checkpoint is complete: a run that is killed in between writes both again.
            if self.accelerator.is_main_process and self.state.best_model_checkpoint is not None:
                best = {
                    "step": self.state.best_global_step,
                    "metric": f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}",
                    "value": self.state.best_metric,
                    "path": Path(self.state.best_model_checkpoint).name,
                }
                write_json(run_dir / checkpoints.BEST, best)
        self.grpo_math.run.saved_step = step
        if args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if args.should_save:
            # By step: a clock that was set back would make this checkpoint the oldest. In the folder of a script, the
            # checkpoints of an earlier run may have later steps.
            by_time = not self.grpo_math.program.is_recipe
            rotate_checkpoints(str(run_dir), args.save_total_limit, self.state.best_model_checkpoint, by_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        # With FSDP a rank has parts of weights. `Reference.load` refuses a checkpoint without the file.
        if self.grpo_math.reference is not None and not self.is_fsdp_enabled:
            self.grpo_math.reference.save(Path(output_dir), writes=self.args.should_save)
        # Every rank writes a file, because every rank trains on its own rows of the rollout.
        writes_table = self.log_completions or writes_run_files(self)
        torch.save(
            self.grpo_math.run.agree_on_saved(writes_table),
            Path(output_dir) / checkpoints.STATE.format(self.accelerator.process_index),
        )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with pickled_without_tokens(self.args):
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(str(output_dir or self.args.output_dir))
            # The run directory of a recipe contains its settings as text. A script may read the pickle.
            if self.grpo_math.program.is_recipe:
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            remove_reference(self.model, folder)

    def _load_best_model(self) -> None:
        if self._saves_whole_model:
            loading.load_weights(self.model, cast(str, self.state.best_model_checkpoint))
        else:
            with loading.unchanged_dtypes(self.model):
                super()._load_best_model()
        if self.use_vllm:
            self._last_loaded_step = -1  # vLLM has the weights of the last step

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        # The run of a recipe has our card. TRL's card would name "None" as the base if the base is a folder.
        if not self.grpo_math.program.is_recipe:
            super().create_model_card(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with without_run_files(self):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with pickled_without_tokens(self.args), without_run_files(self):
            super()._push_from_checkpoint(checkpoint_folder)
