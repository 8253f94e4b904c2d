"""The training program: `accelerate launch --config_file ACCELERATE.yaml -m grpo_math.train --config RECIPE.yaml`.

A recipe is a YAML file with fields of `TrainArguments`, `MathGRPOConfig` and TRL's `ModelConfig`; each of them can also
be given on the command line, which wins. The run writes to ``output_dir``: config.yaml, history.jsonl, before.json and
after.json (where ``eval_n`` asks for them), adapter/ or model/, report.html and plots/.

Does not override anything of TRL: trainer.py does.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_math.signals import AGAIN, GONE, INTERRUPTED, Stop, Stopped

if __name__ == "__main__":
    Stop(at_once=True).__enter__()  # torch and the rest take seconds to import
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it offers a kernel of the Hub

import torch
from accelerate import PartialState
from accelerate.utils import DynamoBackend, gather_object
from safetensors import SafetensorError
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, get_scheduler
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from grpo_math import difficulty, hub, lock, metrics, planner, recipe, resume
from grpo_math.batch import Batch, plan
from grpo_math.checks import launching
from grpo_math.checks.machine import refuse_unwritable
from grpo_math.checks.preflight import CHECKS, WITH_TOKENIZER, preflight, refusal
from grpo_math.checks.setup import Setup
from grpo_math.config import MathGRPOConfig
from grpo_math.data import to_dataset
from grpo_math.difficulty import CURRICULA
from grpo_math.disk import failed_write
from grpo_math.errors import ConfigError, OutOfMemory, PushError, RewardError, UserError, WriteError, one_of
from grpo_math.evaluation import evaluate, summary, write_json
from grpo_math.fingerprint import problems_hash
from grpo_math.generation_kwargs import check_generation
from grpo_math.main_process import on_main
from grpo_math.models import check_weights, fast_dtype, load_tokenizer, model_path, weights_of
from grpo_math.peers import Peers
from grpo_math.planner.settings import deepspeed_config
from grpo_math.prompts import TEMPLATES
from grpo_math.redact import without_secrets
from grpo_math.report import (
    ReportFiles,
    changed,
    compare,
    read_results,
    report,
    terminal_changes,
    terminal_table,
)
from grpo_math.rewards import Reward, load_reward
from grpo_math.run_log import Beat, Diagnosis, History, Progress, StopOnSignal, Tell, trackers, write_config
from grpo_math.shipped import find
from grpo_math.trackers import Trackers
from grpo_math.trainer import MathGRPOTrainer
from grpo_math.watchdog import Watchdog


@dataclass
class TrainArguments:
    dataset: str = field(
        default="generated",
        metadata={"help": "gsm8k, math, math500, generated, generated:LEVEL,LEVEL or a path to a .jsonl file."},
    )
    dataset_split: str = field(default="train", metadata={"help": "The split to train on."})
    dataset_limit: int | None = field(default=None, metadata={"help": "Train on at most so many problems."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Count and report bad rows instead of stopping."})
    template: str = field(default="gsm8k", metadata={"help": f"The prompt: {', '.join(TEMPLATES)}."})
    rewards: list[str] = field(
        default_factory=lambda: ["accuracy"],
        metadata={"help": "Reward functions: keys of REWARDS, or module:function for your own."},
    )
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out problems; default: as dataset."})
    eval_split: str = field(default="test", metadata={"help": "The split to evaluate on."})
    eval_n: int = field(default=0, metadata={"help": "Evaluate so many problems before and after; 0: none."})
    heldout_every: int = field(default=0, metadata={"help": "Evaluate heldout_n problems every so many steps."})
    heldout_n: int = field(default=64, metadata={"help": "Held-out problems of the evaluations during training."})
    watchdog_minutes: float = field(
        default=20.0,
        metadata={
            "help": "No step for so many minutes: every rank prints where it waits, with its stacks; nothing is ended. "
            "0: off."
        },
    )
    prompts_per_step: int = field(
        default=0,
        metadata={
            "help": "Prompts of an optimizer step, over all processes. The rows at a time and the accumulation follow "
            "from it; per_device_train_batch_size is then the most rows at a time. 0: TRL's fields say it all."
        },
    )

    resume: str = field(
        default="auto",
        metadata={
            "help": "A run that output_dir holds is gone on with if its settings are these (auto), or in spite of "
            "others (force)."
        },
    )

    difficulty_band: list[float] | None = field(
        default=None,
        metadata={
            "help": "Keep the training problems whose pass rate lies between these two, for example 0.1 0.9. The rate "
            "is the untrained model's, at the recipe's temperature and completion length, and is measured once."
        },
    )
    curriculum: str = field(
        default="none",
        metadata={"help": "easy_to_hard: train in the order of falling pass rate, unshuffled. none: shuffled, as TRL."},
    )
    difficulty_samples: int = field(default=8, metadata={"help": "Completions of a problem that its rate is over."})
    difficulty_file: str | None = field(
        default=None,
        metadata={
            "help": "Where the pass rates are kept and found again. Default: a file in the folder pass_rates beside "
            "output_dir, named after the model and the way of measuring."
        },
    )

    def __post_init__(self) -> None:
        one_of("template", self.template, tuple(TEMPLATES))
        one_of("curriculum", self.curriculum, CURRICULA)
        one_of("resume", self.resume, resume.MODES)
        for name in ("eval_n", "heldout_every", "heldout_n", "watchdog_minutes"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "is negative", "give 0 or more")
        if self.difficulty_samples < 1:
            raise ConfigError("difficulty_samples", self.difficulty_samples, "measures nothing", "give 1 or more")
        band = self.difficulty_band
        if band is not None and not (len(band) == 2 and 0 <= band[0] <= band[1] <= 1):
            raise ConfigError("difficulty_band", band, "is no band of pass rates", "give two, for example 0.1 0.9")
        if not self.needs_pass_rates:
            for name in ("difficulty_samples", "difficulty_file"):
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    why = "would be ignored without difficulty_band or curriculum"
                    raise ConfigError(name, getattr(self, name), why, "give one of these, or leave it out")

    @property
    def needs_pass_rates(self) -> bool:
        return self.difficulty_band is not None or self.curriculum != "none"


# What model_init_kwargs would set behind the back of a field that is checked
FIELDS_OF_MODEL = {
    **{name: name for name in ("dtype", "attn_implementation", "trust_remote_code")},
    "torch_dtype": "dtype",
    "revision": "model_revision",
    "quantization_config": "load_in_4bit",
}
# of torch.utils.checkpoint.checkpoint
CHECKPOINT_ARGUMENTS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "context_fn", "early_stop")

SETTINGS: list[Any] = [TrainArguments, MathGRPOConfig, ModelConfig]


class Parser(TrlParser):
    """TRL's parser, fed with settings that recipe.py has read and checked one by one; what is refused is one line."""

    def __init__(self) -> None:
        usage = "grpo-math train --config RECIPE.yaml [--FIELD VALUE ...]"  # argparse's own is 300 lines long
        super().__init__(SETTINGS, prog="grpo_math.train", usage=usage, allow_abbrev=False)
        self.set_defaults(logging_steps=1)  # a line of the history for each step; TRL's own default is 10
        self.given: set[str] = set()  # the settings that the recipe or the command line names

    def error(self, message: str) -> Any:
        raise ValueError(message)

    def _named_in(self, message: str) -> str | None:
        """The setting that a refusal of transformers or TRL speaks of, among those that are given."""
        found = [name for name in self.given if re.search(rf"(?<!\w){name}(?!\w)", message)]
        return max(found, key=len, default=None)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The settings before TRL's dataclasses are made of them: `batch.plan` fills in the three that it solves."""
        settings, unknown = super().parse_known_args(args, namespace)
        batch = plan(vars(settings), self.given, int(os.environ.get("WORLD_SIZE", 1)))
        settings.per_device_train_batch_size, settings.gradient_accumulation_steps = batch.rows, batch.steps
        return settings, unknown

    def parse(self, argv: list[str]) -> tuple[TrainArguments, MathGRPOConfig, ModelConfig]:
        if {"-h", "--help"} & set(argv):
            self.parse_args(["--help"])
        read = recipe.read(argv)
        if read.problems:
            raise read.problems[0]
        deepspeed_config(read.values, None)  # refuses a file that is not there
        os.environ.update(read.env)
        self.given = read.given
        self.set_defaults(**{name: read.values[name] for name in read.given})
        try:
            train_args, config, model_args = self.parse_args_into_dataclasses(args=[])
        except UserError:
            raise
        except (ValueError, TypeError, OSError, KeyError, ImportError, RuntimeError) as error:  # of TRL's own classes
            file = error.filename if isinstance(error, OSError) else None
            if name := next((name for name in self.given if file and read.values[name] == file), None):
                reason = f"cannot be read ({str(error).partition('] ')[2].partition(':')[0]})"
                raise ConfigError(name, file, reason, "give the path of a JSON file, or a mapping") from None
            said = " ".join(str(error).split())
            if name := self._named_in(said):
                raise ConfigError(name, read.values[name], f"is refused ({said})", "mend this setting") from None
            raise UserError(f"{said}: mend this setting") from None
        if train_args.curriculum != "none":
            if "shuffle_dataset" in self.given and config.shuffle_dataset:
                why = f"contradicts curriculum={train_args.curriculum}"
                raise ConfigError("shuffle_dataset", True, why, "leave one of them out")
            config.shuffle_dataset = False
        return train_args, config, model_args


def main(argv: list[str] | None = None) -> int:
    """Parse, train, and say how it ended: one line where there is something to mend, and an exit code.

    2: the user's to mend; 1: only the push has failed, or a bug; the others are those of signals.py.
    """
    argv = sys.argv[1:] if argv is None else argv
    if wrong := launching.refused():  # before any other module reads these variables
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    if name := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):  # accelerate looks in the current folder alone
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(find(name))
    peers = Peers()
    with Stop(too_late=peers.broken) as stop:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of transformers' own renamings
                _refuse_unlaunched(argv)
                settings = Parser().parse(argv)
                run_dir = Path(str(settings[1].output_dir))
                peers.watch(lambda: resume.goes_on(run_dir))
                train(*settings, argv, stop)
                code = stop.code
        except UserError as error:
            code = stop.code or (1 if isinstance(error, PushError) else 2)
            _say(f"error: {error}", everywhere=isinstance(error, OutOfMemory | WriteError))
            if isinstance(error, RewardError):  # on every rank alike, and torch's agent ends the others with the first
                PartialState().wait_for_everyone()
        except KeyboardInterrupt:  # before training, or a second one
            code = INTERRUPTED
            _say("interrupted")
        except Stopped:  # before training, or after it
            code = AGAIN
            _say("stopped: the same command starts again, and goes on from its last checkpoint")
        except BaseException:
            if peers.broken(seconds=1.0):
                code = GONE  # what was raised is that another rank does not answer
            elif stop.code:
                traceback.print_exc()
                code = stop.code
            else:
                peers.leave(1)
                raise
        peers.leave(code)
    return code


def _refuse_unlaunched(argv: list[str]) -> None:
    """What torch would say of a missing launcher when TRL's settings are made is said in one line before."""
    read = recipe.read(argv)
    if read.problems:
        return  # the parser says them
    setup = Setup(read.values, read.given, int(os.environ.get("WORLD_SIZE", 1)))
    for finding in preflight(setup, ["deepspeed"]):
        raise refusal(finding)


def _say(line: str, everywhere: bool = False) -> None:
    if everywhere or int(os.environ.get("RANK", 0)) == 0:
        print(line, file=sys.stderr)


def train(
    train_args: TrainArguments, config: MathGRPOConfig, model_args: ModelConfig, argv: list[str], stop: Stop
) -> None:
    """One run, from problems to report. Where ``stop`` is heeded it ends before that, with a checkpoint."""
    run_dir = Path(str(config.output_dir))
    try:
        with Watchdog(run_dir, train_args.watchdog_minutes) as watchdog:
            _train(train_args, config, model_args, argv, run_dir, watchdog, stop)
    except UserError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if failed := failed_write(error, run_dir):
            raise failed from error
        raise


def _train(
    train_args: TrainArguments,
    config: MathGRPOConfig,
    model_args: ModelConfig,
    argv: list[str],
    run_dir: Path,
    watchdog: Watchdog,
    stop: Stop,
) -> None:
    if config.hub_token:  # transformers would write it into checkpoints, with the rest of its arguments
        os.environ["HF_TOKEN"], config.hub_token = config.hub_token, None
    on_main(lambda: lock.hold(run_dir, make=False))  # before anything of a run that is under way is looked at
    check(train_args, config, run_dir)
    if train_args.needs_pass_rates:
        measured_how = _measured_how(train_args, config, model_args)
        rates_file = Path(train_args.difficulty_file or difficulty.default_file(run_dir, measured_how))
        difficulty.read(rates_file, measured_how)  # refuse a file of another kind before weights are loaded
    read = recipe.read(argv)
    setup = Setup(read.values, read.given, config.world_size)
    warned = ask(setup, CHECKS)
    pushes, config.push_to_hub = config.push_to_hub, False  # transformers' own push is off: hub.py's comes once, last
    target = run_dir / ("adapter" if model_args.use_peft else "model")
    rewards = [load_reward(name) for name in train_args.rewards]
    rows, held_out = setup.rows, setup.held_out
    path = model_path(model_args.model_name_or_path)
    setup.tokenizer = load_tokenizer(path, model_args.model_revision)
    on_main(lambda: check_weights(path))
    for line in [*warned, *ask(setup, WITH_TOKENIZER)]:  # only now: a run that is refused says one line
        _say(line)
    on_main(lambda: lock.hold(run_dir))  # a run that is refused leaves nothing behind
    ask(setup, ["output_dir"])  # once more: another run may have come and gone since
    if go_on(setup, config, run_dir):
        if config.process_index == 0:
            print(f"The run in {run_dir} is finished; name a new output_dir for another.", file=sys.stderr)
            conclude(config, target, pushes)
        return
    trainer = trainer_of(config, model_args, setup, rewards)
    history, progress = History(run_dir), Progress()
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    settings = {**asdict(train_args), **asdict(model_args), **config.to_dict(), "push_to_hub": pushes}
    tell = trackers(trainer)
    for callback in (history, progress, Beat(watchdog), Diagnosis(history, settings, tell=tell)):
        trainer.add_callback(callback)
    main_process = trainer.accelerator.is_main_process
    if main_process:
        kind = config.device.type
        print(_batch_of(config).line({"cuda": "GPU", "cpu": "CPU process"}.get(kind, f"{kind} process")), flush=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / resume.FINISHED).unlink(missing_ok=True)  # first: the settings may be those of a longer run
        state = trainer.accelerator.state
        launch = (state.distributed_type, state.num_processes)
        stated = resume.stated(read.values, read.given)
        write_config(run_dir / "config.yaml", {**settings, "stated": stated}, ["grpo_math.train", *argv], *launch)
        resume.write_problems(run_dir, rows)
        told = Trackers(config.report_to, run_dir, settings)
        trainer.add_callback(told)

    if train_args.needs_pass_rates:
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        rates = difficulty.measure(
            model,
            tokenizer,
            rows,
            rates_file,
            measured_how,
            seed=config.seed,
            grade_timeout=config.grade_timeout,
        )
        trainer.train_dataset = to_dataset(_by_difficulty(rows, rates, train_args, config, main_process))

    def score(problems: list[dict[str, Any]], progress: bool) -> dict[str, Any]:
        about = {"data": train_args.eval_dataset or train_args.dataset, "split": train_args.eval_split}
        return _evaluate(trainer, problems, config, about, setup.overlap, progress)

    if train_args.heldout_every:
        trainer.add_callback(HeldOut(score, held_out[: train_args.heldout_n], train_args.heldout_every, history, tell))
    before, after = run_dir / "before.json", run_dir / "after.json"
    if train_args.eval_n and not (config.resume_from_checkpoint and before.exists()):
        results = score(held_out[: train_args.eval_n], True)
        if main_process:
            write_json(before, results)
    trainer.add_callback(StopOnSignal(stop))  # the last: what other callbacks do in a step is part of it
    try:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}{_advice(settings, config.world_size)}") from None
    finally:
        progress.close()  # the line of an error is then one of its own
    if stop.heeded:
        if main_process:
            what = "Interrupted" if stop.code == INTERRUPTED else "Stopped"
            steps = f"step {trainer.state.global_step} of {trainer.state.max_steps}"
            print(f"{what} after {steps}; {resume.goes_on(run_dir)}.", file=sys.stderr)
        trainer.accelerator.wait_for_everyone()  # torch's agent ends the others with the first
        return
    with resume.written_aside(target, trainer.accelerator) as folder:
        if main_process:
            shutil.rmtree(target, ignore_errors=True)  # of a run that was made longer
        trainer.save_model(str(folder))
    if train_args.eval_n:
        results = score(held_out[: train_args.eval_n], True)
        if main_process:
            write_json(after, {**results, "adapter": str(target) if model_args.use_peft else None})
    if main_process:
        write_json(run_dir / resume.FINISHED, {"step": trainer.state.global_step, "weights": target.name})
        conclude(config, target, pushes, told)


def conclude(config: MathGRPOConfig, target: Path, pushes: bool, told: Trackers | None = None) -> None:
    """The report of a run that is whole, also for its trackers, and its push to the Hub."""
    run_dir = Path(str(config.output_dir))
    files = print_verdict(run_dir, target)
    if told is not None:
        told.end(files.plots, files.findings)
    if pushes:
        pushed = hub.push_finished(run_dir, config.hub_model_id, config.hub_private_repo, config.hub_revision)
        print(f"pushed   {pushed['url']}")


def go_on(setup: Setup, config: MathGRPOConfig, run_dir: Path) -> bool:
    """Decide what the run goes on from: ``config.resume_from_checkpoint`` becomes a folder, or None for the start.

    True if there is nothing left to do: the folder holds the finished run of these settings. Raises `UserError`, on
    every process alike, for the run of other settings, problems or processes, and for a damaged checkpoint.
    """
    config.resume_from_checkpoint, finished = on_main(lambda: _decide(setup, config, run_dir))
    return finished


def _decide(setup: Setup, config: MathGRPOConfig, run_dir: Path) -> tuple[str | None, bool]:
    """(the checkpoint to go on from, whether the run is finished), with a line on stderr about each that is damaged."""
    asked, mode = config.resume_from_checkpoint, setup.settings["resume"]
    named, held_in = resume.source(run_dir, asked)
    held = resume.config_of(held_in)
    if held is not None:
        lines = resume.changed_problems(held_in, setup.rows)
        if (before := held.get("num_processes", config.world_size)) != config.world_size:
            lines.append(f"num_processes: {before} -> {config.world_size}")
        of_checkpoints = {"DEEPSPEED", "FSDP"} & {str(held.get("distributed_type"))}
        if of_checkpoints != (now := _of_checkpoints(config)):  # each reads its own kind alone
            lines.append(f"distributed_type: {', '.join(of_checkpoints) or 'NO'} -> {', '.join(now) or 'NO'}")
        resume.refuse_changed(held_in, lines, mode)
        if named is None and mode == "auto" and (run_dir / resume.FINISHED).exists():
            return None, True
    if named:
        if (named / resume.SUMS).exists() and (reason := resume.damage(named)):
            raise ConfigError("resume_from_checkpoint", asked, f"is damaged ({reason})", "give another checkpoint")
        for file in sorted(named.glob("*.pt")):
            try:
                torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:
                reason = f"holds {file.name}, which is more than tensors and plain types ({type(error).__name__})"
                raise ConfigError("resume_from_checkpoint", asked, reason, "give another checkpoint") from None
        checkpoint: Path | None = named
    else:
        checkpoint, damaged = resume.newest_whole(run_dir)
        for line in damaged:
            print(f"warning: {line}: going on from {checkpoint}", file=sys.stderr)
        if checkpoint is None and asked:
            raise ConfigError("resume_from_checkpoint", asked, f"finds no checkpoint in {run_dir}", "leave it out")
    step = resume.step_of(checkpoint) if checkpoint else 0
    resume.set_aside_after(run_dir, step)
    resume.keep_lines(run_dir / "ungradable.jsonl", lambda line: line[metrics.STEP] < step)
    shutil.rmtree(run_dir / resume.WRITING, ignore_errors=True)
    if checkpoint:
        print(f"Going on from {checkpoint}.", file=sys.stderr)
    return str(checkpoint) if checkpoint else None, False


class _Trainer(MathGRPOTrainer):
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: TRL's would stand in the run directory with its own text, and a base that is a folder as "None"."""


def trainer_of(config: MathGRPOConfig, model_args: ModelConfig, setup: Setup, rewards: list[Reward]) -> MathGRPOTrainer:
    """The trainer of a recipe, with its weights loaded."""
    path = model_path(model_args.model_name_or_path)
    if model_args.dtype == "auto":
        model_args.dtype = fast_dtype()
    own: Any = config.model_init_kwargs or {}
    config.model_init_kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        **own,
    }
    with weights_of(path, own):
        trainer = _Trainer(
            model=path,
            reward_funcs=rewards,
            args=config,
            train_dataset=to_dataset(setup.rows),
            processing_class=setup.tokenizer,
            peft_config=get_peft_config(model_args),
            quantization_config=get_quantization_config(model_args),
        )
    config.model_init_kwargs = without_secrets(config.model_init_kwargs)  # transformers tells trackers its arguments
    return trainer


def check(train_args: TrainArguments, config: MathGRPOConfig, run_dir: Path) -> None:
    """What cannot work, before data and weights are read."""
    own: Any = config.model_init_kwargs or {}
    if config.trust_remote_code or own.get("trust_remote_code"):
        raise ConfigError("trust_remote_code", True, "would run code of a model repository", "leave it off")
    if config.eval_strategy != "no":
        raise ConfigError(
            "eval_strategy", getattr(config.eval_strategy, "value", "?"), "evaluates nothing here", "use heldout_every"
        )
    needs_whole = [name for name in ("eval_n", "heldout_every", "difficulty_band") if getattr(train_args, name)]
    needs_whole += ["curriculum"] if train_args.curriculum != "none" else []
    whole = config.deepspeed_plugin is None or config.deepspeed_plugin.zero_stage < 3
    if needs_whole and (not whole or "FSDP" in _of_checkpoints(config)):
        name = needs_whole[0]
        why = "needs the whole model on each process"
        raise ConfigError(name, getattr(train_args, name), why, "leave it out, and evaluate after the run")
    if str(config.resume_from_checkpoint).lower() == "true" and not resume.checkpoints(run_dir):
        raise ConfigError("resume_from_checkpoint", True, f"finds no checkpoint in {run_dir}", "leave it out")
    for name in ("load_best_model_at_end", "save_strategy"):
        value = getattr(getattr(config, name), "value", getattr(config, name))
        if value in (True, "best"):
            raise ConfigError(name, value, "needs transformers' evaluations, and there are none", "leave it out")
    if config.enable_jit_checkpoint:
        why = "would take SIGTERM for itself"
        raise ConfigError("enable_jit_checkpoint", True, why, "leave it out: the step is finished and saved anyway")
    if config.remove_unused_columns:
        why = "would take the gold answers away from the rewards"
        raise ConfigError("remove_unused_columns", True, why, "leave it out")
    if getattr(config.logging_strategy, "value", config.logging_strategy) == "no":
        why = "would leave the run without its history"
        raise ConfigError("logging_strategy", "no", why, "leave it out, or set logging_steps")
    if config.ignore_data_skip:
        why = "would go on with other problems than the run has left off at"
        raise ConfigError("ignore_data_skip", True, why, "leave it out")
    for name in config.model_init_kwargs or {}:
        if own := FIELDS_OF_MODEL.get(name):
            raise ConfigError("model_init_kwargs", name, "has a field of its own", f"set {own}")
    if train_args.difficulty_file:
        rates = train_args.difficulty_file
        refuse_unwritable("difficulty_file", rates, Path(rates).parent, "name another file")
    check_generation(config)
    _check_compute(config)
    _check_batches(config)
    try:
        MathGRPOTrainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        name = "optim_args" if config.optim_args else "optim"
        value = config.optim_args or getattr(config.optim, "value", config.optim)
        raise ConfigError(name, value, f"cannot be used ({error})", "leave it out, or use adamw_torch") from None
    if config.optim_args:
        _check_optim_args(config)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    extra: Any = config.lr_scheduler_kwargs
    try:
        get_scheduler(config.lr_scheduler_type, optimizer, config.get_warmup_steps(100), 100, extra)
    except (TypeError, ValueError) as error:
        name = getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)
        reason = f"does not suit lr_scheduler_type={name} ({error})"
        raise ConfigError("lr_scheduler_kwargs", extra, reason, "see that scheduler's own settings") from None


def _of_checkpoints(config: MathGRPOConfig) -> set[str]:
    """Who writes the optimizer's state in a way of its own: DEEPSPEED, FSDP, or nobody."""
    fsdp = config.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return {"DEEPSPEED"} if config.deepspeed_plugin is not None else {"FSDP"} if fsdp else set()


def _check_optim_args(config: MathGRPOConfig) -> None:
    """Every name in ``optim_args`` is one that this optimizer reads: transformers passes over others."""

    def read_with(text: str | None) -> str:
        try:
            return str(MathGRPOTrainer.get_optimizer_cls_and_kwargs(replaced(text)))
        except (ImportError, ValueError, TypeError) as error:
            return str(error)

    def replaced(text: str | None) -> MathGRPOConfig:
        other = copy.copy(config)
        other.optim_args = text
        return other

    for pair in str(config.optim_args).replace(" ", "").split(","):
        name = pair.partition("=")[0]
        if len({read_with(None), read_with(pair), read_with(f"{name}=3")}) == 1:
            reason = f"holds {name}, which optim={getattr(config.optim, 'value', config.optim)} does not read"
            raise ConfigError("optim_args", config.optim_args, reason, "leave it out")


def _check_batches(config: MathGRPOConfig) -> None:
    """What accelerate would do to a batch of rollouts, which is cut and shared out already."""
    own: Any = config.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(own, name, None):
            reason = "would tear groups of completions apart"
            raise ConfigError("accelerator_config", {name: True}, reason, "leave it out")
    if (getattr(own, "gradient_accumulation_kwargs", None) or {}).get("num_steps") is not None:
        reason = "has a field of its own"
        raise ConfigError("accelerator_config", "num_steps", reason, "set gradient_accumulation_steps")
    if not config.use_transformers_continuous_batching:
        return
    from transformers.generation import ContinuousBatchingConfig

    try:
        batching: Any = config.transformers_continuous_batching_config or {}
        ContinuousBatchingConfig(**batching)
    except (TypeError, ValueError) as error:
        value = config.transformers_continuous_batching_config
        reason = f"is refused ({' '.join(str(error).split())})"
        raise ConfigError("transformers_continuous_batching_config", value, reason, "leave it out") from None


def _check_compute(config: MathGRPOConfig) -> None:
    """What torch would refuse in the first forward pass."""
    backends = [backend.value.lower() for backend in DynamoBackend]
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    for name, known in (("torch_compile_backend", backends), ("torch_compile_mode", modes)):
        if value := getattr(config, name):
            one_of(name, value, tuple(known))
    arguments: Any = config.gradient_checkpointing_kwargs or {}
    for name in arguments:
        one_of("gradient_checkpointing_kwargs", name, CHECKPOINT_ARGUMENTS)


def ask(setup: Setup, checks: Collection[str]) -> list[str]:
    """What `grpo-math doctor` finds: the lines of its warnings; an error ends the run, on every process alike."""

    def look() -> list[str]:
        warned = []
        for finding in preflight(setup, checks):
            if finding.level == "error":
                raise refusal(finding)
            if finding.level == "warning":
                warned.append(finding.line())
        return warned

    return on_main(look)


def _advice(settings: dict[str, Any], processes: int) -> str:
    """What the memory plan would change, for the end of an error's line."""
    try:
        changes = planner.plan(settings, gpus=processes)["suggestions"]
    except UserError:  # a model or a layout that the plan does not know
        return ""
    return f"; the plan's advice: {', then '.join(', '.join(change['set']) for change in changes)}" if changes else ""


def _check_enough(rows: list[dict[str, Any]], config: MathGRPOConfig, name: str, value: object) -> None:
    """TRL drops what does not fill a rollout: too few problems would train for no step at all."""
    wanted = _batch_of(config).rollout // _batch_of(config).generations
    if len(rows) < wanted:
        reason = f"leaves {len(rows)} problem{'' if len(rows) == 1 else 's'}, and a step takes {wanted}"
        raise ConfigError(name, value, reason, "train on more problems, or on fewer in a step")


def _measured_how(train_args: TrainArguments, config: MathGRPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """What a pass rate depends on, apart from the problem."""
    revision = "" if model_args.model_revision == "main" else f"@{model_args.model_revision}"
    return {
        "model": f"{model_args.model_name_or_path}{revision}",
        "template": train_args.template,
        "temperature": config.temperature,
        "max_tokens": config.max_completion_length or 512,
        "samples": train_args.difficulty_samples,
    }


def _by_difficulty(
    rows: list[dict[str, Any]],
    rates: difficulty.Rates,
    train_args: TrainArguments,
    config: MathGRPOConfig,
    main_process: bool,
) -> list[dict[str, Any]]:
    """The rows to train on, in their order."""
    if train_args.difficulty_band is not None:
        rows, line = difficulty.in_band(rows, rates, *train_args.difficulty_band)
        if main_process:
            print(line, flush=True)
        _check_enough(rows, config, "difficulty_band", train_args.difficulty_band)
    return difficulty.easy_to_hard(rows, rates) if train_args.curriculum == "easy_to_hard" else rows


def _batch_of(config: MathGRPOConfig) -> Batch:
    settings: Any = config  # TRL's types say None where its own __post_init__ has filled in a number
    return Batch(
        generations=settings.num_generations,
        processes=settings.world_size,
        rows=settings.per_device_train_batch_size,
        steps=settings.gradient_accumulation_steps,
        rollout=settings.generation_batch_size,
    )


def _evaluate(
    trainer: MathGRPOTrainer,
    rows: list[dict[str, Any]],
    config: MathGRPOConfig,
    about: dict[str, Any],
    overlap: dict[str, Any] | None,
    progress: bool,
) -> dict[str, Any]:
    """Greedy results over all ranks: each takes every n-th row."""
    accelerator = trainer.accelerator
    results = evaluate(
        accelerator.unwrap_model(trainer.model),
        rows[accelerator.process_index :: accelerator.num_processes] or rows[:1],
        tokenizer=trainer.processing_class,
        max_new_tokens=config.max_completion_length or 512,
        batch_size=32,
        grade_timeout=config.grade_timeout,
        progress=progress and accelerator.is_main_process,
        about=about,
        contamination=overlap,
    )
    if accelerator.num_processes > 1:
        by_id = {record["id"]: record for record in gather_object(results["rows"])}
        results["rows"] = [by_id[row["id"]] for row in rows]
        results.update(summary(results["rows"]), problems_hash=problems_hash(rows))
    return results


class HeldOut(TrainerCallback):
    """Accuracy on held-out problems every so many steps, as a line of the history, and told to the trackers."""

    def __init__(self, score: Any, rows: list[dict[str, Any]], every: int, history: History, tell: Tell) -> None:
        self.score, self.rows, self.every, self.history, self.tell = score, rows, every, history, tell

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every:
            return
        results = self.score(self.rows, False)
        if state.is_world_process_zero:
            values = {metrics.HELDOUT_ACCURACY: results["accuracy"], metrics.HELDOUT_N: results["n"]}
            self.history.append(state.global_step, values)
            self.tell(args, state, control, values)


def print_verdict(run_dir: Path, target: Path) -> ReportFiles:
    """The report, and on the terminal what it comes to."""
    files = report(run_dir)
    if (run_dir / "before.json").exists() and (run_dir / "after.json").exists():
        before, after = read_results(run_dir / "before.json"), read_results(run_dir / "after.json")
        print(terminal_table(before, after, compare(before, after)))
        print(terminal_changes(changed(before, after)))
    for finding in files.findings:
        if finding.level != "info":
            print(finding.line())
    print(f"report   {files.html}\n{target.name:<8} {target}")
    return files


if __name__ == "__main__":
    sys.exit(main())
