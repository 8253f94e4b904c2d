"""Checkpoints that a run can go on from as if it had never stopped: how they are written, which one, what they hold.

A checkpoint is written to RUN/.writing, gets a checksum of each of its files, and is renamed to RUN/checkpoint-N: what
bears such a name was whole on the disk. Beyond what transformers saves (weights, optimizer, schedule, generators) each
rank keeps in ``state_RANK.pt`` what TRL has in memory between two optimizer steps: the rollout that is being trained
on, where it stands in it, and what the next line of the log is a mean of. A killed run, started again, then ends with
the weights, history and completions of one that was not: bitwise on a CPU in float32.

Does not save or load weights: transformers does, and reference.py for the reference of the KL term. Does not know
whether the code of a reward function, or what a Hub id resolves to, has changed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from hashlib import file_digest
from pathlib import Path
from typing import Any

import yaml

from grpo_math.errors import ConfigError, UserError
from grpo_math.fingerprint import problem_hash
from grpo_math.redact import without_secrets

WRITING = ".writing"
SUMS = "checksums.json"
STATE = "state_{}.pt"
PROBLEMS = "problems.txt"
FINISHED = "finished.json"
MODES = ("auto", "force")
# Settings that say where a run's output goes, how often it is saved and whom it talks to: not what is computed.
APART = {
    *("output_dir", "resume", "resume_from_checkpoint", "difficulty_file", "dataset_num_proc"),
    *("save_steps", "save_total_limit", "save_strategy", "disable_tqdm", "log_level", "log_level_replica"),
    *("report_to", "run_name", "project", "trackio_space_id", "num_completions_to_print", "wandb_log_unique_prompts"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision", "hub_always_push"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
    *("watchdog_minutes", "ddp_timeout"),
}

# Settings that say which weights are trained and what the optimizer keeps of them: not even force can change these.
KEPT = (
    *("use_peft", "lora_r", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "use_dora"),
    *("optim", "num_processes", "distributed_type"),
)


# Writing


@contextmanager
def written_aside(target: Path, accelerator: Any) -> Iterator[Path]:
    """A folder to fill, on every rank, that is renamed to ``target`` once all of it is on the disk.

    If anything is raised, or the process is killed, there is no ``target``. One that is there already stays.
    """
    aside = target.parent / WRITING / target.name
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
    accelerator.wait_for_everyone()
    aside.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _rename(aside, target)
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and aside.exists():  # of a machine that does not share the disk
            _rename(aside, target)
        accelerator.wait_for_everyone()
        with suppress(OSError):  # a second one is still written there
            aside.parent.rmdir()
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _rename(aside: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(aside)
        return
    seal(aside)
    aside.rename(target)
    _flush(target.parent)


def seal(folder: Path) -> None:
    """Write the checksums of all files of a folder, and wait until the disk has them."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: _flush(folder / name), names))
        sums = dict(zip(names, pool.map(lambda name: _sum(folder / name), names), strict=True))
    replace_text(folder / SUMS, json.dumps(sums, indent=1) + "\n")


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint: a file that is missing or has changed. None: it is as it was written.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "state_0.pt").write_text("3")
    >>> damage(folder)
    'checksums.json is missing'
    >>> seal(folder), damage(folder)
    (None, None)
    >>> _ = (folder / "state_0.pt").write_text("4")
    >>> damage(folder)
    'state_0.pt is not what was written'
    """
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        names = list(sums)
    except FileNotFoundError:
        return f"{SUMS} is missing"
    except (OSError, ValueError):
        return f"{SUMS} cannot be read"
    if missing := [name for name in names if not (folder / name).is_file()]:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor() as pool:
        for name, now in zip(names, pool.map(lambda name: _sum(folder / name), names), strict=True):
            if now != sums[name]:
                return f"{name} is not what was written"
    return None if STATE.format(0) in names else "it holds weights alone (save_only_model)"


def replace_text(path: Path, text: str) -> None:
    """Write beside the file and rename: a kill at any moment leaves the old one or the new one."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(text, encoding="utf-8")
    _flush(scratch)
    scratch.replace(path)


def keep_lines(path: Path, keep: Any) -> None:
    """Drop the lines of a JSONL file that ``keep`` says no to, and a last one that was cut off in the middle.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "history.jsonl")
    >>> _ = path.write_text('{"step": 1}\\n{"step": 2}\\n{"st')
    >>> keep_lines(path, lambda line: line["step"] < 2)
    >>> path.read_text()
    '{"step": 1}\\n'
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if keep(json.loads(line)):
                kept.append(line + "\n")
        except ValueError:
            continue
    replace_text(path, "".join(kept))


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Which checkpoint


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder), the newest first, by number: clocks jump.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> goes_on(run_dir)
    'the same command starts it anew'
    >>> for name in ("checkpoint-9", "checkpoint-10", "old-checkpoint-11"):
    ...     (run_dir / name).mkdir()
    >>> [step for step, _ in checkpoints(run_dir)], goes_on(run_dir)
    ([10, 9], 'the same command goes on from checkpoint-10')
    """
    found = [(path.name.partition("-")[2], path) for path in run_dir.glob("checkpoint-*") if path.is_dir()]
    return sorted(((int(step), path) for step, path in found if step.isdigit()), reverse=True)


def goes_on(run_dir: Path) -> str:
    """How a run that has ended too soon goes on, as part of a line."""
    there = checkpoints(run_dir)
    return f"the same command goes on from {there[0][1].name}" if there else "the same command starts it anew"


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a line about each newer one that is not.

    Raises `UserError` where there are checkpoints and all are damaged.
    """
    lines: list[str] = []
    for _, folder in checkpoints(run_dir):
        if (reason := damage(folder)) is None:
            return folder, lines
        lines.append(f"{folder} is damaged ({reason})")
    if lines:
        raise UserError(f"{'; '.join(lines)}; there is no whole one to go on from: name a new output_dir")
    return None, []


def step_of(folder: Path) -> int:
    """The step after which a checkpoint of whatever name was written. `ConfigError` where it is none."""
    try:
        return int(json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        reason = "holds no trainer_state.json that says its step"
        raise ConfigError("resume_from_checkpoint", str(folder), reason, "give a checkpoint's folder") from None


def set_aside_after(run_dir: Path, step: int) -> None:
    """Checkpoints after this step, which the run will come to again, are renamed to old-checkpoint-N."""
    for number, folder in checkpoints(run_dir):
        if number > step:
            old = folder.with_name(f"old-{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)


# Whether the run is the same


def source(run_dir: Path, asked: Any) -> tuple[Path | None, Path]:
    """(the checkpoint that ``resume_from_checkpoint`` names, the folder of the run that is gone on with).

    One of another folder is where a run starts: once it has checkpoints of its own, it goes on from those.
    """
    named = Path(str(asked)) if asked and str(asked).lower() not in ("true", "false") else None
    # Not named.resolve(): a checkpoint may be a link to another disk.
    if named is None or (named.parent.resolve() != run_dir.resolve() and checkpoints(run_dir)):
        return None, run_dir
    return named, named.parent


def stated(settings: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """The settings that the recipe and the command line state, as config.yaml keeps them.

    >>> stated({"seed": 1, "beta": 0.0, "hub_token": "hf_x"}, {"seed", "hub_token"})
    {'seed': 1}
    """
    return json.loads(json.dumps(without_secrets({name: settings[name] for name in sorted(given)}), default=str))


def config_of(run_dir: Path) -> dict[str, Any] | None:
    """What config.yaml of a run directory says; None where there is no run."""
    there = [name for name in ("config.yaml", "history.jsonl") if (run_dir / name).exists()]
    if not there and not checkpoints(run_dir):
        return None
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        config = None
    return config if isinstance(config, dict) else {}


def changed(config: Mapping[str, Any], settings: Mapping[str, Any], given: set[str], defaults: Any) -> list[str]:
    """``field: before -> now`` of each setting that the run in config.yaml had otherwise. A setting that is not stated
    has its default.

    >>> config = {"stated": {"seed": 1, "save_steps": 5, "beta": 0.0}}
    >>> changed(config, {"seed": 2, "top_p": 0.9}, {"seed", "top_p"}, {"seed": 42, "top_p": 1.0, "beta": 0.0})
    ['seed: 1 -> 2', 'top_p: 1.0 -> 0.9']
    """
    before, now = config.get("stated", {}), stated(settings, given)
    lines = []
    for name in sorted((before.keys() | now.keys()) - APART):
        default = json.loads(json.dumps(defaults.get(name), default=str))
        old, new = before.get(name, default), now.get(name, default)
        if old != new:
            lines.append(f"{name}: {old} -> {new}")
    return lines


def write_problems(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The hash of each problem, one a line, for `changed_problems`."""
    replace_text(run_dir / PROBLEMS, "".join(problem_hash(row) + "\n" for row in rows))


def changed_problems(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line if the problems are not those that the run was started with."""
    try:
        before = (run_dir / PROBLEMS).read_text(encoding="utf-8").split()
    except OSError:
        return []
    now = [problem_hash(row) for row in rows]
    if before == now:
        return []
    if len(before) != len(now):
        return [f"the dataset: {len(before)} -> {len(now)} problems"]
    other = [number for number, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    return [f"the dataset: problem {other[0] + 1} of {len(now)} ({rows[other[0]]['id']}){more} is another one"]


def refuse_changed(run_dir: Path, lines: Sequence[str], mode: str) -> None:
    """Raise `ConfigError` if the run that a folder holds was another one, unless ``resume`` is force.

    Force does not help where a setting of `KEPT` has changed: the checkpoints are of other weights.
    """
    if kept := [line for line in lines if line.partition(":")[0] in KEPT]:
        raise ConfigError(
            "output_dir",
            str(run_dir),
            f"holds a run whose checkpoints do not fit these settings ({'; '.join(kept)})",
            "name a new folder, or give the settings that it had",
        )
    if lines and mode != "force":
        raise ConfigError(
            "output_dir",
            str(run_dir),
            f"holds a run with other settings ({'; '.join(lines)})",
            "name a new folder, give the settings that it had, or add --resume force to go on with these",
        )


# What a rank has in memory between two optimizer steps

# Attributes of TRL's and transformers' trainers, and of ours.
HELD = (
    *("_step", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_last_world_entropy"),
    *("_rollout_tokens", "_tokens_per_step"),
)
LISTS = ("prompt", "completion", "advantages")  # of the table of completions
DICTS = ("rewards", "extra")
# What a rollout that is half trained on was cut for: with others (resume=force) it is drawn again.
CUT_FOR = (
    *("gradient_accumulation_steps", "steps_per_generation", "num_iterations", "per_device_train_batch_size"),
    *("num_generations", "beta"),
)


def state_of(trainer: Any) -> dict[str, Any]:
    """What `go_on` needs, of plain types and tensors: it is read with ``weights_only=True``."""
    args, logs = trainer.args, trainer._logs
    in_rollout = trainer._step % (args.steps_per_generation * trainer.num_iterations) != 0
    table: dict[str, Any] = {name: list(logs[name]) for name in LISTS}
    table |= {name: {key: list(values) for key, values in logs[name].items()} for name in DICTS}
    return {
        **{name: deepcopy(getattr(trainer, name)) for name in HELD},  # what comes next is added to them in place
        "rollout": trainer._buffered_inputs if in_rollout else None,
        "cut_for": [getattr(args, name) for name in CUT_FOR],
        "nonfinite": trainer._nonfinite.in_a_row,
        "budget": trainer._halved_to,
        "reserve": trainer._reserve.position if trainer._reserve is not None else 0,
        "sampled": getattr(getattr(trainer, "vllm_generation", None), "rollouts", 0),
        "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        "table": json.dumps(table, default=_plain) if trainer.log_completions else None,
    }


def _plain(value: Any) -> Any:
    """A number of numpy or torch, which a reward function may have logged, as Python's; anything else as text."""
    return value.item() if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0 else str(value)


def go_on(trainer: Any, state: Mapping[str, Any], position: int = 0) -> None:
    """Put back what `state_of` has read. Called when transformers has set its own attributes to zero.

    ``position``: the training steps of this epoch that are done, which is where the data are.
    """
    for name in HELD:
        setattr(trainer, name, state[name])
    trainer._buffered_inputs = state["rollout"]
    if state["cut_for"] != [getattr(trainer.args, name) for name in CUT_FOR]:
        trainer._buffered_inputs, trainer._step = None, position
    trainer._nonfinite.in_a_row = state["nonfinite"]
    if state["budget"] is not None:
        trainer._halved_to = trainer._math["update_token_budget"] = state["budget"]
    if trainer._reserve is not None:
        trainer._reserve.position = state["reserve"]
    if hasattr(getattr(trainer, "vllm_generation", None), "rollouts"):
        trainer.vllm_generation.rollouts = state["sampled"]
    trainer._metrics["train"].clear()
    trainer._metrics["train"].update(state["metrics"])
    if state["table"]:
        table, logs = json.loads(state["table"]), trainer._logs
        for name in LISTS:
            logs[name].clear()
            logs[name].extend(table[name])
        for name in DICTS:
            logs[name].clear()
            for key, values in table[name].items():
                logs[name][key].extend(values)


def moment(trainer: Any) -> dict[str, Any]:
    """`state_of`, and what a checkpoint keeps elsewhere: for `put_back`, once a step that had begun has failed."""
    import random

    import numpy
    import torch

    return {
        **state_of(trainer),
        "tokens": trainer.state.num_input_tokens_seen,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def put_back(trainer: Any, then: Mapping[str, Any]) -> None:
    """All but the weights as they were at this `moment`."""
    import random

    import numpy
    import torch

    go_on(trainer, then)
    trainer.state.num_input_tokens_seen = then["tokens"]
    random.setstate(then["python"])
    numpy.random.set_state(then["numpy"])
    torch.set_rng_state(then["torch"])
    if then["cuda"] is not None:
        torch.cuda.set_rng_state(then["cuda"])
