"""Write the files of a run directory: `RunWriter` for a recipe, `RunFiles` when a script calls ``trainer.train()``.

``output_dir`` gets config.yaml, history.jsonl, completions/ and, at the end, adapter/ and finished.json, so that
`grpo-math report`, `push`, `ask` and `evaluate --run` accept it like the run of a recipe. `MathGRPOTrainer` adds this
transformers callback itself; ``trainer.remove_callback(RunFiles)`` removes it.

Does not evaluate: ``evaluate(trainer, problems)`` before and after writes before.json and after.json.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers.trainer
from tqdm import tqdm
from transformers.trainer_utils import SaveStrategy

from grpo_math.problems.prompts import AS_IS, TEMPLATES
from grpo_math.rewards.functions import REWARDS
from grpo_math.rewards.inputs import column_names, row_format
from grpo_math.run import checkpoints, earlier, lock
from grpo_math.run.files import write_json
from grpo_math.run.log import History, write_config
from grpo_math.settings.fields import fields
from grpo_math.system.collectives import broadcast_from_main
from grpo_math.system.replaced import replaced

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from grpo_math.trainer.trl_trainer import TrlTrainer

SCRIPT_DATA = "data of a script"
# `datasets` calls data from files or memory by these formats.
FORMATS = ("json", "csv", "parquet", "text", "arrow", "generator", "pandas")


class RunWriter(History):
    """The writer of a run directory: settings, history, weights, and finished.json at the end.

    Each file is written by the main process; weights by all processes together.
    """

    def __init__(self, trainer: "TrlTrainer") -> None:
        self.run_dir = Path(str(trainer.args.output_dir))
        self.trainer = trainer
        super().__init__(self.run_dir)

    def write_settings(self, settings: dict[str, Any], argv: list[str]) -> None:
        state = self.trainer.accelerator.state
        write_config(self.run_dir / "config.yaml", settings, argv, state.distributed_type, state.num_processes)

    def save_weights(self, target: Path) -> None:
        """Save the weights that are trained. All ranks call this: under ZeRO-3 and FSDP each has a part of them."""
        with checkpoints.sealed(target, self.trainer.accelerator):
            self.trainer.save_model(str(target))
            # peft's model card is an empty form, and names the base by its folder in a cache.
            (target / "README.md").unlink(missing_ok=True)

    def write_finished(self, **more: Any) -> None:
        step = self.earlier_steps + self.trainer.state.global_step
        write_json(self.run_dir / checkpoints.FINISHED, {"step": step, **more})


class RunFiles(RunWriter):
    """The writer for a script, which has no recipe to record and may train in a folder with the user's files."""

    def __init__(self, trainer: "TrlTrainer") -> None:
        self.written = set[Path]()  # the evaluations that this process has written
        self.earlier: Path | None = None  # the folder to which this run has moved files of an earlier one
        self.is_first = True  # until this trainer trains
        self.evaluations: list[tuple[int, dict[str, Any]]] = []  # before this trainer trains
        super().__init__(trainer)

    def archive(self, paths: Iterable[Path]) -> None:
        """Move files of an earlier run aside, except what this process has written."""
        self.earlier = earlier.archive(self.run_dir, (path for path in paths if path not in self.written), self.earlier)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        config, finished = self.run_dir / "config.yaml", self.run_dir / checkpoints.FINISHED
        self.archive(earlier.in_the_way(self.run_dir, earlier.TRAINING))
        if state.global_step == 0 and not self.is_first:
            self.earlier_steps = self.last_step()
        elif state.global_step == 0 and (config.exists() or finished.exists()):
            # A new run in a used folder: the report must not mix the two runs.
            self.archive(earlier.run_files(self.run_dir))
        super().on_train_begin(args, state, control, **kwargs)
        # finished.json and after.json belong to the last weights, which change now.
        if state.global_step < state.max_steps:
            finished.unlink(missing_ok=True)
            self.written.discard(self.run_dir / "after.json")
            self.archive(earlier.run_files(self.run_dir, earlier.LAST_RESULTS))
        self.earlier = None
        self.is_first = False
        if state.global_step:
            print(f"resuming {self.run_dir} from step {state.global_step} of {state.max_steps}", file=sys.stderr)
        for step, values in self.evaluations:
            self.append(step, values)
        # TRL creates this folder only in its constructor. `MathGRPOTrainer.log` lets TRL write into it.
        (self.run_dir / "completions").mkdir(exist_ok=True)
        self.write_settings(settings_as_recipe(self.trainer), ["python", *sys.argv])

    def append(self, step: int, values: dict[str, Any]) -> None:
        # Until training begins, the history may be that of an earlier run.
        if self.is_first:
            self.evaluations.append((step, values))
        else:
            super().append(step, values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        has_adapter = hasattr(self.trainer.accelerator.unwrap_model(self.trainer.model), "peft_config")
        if has_adapter and args.save_strategy != SaveStrategy.NO:
            target = self.run_dir / "adapter"
            # A script may load its own adapter from this folder.
            if not broadcast_from_main(lambda: earlier.in_the_way(self.run_dir, {"adapter": checkpoints.FILES})):
                self.save_weights(target)
            elif state.is_world_process_zero:
                print(f"kept     {target}, which no run has written: the adapter is not saved there", file=sys.stderr)
        if state.is_world_process_zero:
            self.write_finished()
            # `print` would write into the line of the progress bar.
            tqdm.write(f"run      {self.run_dir}: grpo-math report {self.run_dir}", file=sys.stderr)


def writes_run_files(trainer: "GRPOTrainer") -> bool:
    """Return True if this trainer of a script writes a run directory: the script may remove the callback."""
    return any(isinstance(callback, RunFiles) for callback in trainer.callback_handler.callbacks)


@contextmanager
def without_run_files(trainer: "GRPOTrainer") -> Iterator[None]:
    """Keep the files of a run out of what transformers pushes to the Hub inside this context.

    A script asks to publish its model. `grpo-math push` publishes a run.
    """
    if not writes_run_files(trainer):
        yield
        return
    # transformers 5.17 has only the function, and no `hf_api`.
    is_function = hasattr(transformers.trainer, "upload_folder")
    hub: Any = transformers.trainer if is_function else copy(transformers.trainer.hf_api())
    upload = hub.upload_folder

    def upload_folder(*args: Any, ignore_patterns: Any = (), **settings: Any) -> Any:
        run_dir = Path(str(trainer.args.output_dir))
        # A pattern that ends with a slash is a folder.
        run_files = [f"{path.relative_to(run_dir)}{'/' * path.is_dir()}" for path in earlier.run_files(run_dir)]
        # With log_completions TRL writes the table, too: then the script publishes it.
        run_files = [name for name in run_files if not (trainer.log_completions and name.startswith("completions/"))]
        hidden = [".*.unfinished", lock.NAME, f"{earlier.EARLIER}/"]
        return upload(*args, ignore_patterns=[*ignore_patterns, *run_files, *hidden], **settings)

    with replaced(hub, upload_folder=upload_folder), replaced(transformers.trainer, hf_api=lambda: hub):
        yield


def settings_as_recipe(trainer: "TrlTrainer") -> dict[str, Any]:
    """Return the settings of a trainer under their names in a recipe."""
    from grpo_math.trainer.config import MathGRPOConfig

    model = trainer.accelerator.unwrap_model(trainer.model)
    name = str(getattr(model.config, "_name_or_path", "") or "in memory")
    options: dict[str, Any] = trainer.args.model_init_kwargs or {}
    # A subclass of the configuration may have fields under names that only a recipe has.
    others = fields().keys() - MathGRPOConfig.__dataclass_fields__.keys()
    settings = {
        **{name: value for name, value in trainer.grpo_math.settings.to_dict().items() if name not in others},
        "model_name_or_path": name,
        "model_revision": str(options.get("revision") or "main"),
        "load_in_4bit": bool(getattr(model, "is_loaded_in_4bit", False)),
        "load_in_8bit": bool(getattr(model, "is_loaded_in_8bit", False)),
        "rewards": _rewards_as_in_a_recipe(trainer),
        **_data_settings(trainer.train_dataset),
    }
    if adapters := getattr(model, "peft_config", None):
        adapter = next(iter(adapters.values()))
        targets = getattr(adapter, "target_modules", None)
        settings |= {
            "use_peft": True,
            "lora_r": getattr(adapter, "r", None),
            "lora_alpha": getattr(adapter, "lora_alpha", None),
            "lora_dropout": getattr(adapter, "lora_dropout", None),
            "lora_target_modules": sorted(targets) if isinstance(targets, set | list) else targets,
        }
    return settings


def _rewards_as_in_a_recipe(trainer: "TrlTrainer") -> list[str]:
    """Return the shipped rewards by their names, functions as module:function, and models by their names."""
    return [
        name if REWARDS.get(name) is reward or not hasattr(reward, "__name__") else f"{reward.__module__}:{name}"
        for reward, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    ]


def _data_settings(data: Any) -> dict[str, Any]:
    """Return the name of the data, if `datasets` has one, and the template, if the rows name one."""
    name = getattr(getattr(data, "info", None), "dataset_name", None)
    settings: dict[str, Any] = {"dataset": SCRIPT_DATA if not name or name in FORMATS else name}
    if split := getattr(data, "split", None):
        settings["dataset_split"] = str(split)
    is_readable = hasattr(data, "__len__") and column_names(data) is not None
    first: Any = next(iter(data), {}) if is_readable else {}
    answer_format = row_format(first)
    # `load_problems` makes a template's prompts. A script may ask for the same format with its own prompts.
    is_made = answer_format in TEMPLATES and first.get("prompt") == TEMPLATES[answer_format](str(first.get("problem")))
    return settings | {"prompt_template": answer_format if is_made else AS_IS, "answer_format": answer_format}
