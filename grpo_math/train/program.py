"""The training program: `accelerate launch --config_file ACCELERATE.yaml -m grpo_math.train --config RECIPE.yaml`.

A recipe is a YAML file with fields of `TrainArguments`, `MathGRPOConfig` and TRL's `ModelConfig`; each of them can also
be given on the command line, which wins. The run writes to ``output_dir``: config.yaml, history.jsonl, before.json and
after.json (where ``eval_n`` asks for them), adapter/ or model/, report.html and plots/.

Does not override anything of TRL: trainer/trainer.py does.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from transformers import PrinterCallback, ProgressCallback
from trl import ModelConfig

from grpo_math import planner
from grpo_math.checks.live import Diagnosis
from grpo_math.checks.preflight import CHECKS, WITH_TOKENIZER, ask, preflight, refusal
from grpo_math.checks.setup import Setup
from grpo_math.errors import OutOfMemory, PushError, RewardError, UserError, WriteError
from grpo_math.evaluation import pass_rates
from grpo_math.generation.models import check_weights, load_tokenizer, model_path
from grpo_math.problems.datasets import to_dataset
from grpo_math.report.trackers import Trackers
from grpo_math.report.verdict import conclude
from grpo_math.rewards import load_reward
from grpo_math.run import checkpoints, lock, resume
from grpo_math.run.disk import failed_write
from grpo_math.run.files import write_json
from grpo_math.run.log import Beat, History, Progress, StopOnSignal, trackers, write_config
from grpo_math.run.main_process import on_main
from grpo_math.run.peers import Peers
from grpo_math.run.signals import AGAIN, GONE, INTERRUPTED, Stop, Stopped
from grpo_math.run.watchdog import Watchdog
from grpo_math.settings import accelerate, recipe
from grpo_math.settings.arguments import TrainArguments
from grpo_math.settings.conflicts import check
from grpo_math.settings.parser import Parser
from grpo_math.settings.shipped import find
from grpo_math.train.heldout import HeldOut, evaluate_over_ranks
from grpo_math.train.resuming import go_on
from grpo_math.train.selection import batch_of, by_difficulty, way_of_measuring
from grpo_math.trainer.build import trainer_of
from grpo_math.trainer.config import MathGRPOConfig


def main(argv: list[str] | None = None) -> int:
    """Parse, train, and say how it ended: one line where there is something to mend, and an exit code.

    2: the user's to mend; 1: only the push has failed, or a bug; the others are those of run/signals.py.
    """
    argv = sys.argv[1:] if argv is None else argv
    if wrong := accelerate.refused():  # before any other module reads these variables
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
                peers.watch(lambda: checkpoints.goes_on(run_dir))
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
        measured_how = way_of_measuring(train_args, config, model_args)
        rates_file = Path(train_args.difficulty_file or pass_rates.default_file(run_dir, measured_how))
        pass_rates.read(rates_file, measured_how)  # refuse a file of another kind before weights are loaded
    read = recipe.read(argv)
    setup = Setup(read.values, read.given, config.world_size)
    warned = ask(setup, CHECKS)
    pushes, config.push_to_hub = (
        config.push_to_hub,
        False,
    )  # transformers' own push is off: report/hub.py's comes once, last
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
    trainer = trainer_of(config, model_args, rows, setup.tokenizer, rewards)
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
        print(batch_of(config).line({"cuda": "GPU", "cpu": "CPU process"}.get(kind, f"{kind} process")), flush=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / checkpoints.FINISHED).unlink(missing_ok=True)  # first: the settings may be those of a longer run
        state = trainer.accelerator.state
        launch = (state.distributed_type, state.num_processes)
        stated = resume.stated(read.values, read.given)
        write_config(run_dir / "config.yaml", {**settings, "stated": stated}, ["grpo_math.train", *argv], *launch)
        resume.write_problems(run_dir, rows)
        told = Trackers(config.report_to, run_dir, settings)
        trainer.add_callback(told)

    if train_args.needs_pass_rates:
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        rates = pass_rates.measure(
            model,
            tokenizer,
            rows,
            rates_file,
            measured_how,
            seed=config.seed,
            grade_timeout=config.grade_timeout,
        )
        trainer.train_dataset = to_dataset(by_difficulty(rows, rates, train_args, config, main_process))

    def score(problems: list[dict[str, Any]], progress: bool) -> dict[str, Any]:
        about = {"data": train_args.eval_dataset or train_args.dataset, "split": train_args.eval_split}
        return evaluate_over_ranks(trainer, problems, config, about, setup.overlap, progress)

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
            print(f"{what} after {steps}; {checkpoints.goes_on(run_dir)}.", file=sys.stderr)
        trainer.accelerator.wait_for_everyone()  # torch's agent ends the others with the first
        return
    with checkpoints.written_aside(target, trainer.accelerator) as folder:
        if main_process:
            shutil.rmtree(target, ignore_errors=True)  # of a run that was made longer
        trainer.save_model(str(folder))
    if train_args.eval_n:
        results = score(held_out[: train_args.eval_n], True)
        if main_process:
            write_json(after, {**results, "adapter": str(target) if model_args.use_peft else None})
    if main_process:
        write_json(run_dir / checkpoints.FINISHED, {"step": trainer.state.global_step, "weights": target.name})
        conclude(config, target, pushes, told)


def _advice(settings: dict[str, Any], processes: int) -> str:
    """What the memory plan would change, for the end of an error's line."""
    try:
        changes = planner.plan(settings, gpus=processes)["suggestions"]
    except UserError:  # a model or a layout that the plan does not know
        return ""
    return f"; the plan's advice: {', then '.join(', '.join(change['set']) for change in changes)}" if changes else ""
