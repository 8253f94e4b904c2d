"""Checks that a resumed run is the same run: its settings, its problems, its number of processes.

Does not notice a change in the code of a reward function or in what a Hub id resolves to.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.redact import without_secrets
from grpo_math.run.checkpoints import checkpoints
from grpo_math.run.files import replace_text
from grpo_math.system.addresses import is_url
from grpo_math.yaml_files import read_yaml

PROBLEMS = "problems.txt"
AS_JSON = json.JSONEncoder(ensure_ascii=False).encode
# Settings of output, saving and services. They do not change what is computed.
MAY_CHANGE = {
    *("output_dir", "resume", "resume_from_checkpoint", "dataset_num_proc"),
    *("save_steps", "save_total_limit", "save_strategy", "disable_tqdm", "log_level", "log_level_replica"),
    *("report_to", "run_name", "project", "trackio_space_id", "num_completions_to_print", "wandb_log_unique_prompts"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_revision", "hub_always_push"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
    *("watchdog_minutes", "ddp_timeout", "dry_run"),
}

# Settings of the trained weights and the optimizer's state. Even ``resume: force`` cannot change them.
MUST_MATCH = (
    *("use_peft", "lora_r", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "use_dora"),
    *("optim", "distributed_type"),
)


def source(run_dir: Path, asked: Any) -> tuple[Path | None, Path]:
    """Return the checkpoint that ``resume_from_checkpoint`` names, or None, and the folder of the run that is resumed.

    A named checkpoint is where a run starts. A run that has started there, or has checkpoints and was to start from
    another folder, resumes from its newest checkpoint: each restart would otherwise train the same steps again.

    Raises `ConfigError` if the folder contains a run without checkpoints that did not start there.
    """
    named = Path(str(asked)) if asked and str(asked).lower() not in ("true", "false") else None
    if named is None:
        return None, run_dir
    # Not named.resolve(): a checkpoint may be a link to another disk.
    own = named.parent.resolve() == run_dir.resolve()
    config = run_config(run_dir)
    started_there = ((config or {}).get("stated") or {}).get("resume_from_checkpoint") == str(asked)
    if checkpoints(run_dir) and (not own or started_there):
        return None, run_dir
    if config is not None and not own and not started_there:
        raise ConfigError("output_dir", str(run_dir), "contains another run", "name a new folder")
    return named, named.parent


def explicit_settings(settings: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """Return the settings that the recipe and the command line state, as config.yaml keeps them.

    >>> explicit_settings({"seed": 1, "beta": 0.0, "hub_token": "hf_x"}, {"seed", "hub_token"})
    {'seed': 1}
    """
    return json.loads(json.dumps(without_secrets({name: settings[name] for name in sorted(given)}), default=str))


def run_config(run_dir: Path) -> dict[str, Any] | None:
    """Return the config.yaml of a run directory, {} if it is missing; None if the folder contains no run."""
    config = run_dir / "config.yaml"
    if config.exists():
        return read_yaml(config) or {}
    return {} if (run_dir / "history.jsonl").exists() or checkpoints(run_dir) else None


def changed(config: Mapping[str, Any], settings: Mapping[str, Any], given: set[str], defaults: Any) -> list[str]:
    """Return ``field: before -> now`` for each setting that differs from config.yaml. A setting that is not stated has
    its default.

    >>> config = {"stated": {"seed": 1, "save_steps": 5, "beta": 0.0}}
    >>> changed(config, {"seed": 2, "top_p": 0.9}, {"seed", "top_p"}, {"seed": 42, "top_p": 1.0, "beta": 0.0})
    ['seed: 1 -> 2', 'top_p: 1.0 -> 0.9']
    """
    before = {str(name): value for name, value in config.get("stated", {}).items()}
    now = explicit_settings(settings, given)
    lines = []
    for name in sorted((before.keys() | now.keys()) - MAY_CHANGE):
        # In the form of config.yaml: a tuple among the defaults equals a list in a recipe.
        default = json.loads(json.dumps(defaults.get(name), default=str))
        old, new = before.get(name, default), now.get(name, default)
        # A teacher on a server may move, as a sampler may.
        if name == "reference_model" and is_url(str(old)) and is_url(str(new)):
            continue
        # A field of an earlier version that was off changed nothing.
        if old != new and (old or name in defaults):
            lines.append(f"{name}: {old} -> {new}")
    return lines


def problem_hashes(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the hash of each problem, one a line."""
    return "".join(f"{problem_hash(row)}\n" for row in rows)


def write_problems(run_dir: Path, hashes: str) -> None:
    """Write the `problem_hashes` of a run, for `changed_problems`."""
    replace_text(run_dir / PROBLEMS, hashes)


def changed_problems(run_dir: Path, now: str) -> list[str]:
    """Return one line if the problems, by their `problem_hashes`, are not those that the run was started with."""
    file = run_dir / PROBLEMS
    before = file.read_text(encoding="utf-8") if file.exists() else now
    counts = [len(hashes.split()) for hashes in (before, now)]
    return [] if before == now else ["the dataset: {} problems -> {} problems, not all the same".format(*counts)]


def refuse_changed(run_dir: Path, lines: Sequence[str], mode: str) -> None:
    """Raise `ConfigError` if the run in a folder differs in these ``lines``, unless ``resume`` is force.

    Force does not help if a setting of `MUST_MATCH` has changed: the checkpoints are of other weights.
    """
    if kept := [line for line in lines if line.partition(":")[0] in MUST_MATCH]:
        reason = f"holds a run whose checkpoints do not fit these settings ({'; '.join(kept)})"
        raise ConfigError("output_dir", str(run_dir), reason, "name a new folder, or give the settings that it had")
    if lines and mode != "force":
        remedy = "name a new folder, give the settings that it had, or add --resume force to go on with these"
        raise ConfigError("output_dir", str(run_dir), f"holds a run with other settings ({'; '.join(lines)})", remedy)


def problem_hash(row: Mapping[str, Any]) -> str:
    """Return the hash of a problem and its gold answer. Another id does not make it another problem."""
    return short_hash([row["problem"], row["answer"]])


def short_hash(content: Any) -> str:
    return sha256(AS_JSON(content).encode()).hexdigest()[:12]
