"""The training program: `accelerate launch --config_file ACCELERATE.yaml -m grpo_math.train --config RECIPE.yaml`.

A recipe is a YAML file with fields of `ProgramFields`, `MathGRPOConfig` and TRL's `ModelConfig`; each of them can also
be given on the command line, which wins. The run writes to ``output_dir``: config.yaml, history.jsonl, before.json and
after.json (if ``eval_n`` asks for them), adapter/ or model/, report.html and plots/.

trainer/trainer.py has every override of TRL.
"""

import json
import os
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState

from grpo_math import planner
from grpo_math.checks.check_machine import refuse_unusable
from grpo_math.checks.check_services import cache_only
from grpo_math.checks.live import Diagnosis
from grpo_math.checks.preflight import (
    EARLY,
    MAIN,
    START,
    TOKENIZER,
    agree_warning_lines,
    training_checks,
    warning_lines,
)
from grpo_math.checks.setup import Setup
from grpo_math.checks.training import can_sample, probe
from grpo_math.errors import ConfigError, OutOfMemory, PushError, RewardError, UserError, WriteError, printed
from grpo_math.evaluation import suite
from grpo_math.evaluation.evaluation import Evaluation, write
from grpo_math.evaluation.evaluator import evaluate_engine
from grpo_math.evaluation.suite import Sampling
from grpo_math.evaluation.trainer_engines import open_engine
from grpo_math.generation.lost_server import ServerUnavailable
from grpo_math.generation.models import absolute_path, model_path
from grpo_math.generation.request import request_from
from grpo_math.problems.from_recipe import HeldOutSet
from grpo_math.problems.sources import folder_name
from grpo_math.report.finish import finish_run
from grpo_math.report.trackers import Trackers
from grpo_math.rewards import load_reward
from grpo_math.rewards.functions import no_reward
from grpo_math.run import checkpoints, lock, resume
from grpo_math.run.earlier import archive_results
from grpo_math.run.failures import LostRank, failure, limit_waiting
from grpo_math.run.log import StopOnSignal, TrimLogHistory, Watchdog
from grpo_math.run.weights import checkpoint_kinds
from grpo_math.settings import recipe
from grpo_math.settings.batch import batch_from
from grpo_math.settings.own import ProgramFields
from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.shipped import find
from grpo_math.settings.start_adapter import recorded_adapter
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.signals import EX_TEMPFAIL, EX_UNAVAILABLE, INTERRUPTED, Stop, Stopped, no_silent_exit, stopping
from grpo_math.train import heldout, measure
from grpo_math.train.resuming import choose_checkpoint
from grpo_math.trainer.build import build_trainer
from grpo_math.trainer.recipe_settings import Settings, build, print_help
from grpo_math.trainer.run_files import RunFiles, RunWriter
from grpo_math.trainer.trainer import MathGRPOTrainer
from grpo_math.trainer.trainer_parts import Program

# Exit codes of errors, instead of 2.
CODES: dict[type[Exception], int] = {LostRank: EX_UNAVAILABLE, ServerUnavailable: EX_UNAVAILABLE, PushError: 1}


def main(
    argv: list[str], read: recipe.Recipe | None = None, warned: list[str] | None = None, as_json: bool = False
) -> int:
    """Parse and train. Print one line about an error of the user, and return the exit code.

    ``read``: the recipe, if it has been read already. ``warned``: the warnings of the early checks, if launcher.py has
    made these checks. ``as_json``: print what --measure finds as JSON. Exit code 2: bad input; 1: the push has failed,
    or a bug; the others are those of system/signals.py.
    """
    if {"-h", "--help"} & set(argv):
        print_help()
        return 0
    # accelerate looks for the file only in the current folder.
    if name := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(find(name))
    with stopping() as stop, no_silent_exit():
        try:
            train(build_settings(read or recipe.read_and_set_env(argv), warned), stop, warned, as_json)
            return stop.code
        except UserError as error:
            _say(f"error: {printed(error)}", everywhere=isinstance(error, LostRank | OutOfMemory | WriteError))
            # torch's agent ends all ranks when the first one exits. The main process has to print its line before.
            if isinstance(error, RewardError):  # on every rank alike
                PartialState().wait_for_everyone()
            elif os.environ.get("RANK", "0") != "0":
                time.sleep(2)
            return stop.code or CODES.get(type(error), 2)
        except KeyboardInterrupt:  # before training, or a second one
            _say("interrupted")
            return INTERRUPTED
        except Stopped:  # before training, or after it
            _say("stopped: the same command starts again, and continues from its last checkpoint")
            return EX_TEMPFAIL


def build_settings(read: recipe.Recipe, warned: list[str] | None = None) -> Settings:
    """Return the settings of a recipe. torch.distributed is initialized afterwards. ``warned``: as in `main`."""
    # Refuse before build() makes TRL's arguments: they initialize torch.distributed and choose the GPU.
    _refuse_separate_processes()
    # A missing launcher is one line, before TRL's settings are made and torch reports it.
    setup = Setup(read.raise_first_problem(), int(os.environ.get("WORLD_SIZE", 1)))
    warning_lines(setup, training_checks(START) if warned is None else ())
    refuse_unusable(setup)
    cache_only([read.settings.dataset, read.settings.eval_dataset], read.settings.model_name_or_path)
    _lay_out_memory(read.settings)
    for note in read.notes:
        _say(f"warning: {note}")
    for line in read.replaced:
        _say(line)
    settings = build(read)
    _check_world()
    limit_waiting(settings.config.ddp_timeout)
    return settings


def _refuse_separate_processes() -> None:
    """Raise `ConfigError` if accelerate started several processes that are not connected.

    accelerate does so for ``distributed_type: MULTI_CPU`` without MPI. Each process would train alone, and all would
    write into one folder.
    """
    ranks = {"RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"}
    launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()
    if launched and not ranks & os.environ.keys():
        reason = "makes accelerate start processes that train separately"
        raise ConfigError("distributed_type", "MULTI_CPU", reason, "use MULTI_GPU with use_cpu: true")


def _check_world() -> None:
    """Raise `UserError` unless all processes that the launcher started have found each other."""
    expected, state = int(os.environ.get("WORLD_SIZE", 1)), PartialState()
    if state.num_processes != expected:
        met = f"{state.num_processes} of {expected} processes found each other ({state.distributed_type})"
        raise UserError(f"{met}: check the accelerate config and main_process_ip")


def _say(line: str, everywhere: bool = False) -> None:
    if everywhere or int(os.environ.get("RANK", 0)) == 0:
        print(line, file=sys.stderr)


def train(settings: Settings, stop: Stop, warned: list[str] | None = None, as_json: bool = False) -> None:
    """Train one run, from problems to report. After a signal it ends earlier, with a checkpoint.

    ``warned``, ``as_json``: as in `main`.
    """
    run_dir, keeps_nothing = Path(str(settings.config.output_dir)), settings.run.keeps_nothing
    stdout, answer = sys.stdout, dict[str, Any]()
    try:
        # The trainer's constructor makes folders, also in a dry run.
        scratch = TemporaryDirectory() if keeps_nothing else nullcontext()
        output = redirect_stdout(sys.stderr) if as_json else nullcontext()
        with Watchdog(settings.run.watchdog_minutes) as watchdog, scratch as folder, output:
            settings.config.output_dir = folder or settings.config.output_dir
            run = TrainingRun(settings, run_dir)
            is_due = run.prepare(warned)
            if is_due and settings.run.measure:
                answer = run.measure(watchdog, stop)
            elif is_due and not keeps_nothing:
                run.attach(watchdog, stop)
                run.evaluate("before")
                run.train(stop)
                if not stop.heeded:
                    run.finish()
            # The last common point of all ranks. Without this, torch warns, and a thread of Gloo's may abort a process
            # that has finished.
            PartialState().destroy_process_group()
            if answer and run.config.process_index == 0:
                print(json.dumps(answer) if as_json else measure.text(answer, run_dir), file=stdout)
            # Also for a run that was finished already: its push may have failed, and the same command tries again.
            if run.config.process_index == 0 and not (stop.heeded or keeps_nothing):
                finish_run(run.config, run.target, run.pushes)
    # Stopped is a SystemExit too.
    except (UserError, Stopped):
        raise
    except SystemExit as error:  # its code may be 0
        message = f"something that training calls has ended it by sys.exit({error.code!r})"
        raise UserError(f"{message}: raise an exception there instead") from error
    except Exception as error:
        if reported := failure(error, run_dir):
            raise reported from error
        raise


class TrainingRun:
    """One run. The function `train` calls the methods in their order, on every process."""

    trainer: MathGRPOTrainer

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self.settings = settings
        self.run = settings.run
        self.config = settings.config
        self.run_dir = run_dir
        self.target = run_dir / ("adapter" if settings.model.use_peft else "model")
        read = settings.recipe
        if read.settings.eval_n is None and not can_sample(self.config):
            read = read._replace(settings=read.settings.derived(eval_n=0))
        deepspeed = getattr(self.config.deepspeed_plugin, "deepspeed_config", None)
        launch = {
            "distributed_type": "".join(checkpoint_kinds(self.config)),
            "deepspeed_config": {"deepspeed_config_file": deepspeed},
        }
        self.setup = Setup(read, self.config.world_size, launch, started=True)
        # report/hub.py pushes once, at the end. transformers would push each checkpoint.
        self.pushes = self.config.push_to_hub
        self.config.push_to_hub = False
        # transformers would write the token into checkpoints, with its other arguments.
        if self.config.hub_token:
            os.environ["HF_TOKEN"] = self.config.hub_token
            self.config.hub_token = None

    def prepare(self, warned: list[str] | None = None) -> bool:
        """Get ready for the first step, from cheap to expensive. Return False if the folder's run is finished already.

        An impossible recipe is refused before a problem is read, and a bad data set, reward or folder before weights
        are downloaded and loaded. A rejected run prints one line, and writes no files. ``warned``: as in `main`.
        """
        rewards = self.check(warned)
        if self.claim_folder():
            _say(f"The run in {self.run_dir} is finished; name a new output_dir for another.")
            return False
        self.load(rewards)
        if self.is_main:
            self.print_batch()
        return True

    def check(self, warned: list[str] | None) -> list[Any]:
        """Check the settings, the problems and the tokenizer, and print the warnings. Return the reward functions."""
        probe(self.run, self.config)
        checks = training_checks(EARLY, MAIN) if warned is None else training_checks(MAIN)
        lines = [*(warned or ()), *agree_warning_lines(self.setup, checks)]
        rewards = [load_reward(name) for name in self.run.rewards] or [no_reward]
        if self.run.measure:
            self.whole, rewards = measure.shorten(self.config, rewards, len(self.setup.problems.rows))
        for line in [*lines, *agree_warning_lines(self.setup, training_checks(TOKENIZER))]:
            _say(line)
        return rewards

    def claim_folder(self) -> bool:
        """Lock the folder, and choose the checkpoint to continue from. Return True if its run is finished.

        A dry run checks only that no other run has the folder.
        """
        use = lock.refuse_used if self.run.keeps_nothing else lock.acquire
        broadcast_from_main(lambda: use(self.run_dir))
        checkpoint, finished = broadcast_from_main(lambda: choose_checkpoint(self.setup, self.config, self.run_dir))
        self.config.resume_from_checkpoint = checkpoint
        return finished

    def load(self, rewards: list[Any]) -> None:
        """Load the weights, and make the trainer."""
        model, setup = self.settings.model, self.setup
        # config.yaml records this folder or name on the Hub, not a name such as ``embedded``.
        model.model_name_or_path = absolute_path(model_path(model.model_name_or_path))
        self.trainer = build_trainer(
            self.config, model, setup.problems.rows, setup.tokenizer, rewards, self.run.adapter
        )
        self.is_main = self.trainer.accelerator.is_main_process

    def print_batch(self) -> None:
        """Print the batch, and what is evaluated."""
        batch, kind = batch_from(vars(self.config), self.config.world_size), self.config.device.type
        threads = f"; threads of a process: {torch.get_num_threads()} (OMP_NUM_THREADS)" if kind == "cpu" else ""
        print(batch.line({"cuda": "GPU", "cpu": "CPU process"}.get(kind, f"{kind} process")) + threads, flush=True)
        if note := self.setup.problems.evaluation.line:
            print(note, flush=True)
        if self.run.dry_run:
            print(f"dry run  ready for the first step; nothing was written to {self.run_dir}")

    def measure(self, watchdog: Watchdog, stop: Stop) -> dict[str, Any]:
        """Train for a few steps, and return what they take. Nothing is kept."""
        self.trainer.remove_callback(RunFiles)
        for callback in (watchdog, StopOnSignal(stop)):
            self.trainer.add_callback(callback)
        return measure.measure_run(self.trainer, self.setup, self.whole)

    def attach(self, watchdog: Watchdog, stop: Stop) -> None:
        """Write config.yaml and the problems, and add the callbacks that write the other files during the run."""
        trainer, config, run_dir, read = self.trainer, self.config, self.run_dir, self.settings.recipe
        self.resolved = {
            **{one.name: getattr(self.run, one.name) for one in fields(ProgramFields)},
            **asdict(self.settings.model),
            **config.to_dict(),
            "push_to_hub": self.pushes,
            "adapter": self.run.adapter and recorded_adapter(self.run.adapter),
        }
        trainer.remove_callback(RunFiles)
        self.writer = RunWriter(trainer)
        # Findings reach wandb, trackio and other trackers as TRL's values do. Not by on_log of the handler: the line of
        # the step would then not be logged.
        findings = Diagnosis(self.writer, self.resolved, partial(trainer.callback_handler.call_event, "on_log"))
        for callback in (self.writer, TrimLogHistory(), watchdog, findings):
            trainer.add_callback(callback)
        if self.is_main:
            # Archive first: config.yaml may get the settings of a longer run, which is not finished.
            replaces = not config.resume_from_checkpoint and (run_dir / "config.yaml").exists()
            archive_results(run_dir, is_new=replaces)
            explicit = resume.explicit_settings(read.settings)
            self.writer.write_settings({**self.resolved, "stated": explicit}, ["grpo_math.train", *read.argv])
            resume.write_problems(run_dir, self.setup.problems.hashes)
            trainer.add_callback(Trackers(config.report_to, run_dir, self.resolved))
        evaluate = self.evaluate_heldout if self.setup.problems.evaluation.during else None
        trainer.grpo_math.program = Program(is_recipe=True, keep_best=self.run.keeps_best, evaluate_heldout=evaluate)
        # This callback is the last: the other callbacks' work is part of the step.
        trainer.add_callback(StopOnSignal(stop))

    def evaluate(self, name: str) -> None:
        """Write RUN/before.json or RUN/after.json, if ``eval_n`` asks for them."""
        file = self.run_dir / f"{name}.json"
        whole = self.setup.problems.evaluation.before_and_after
        if whole is None:
            return
        # The weights of a checkpoint are no longer those before training.
        if name == "before" and self.config.resume_from_checkpoint and broadcast_from_main(file.exists):
            return
        _say(f"{1 if name == 'before' else 3} of 3: evaluating {name} training")
        self.last_evaluation = evaluation = self.score(whole)
        trained = str(self.target) if self.settings.model.use_peft else None
        adapter = self.resolved["adapter"] if name == "before" else trained
        if self.is_main:
            write(replace(evaluation, settings={**evaluation.settings, "adapter": adapter}), file)

    def train(self, stop: Stop) -> None:
        """Train to the last step, or to the step in which a signal came, and print that step."""
        trainer = self.trainer
        if self.setup.problems.evaluation.before_and_after:
            _say("2 of 3: training")
        try:
            trainer.train(resume_from_checkpoint=self.config.resume_from_checkpoint)
        except OutOfMemory as error:
            raise OutOfMemory(f"{error}{_advice(self.setup.settings, self.config.world_size)}") from None
        if stop.heeded:
            outcome = "Interrupted" if stop.code == INTERRUPTED else "Stopped"
            steps = f"step {trainer.state.global_step} of {trainer.state.max_steps}"
            _say(f"{outcome} after {steps}; {checkpoints.how_to_resume(self.run_dir)}.")
            # torch's agent ends the other ranks when the first one exits.
            trainer.accelerator.wait_for_everyone()

    def finish(self) -> None:
        """Save the weights, evaluate after training, and record that the run is finished."""
        self.writer.save_weights(self.target)
        self.evaluate("after")
        self.compare_best()
        if self.is_main:
            self.writer.write_finished(weights=self.target.name)

    def compare_best(self) -> None:
        """Compare the best checkpoint with the last weights. The trainer has the best weights afterwards."""
        state, plan = self.trainer.state, self.setup.problems.evaluation
        best = state.best_global_step if self.run.keeps_best else None
        # With load_best_model_at_end, transformers has put the best weights in place of the last ones.
        if best is None or best == state.global_step or self.config.load_best_model_at_end:
            return
        # The best checkpoint is the best of many on the problems that chose it, so chance has favored it there.
        line = f"best     checkpoint-{best}, not compared: no held-out problem is left that did not choose it"
        chose, whole = {row["problem"] for one in plan.during for row in one.rows}, plan.before_and_after
        rest = [row for row in whole.rows if row["problem"] not in chose] if whole else []
        if whole and rest:
            self.trainer._load_best_model()
            line = heldout.best_and_last(self.score(whole._replace(rows=rest)), self.last_evaluation, best)
        if self.is_main:
            print(line)

    # Methods that the steps above share

    def score(self, one: HeldOutSet, progress: bool = True) -> Evaluation:
        """Return the evaluation of the model as it is now on a set."""
        _, samples, temperature = suite.evaluation_protocol(one.data, None, one.samples, one.temperature)
        request = request_from(self.setup.settings.values())
        with open_engine(self.trainer) as engine:
            return evaluate_engine(
                engine,
                one.rows,
                Sampling(samples, temperature, request.max_new_tokens),
                request,
                extra_settings={"data": one.data, "split": one.split},
                grade_timeout=self.config.grade_timeout,
                contamination=self.setup.problems.overlap,
                progress=progress,
            )

    def evaluate_heldout(self) -> dict[str, float]:
        """Return the metrics of the sets that are evaluated during training."""
        values: dict[str, float] = {}
        for one in self.setup.problems.evaluation.during:
            evaluation = self.score(one, progress=False)
            values |= heldout.heldout_metrics(folder_name(one.data), evaluation)
            values |= {} if self.run.heldout else evaluation.summary.logged()
        return values


def _lay_out_memory(settings: RunSettings) -> None:
    """Let torch's allocator grow its segments, which leaves fewer holes, unless the user has set the variable.

    vLLM's sleep mode does not work with such segments.
    """
    # torch reads both names, so this value could win over the one that the user has set under the new name.
    if settings.generation != "colocate" and "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _advice(settings: RunSettings, processes: int) -> str:
    """Return the changes that the memory plan suggests, as the end of an error's line."""
    try:
        changes = planner.plan(settings, gpus=processes)["suggestions"]
    except UserError:  # a model or a layout that the plan does not support
        return ""
    return f"; the plan's advice: {', then '.join(', '.join(change['set']) for change in changes)}" if changes else ""
