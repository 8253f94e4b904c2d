"""The training program: `accelerate launch --config_file ACCELERATE.yaml -m grpo_math.train --config RECIPE.yaml`.

A recipe is a YAML file with fields of `TrainArguments`, `MathGRPOConfig` and TRL's `ModelConfig`; each of them can also
be given on the command line, which wins. The run writes to ``output_dir``: config.yaml, history.jsonl, before.json and
after.json (where ``eval_n`` asks for them), adapter/ or model/, report.html and plots/.

Does not override anything of TRL: trainer.py does.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import GenerationConfig, PrinterCallback, ProgressCallback, TrainerCallback, get_scheduler
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from grpo_math import difficulty, metrics, planner, recipe
from grpo_math.batch import Batch, plan
from grpo_math.checks.preflight import CHECKS, WITH_TOKENIZER, preflight, refusal
from grpo_math.checks.setup import Setup
from grpo_math.config import MathGRPOConfig
from grpo_math.data import to_dataset
from grpo_math.difficulty import CURRICULA
from grpo_math.errors import ConfigError, OutOfMemory, UserError, one_of
from grpo_math.evaluation import evaluate, summary, write_json
from grpo_math.fingerprint import problems_hash
from grpo_math.models import fast_dtype, load_tokenizer, model_path, weights_of
from grpo_math.planner.settings import deepspeed_config
from grpo_math.prompts import TEMPLATES
from grpo_math.report import changed, compare, read_results, report, terminal_changes, terminal_table
from grpo_math.rewards import Reward, load_reward
from grpo_math.run_log import Diagnosis, History, Progress, StopOnInterrupt, Tell, trackers, write_config
from grpo_math.shipped import find
from grpo_math.trainer import MathGRPOTrainer


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
    prompts_per_step: int = field(
        default=0,
        metadata={
            "help": "Prompts of an optimizer step, over all processes. The rows at a time and the accumulation follow "
            "from it; per_device_train_batch_size is then the most rows at a time. 0: TRL's fields say it all."
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
        for name in ("eval_n", "heldout_every", "heldout_n"):
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


SETTINGS: list[Any] = [TrainArguments, MathGRPOConfig, ModelConfig]


class Parser(TrlParser):
    """TRL's parser, fed with settings that recipe.py has read and checked one by one; what is refused is one line."""

    def __init__(self) -> None:
        super().__init__(SETTINGS, prog="grpo_math.train", allow_abbrev=False)
        self.set_defaults(logging_steps=1)  # a line of the history for each step; TRL's own default is 10
        self.given: set[str] = set()  # the settings that the recipe or the command line names

    def error(self, message: str) -> Any:
        raise UserError(f"{message}: mend this setting")

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
            raise UserError(f"{' '.join(str(error).split())}: mend this setting") from None
        if train_args.curriculum != "none":
            if "shuffle_dataset" in self.given and config.shuffle_dataset:
                why = f"contradicts curriculum={train_args.curriculum}"
                raise ConfigError("shuffle_dataset", True, why, "leave one of them out")
            config.shuffle_dataset = False
        return train_args, config, model_args


def main(argv: list[str] | None = None) -> int:
    """Parse, train, and turn a user's error into one line and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if name := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):  # accelerate looks in the current folder alone
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(find(name))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers' own renamings
            finished = train(*Parser().parse(argv), argv)
    except UserError as error:
        if int(os.environ.get("RANK", 0)) == 0 or isinstance(error, OutOfMemory):
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before training, or a second one
        if int(os.environ.get("RANK", 0)) == 0:
            print("interrupted", file=sys.stderr)
        return 130
    return 0 if finished else 130


def train(train_args: TrainArguments, config: MathGRPOConfig, model_args: ModelConfig, argv: list[str]) -> bool:
    """One run, from problems to report. False if it was interrupted, with a checkpoint to go on from."""
    run_dir = Path(str(config.output_dir))
    if config.hub_token:  # transformers would write it into checkpoints, with the rest of its arguments
        os.environ["HF_TOKEN"], config.hub_token = config.hub_token, None
    check(train_args, config, run_dir)
    if train_args.needs_pass_rates:
        measured_how = _measured_how(train_args, config, model_args)
        rates_file = Path(train_args.difficulty_file or difficulty.default_file(run_dir, measured_how))
        difficulty.read(rates_file, measured_how)  # refuse a file of another kind before weights are loaded
    read = recipe.read(argv)
    setup = Setup(read.values, read.given, config.world_size)
    ask(setup, CHECKS)
    rewards = [load_reward(name) for name in train_args.rewards]
    rows, held_out = setup.rows, setup.held_out
    setup.tokenizer = load_tokenizer(model_path(model_args.model_name_or_path), model_args.model_revision)
    ask(setup, WITH_TOKENIZER)
    trainer = trainer_of(config, model_args, setup, rewards)
    history, stop = History(run_dir), StopOnInterrupt()
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    settings = {**asdict(train_args), **asdict(model_args), **config.to_dict()}
    tell = trackers(trainer)
    for callback in (history, Progress(), stop, Diagnosis(history, settings, tell=tell)):
        trainer.add_callback(callback)
    main_process = trainer.accelerator.is_main_process
    if main_process:
        kind = config.device.type
        print(_batch_of(config).line({"cuda": "GPU", "cpu": "CPU process"}.get(kind, f"{kind} process")), flush=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        state = trainer.accelerator.state
        write_config(
            run_dir / "config.yaml", settings, ["grpo_math.train", *argv], state.distributed_type, state.num_processes
        )

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
    try:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}{_advice(settings, config.world_size)}") from None
    if stop.interrupted:
        if main_process:
            print(
                f"Interrupted after step {trainer.state.global_step} of {trainer.state.max_steps}; the run goes on "
                "with the same command and --resume_from_checkpoint true.",
                file=sys.stderr,
            )
        trainer.accelerator.wait_for_everyone()  # torch's agent ends the others with the first
        return False
    target = run_dir / ("adapter" if model_args.use_peft else "model")
    trainer.save_model(str(target))
    if train_args.eval_n:
        results = score(held_out[: train_args.eval_n], True)
        if main_process:
            write_json(after, {**results, "adapter": str(target) if model_args.use_peft else None})
    if main_process:
        print_verdict(run_dir, target)
    return True


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
        return MathGRPOTrainer(
            model=path,
            reward_funcs=rewards,
            args=config,
            train_dataset=to_dataset(setup.rows),
            processing_class=setup.tokenizer,
            peft_config=get_peft_config(model_args),
            quantization_config=get_quantization_config(model_args),
        )


def check(train_args: TrainArguments, config: MathGRPOConfig, run_dir: Path) -> None:
    """What cannot work, before data and weights are read."""
    if config.trust_remote_code:
        raise ConfigError("trust_remote_code", True, "would run code of a model repository", "leave it off")
    if config.eval_strategy != "no":
        raise ConfigError(
            "eval_strategy", getattr(config.eval_strategy, "value", "?"), "evaluates nothing here", "use heldout_every"
        )
    needs_whole = [name for name in ("eval_n", "heldout_every", "difficulty_band") if getattr(train_args, name)]
    needs_whole += ["curriculum"] if train_args.curriculum != "none" else []
    sharded = config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage >= 3
    sharded = sharded or config.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if needs_whole and sharded:
        name = needs_whole[0]
        why = "needs the whole model on each process"
        raise ConfigError(name, getattr(train_args, name), why, "leave it out, and evaluate after the run")
    if str(config.resume_from_checkpoint).lower() == "true":
        config.resume_from_checkpoint = get_last_checkpoint(str(run_dir)) if run_dir.is_dir() else None
        if config.resume_from_checkpoint is None:
            raise ConfigError("resume_from_checkpoint", True, f"finds no checkpoint in {run_dir}", "leave it out")
    for name in ("load_best_model_at_end", "save_strategy"):
        value = getattr(getattr(config, name), "value", getattr(config, name))
        if value in (True, "best"):
            raise ConfigError(name, value, "needs transformers' evaluations, and there are none", "leave it out")
    if config.remove_unused_columns:
        why = "would take the gold answers away from the rewards"
        raise ConfigError("remove_unused_columns", True, why, "leave it out")
    _check_generation(config)
    try:
        MathGRPOTrainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        name = "optim_args" if config.optim_args else "optim"
        value = config.optim_args or getattr(config.optim, "value", config.optim)
        raise ConfigError(name, value, f"cannot be used ({error})", "leave it out, or use adamw_torch") from None
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    extra: Any = config.lr_scheduler_kwargs
    try:
        get_scheduler(config.lr_scheduler_type, optimizer, config.get_warmup_steps(100), 100, extra)
    except (TypeError, ValueError) as error:
        name = getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)
        reason = f"does not suit lr_scheduler_type={name} ({error})"
        raise ConfigError("lr_scheduler_kwargs", extra, reason, "see that scheduler's own settings") from None


def _check_generation(config: MathGRPOConfig) -> None:
    """Names and numbers of ``generation_kwargs``, which transformers would pass over or find in the first rollout."""
    stated: Any = config.generation_kwargs or {}
    for name, value in stated.items():
        if not config.use_vllm and not hasattr(GenerationConfig(), name):
            raise ConfigError("generation_kwargs", name, "is no setting of transformers' generate", "leave it out")
        if name in recipe.RANGES:
            recipe.check(name, value)
    if not config.use_vllm:
        try:
            GenerationConfig(**{"cache_implementation": config.cache_implementation, **stated}).validate()
        except (ValueError, TypeError) as error:
            reason = f"is refused ({' '.join(str(error).split())})"
            raise ConfigError("generation_kwargs", stated, reason, "see transformers' GenerationConfig") from None


def ask(setup: Setup, checks: Collection[str]) -> None:
    """What `grpo-math doctor` finds: warnings are printed once; an error ends the run, on every process alike."""
    refused: list[str | None] = [None]
    if PartialState().is_main_process:
        for finding in preflight(setup, checks):
            if finding.level == "error":
                refused = [str(refusal(finding))]
                break
            if finding.level == "warning":
                print(finding.line(), file=sys.stderr)
    broadcast_object_list(refused)
    if refused[0]:
        raise UserError(refused[0])


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


def print_verdict(run_dir: Path, target: Path) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
