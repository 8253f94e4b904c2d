"""What training leaves on disk where a user's own script calls ``trainer.train()``: the run directory of the program.

config.yaml, history.jsonl, completions/ and, at the end, adapter/ and finished.json are written into ``output_dir``, so
that `grpo-math report`, `push`, `ask` and `evaluate --run` take it as they take any other run. A transformers callback
that `MathGRPOTrainer` carries from the start; ``trainer.remove_callback(RunFiles)`` leaves all of it out.

Does not evaluate: ``evaluate(trainer, problems)`` before and after writes before.json and after.json.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from grpo_math.run import checkpoints, metrics
from grpo_math.run.disk import naming
from grpo_math.run.files import write_json
from grpo_math.run.log import History, write_config

OWN_DATA = "data of a script"
FORMATS = ("json", "csv", "parquet", "text", "arrow", "generator", "pandas")  # names of files' formats, not of data


class RunFiles(History):
    """The files of a run, written by its main process; an adapter by all processes together."""

    def __init__(self, trainer: Any) -> None:
        self.run_dir, self.trainer = Path(str(trainer.args.output_dir)), trainer
        self.evaluated = set[str]()  # of before.json and after.json, what this process has written
        super().__init__(self.run_dir)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if not state.is_world_process_zero:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        earlier = (self.run_dir / "config.yaml").exists() or (self.run_dir / checkpoints.FINISHED).exists()
        stale = [checkpoints.FINISHED, "after.json"]
        # A new run in a used folder: the report must not mix the two.
        if state.global_step == 0 and earlier:  # what that run has left in this folder
            stale += ["before.json"] if "before.json" not in self.evaluated else []
            shutil.rmtree(self.run_dir / "completions", ignore_errors=True)
        for name in stale:
            (self.run_dir / name).unlink(missing_ok=True)
        if self.trainer.log_completions:
            (self.run_dir / "completions").mkdir(exist_ok=True)  # TRL's, which it has made once
        # The same file that the program writes, so that the report treats both alike.
        launched = self.trainer.accelerator.state
        command = ["python", *sys.argv]
        launch = (str(launched.distributed_type), launched.num_processes)
        write_config(self.run_dir / "config.yaml", settings_of(self.trainer), command, *launch)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs, **kwargs)
        written = self.trainer.log_completions or self.trainer._is_vlm
        if state.is_world_process_zero and logs and metrics.LOSS in logs and not written:
            self._write_completions(state.global_step)

    def _write_completions(self, step: int) -> None:
        """The completions of the last rollout in the file and the columns of TRL's ``log_completions``."""
        import pandas

        logs = self.trainer._logs
        rows = len(logs["prompt"])
        columns = {metrics.STEP: [step] * rows, **{name: list(logs[name]) for name in ("prompt", "completion")}}
        extra = {name: list(values) for name, values in {**logs["rewards"], **logs["extra"]}.items()}
        columns |= {name: values for name, values in extra.items() if len(values) == rows}
        path = self.run_dir / "completions" / f"completions_{step:05d}.parquet"
        with naming(path):
            path.parent.mkdir(exist_ok=True)
            pandas.DataFrame({**columns, "advantage": list(logs["advantages"])}).to_parquet(path)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        saves = hasattr(self.trainer.accelerator.unwrap_model(self.trainer.model), "peft_config")
        if saves and str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
            target = self.run_dir / "adapter"
            with checkpoints.sealed(target, self.trainer.accelerator):
                self.trainer.save_model(str(target))
        if state.is_world_process_zero:
            write_json(self.run_dir / checkpoints.FINISHED, {"step": state.global_step})
            print(f"run      {self.run_dir}: grpo-math report {self.run_dir}", file=sys.stderr)


def settings_of(trainer: Any) -> dict[str, Any]:
    """The settings of a trainer under the names that recipes have for them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    name = str(getattr(model.config, "_name_or_path", "") or "in memory")
    options: dict[str, Any] = trainer.args.model_init_kwargs or {}
    settings = {
        **trainer.settings.to_dict(),
        "model_name_or_path": name,
        "model_revision": str(options.get("revision") or "main"),
        "load_in_4bit": bool(getattr(model, "is_loaded_in_4bit", False)),
        "load_in_8bit": bool(getattr(model, "is_loaded_in_8bit", False)),
        "rewards": list(trainer.reward_func_names),
        **_data_of(trainer.train_dataset),
    }
    if adapters := getattr(model, "peft_config", None):
        lora = next(iter(adapters.values()))
        names = ("r", "lora_alpha", "lora_dropout", "target_modules")
        adapter = {name if name.startswith("lora_") else f"lora_{name}": getattr(lora, name, None) for name in names}
        targets = adapter["lora_target_modules"]
        adapter["lora_target_modules"] = sorted(targets) if isinstance(targets, set | list) else targets
        settings |= {"use_peft": True, **adapter}
    return settings


def _data_of(data: Any) -> dict[str, Any]:
    """The name of the data, where `datasets` knows one, and the template, where the rows name one."""
    info = getattr(data, "info", None)
    name = getattr(info, "dataset_name", None)
    settings: dict[str, Any] = {"dataset": OWN_DATA if not name or name in FORMATS else name}
    if split := getattr(data, "split", None):
        settings["dataset_split"] = str(split)
    first: Any = next(iter(data), {}) if hasattr(data, "__len__") else {}
    if isinstance(template := first.get("answer_format"), str):
        settings["prompt_template"] = template
    return settings
