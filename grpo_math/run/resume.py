"""Decide where a run begins, and check that a resumed run is the same run: its settings and its problems.

Does not notice a change in the code of a reward function or in what a Hub id resolves to.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.redact import without_secrets
from grpo_math.run.checkpoints import FILES, checkpoints, damage, newest_whole, remove_unfinished, unfinished
from grpo_math.run.files import replace_text
from grpo_math.settings.fields import fields
from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.start_adapter import adapter_identity
from grpo_math.system.yaml_files import read_yaml

PROBLEMS = "problems.txt"
AS_JSON = json.JSONEncoder(ensure_ascii=False).encode


class Start(NamedTuple):
    """The start of a run, as `where_to_start` decides it for `grpo-math train` and for doctor."""

    named: Path | None  # the checkpoint that ``resume_from_checkpoint`` names, if the run begins there
    run_dir: Path  # the folder of the run that is continued
    config: dict[str, Any] | None  # its `run_config`

    def checkpoint(self) -> tuple[Path | None, list[str]]:
        """Return the checkpoint to resume, None for step 0, and a line about each newer one that is damaged.

        Raises `UserError` for a named checkpoint that is damaged, and if all are.
        """
        if self.named is None:
            return newest_whole(self.run_dir)
        # A checkpoint of another program has no list of its files to compare with.
        ours = unfinished(self.named) or (self.named / FILES).exists()
        if ours and (reason := damage(self.named)):
            reason = f"cannot be resumed ({reason})"
            raise ConfigError("resume_from_checkpoint", str(self.named), reason, "give another checkpoint")
        return self.named, []


def where_to_start(run_dir: Path, requested: Any) -> Start:
    """Decide where a run in ``run_dir`` begins, with this ``resume_from_checkpoint``. Changes nothing.

    A named checkpoint is where a run starts. A run that has started there, or has checkpoints and was to start from
    another folder, resumes from its newest checkpoint: each restart would otherwise train the same steps again.

    Raises `ConfigError` if the folder contains a run without checkpoints that did not start there.
    """
    config = run_config(run_dir)
    named = Path(str(requested)) if requested and str(requested).lower() not in ("true", "false") else None
    if named is None:
        return Start(None, run_dir, config)
    # Not named.resolve(): a checkpoint may be a link to another disk.
    is_here = named.parent.resolve() == run_dir.resolve()
    started_there = ((config or {}).get("stated") or {}).get("resume_from_checkpoint") == str(requested)
    if checkpoints(run_dir) and (not is_here or started_there):
        return Start(None, run_dir, config)
    if config is not None and not is_here and not started_there:
        raise ConfigError("output_dir", str(run_dir), "contains another run", "name a new folder")
    return Start(named, named.parent, run_config(named.parent))


def script_checkpoint(run_dir: Path, requested: Any) -> Any:
    """Return the value for transformers' ``resume_from_checkpoint``: for True, the newest finished checkpoint.

    transformers takes the highest number, finished or not, so the unfinished folders of a killed run are deleted.
    """
    remove_unfinished(run_dir)
    finished = checkpoints(run_dir)
    return str(finished[0][1]) if requested is True and finished else requested


def explicit_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the settings in the recipe and on the command line, as config.yaml keeps them.

    >>> explicit_settings(RunSettings({"seed": 1, "hub_token": "hf_x"}))
    {'seed': 1}
    """
    values = without_secrets(settings.explicit_values())
    if settings.adapter:
        values["adapter"] = adapter_identity(settings.adapter)
    return json.loads(json.dumps(values, default=str))


def run_config(run_dir: Path) -> dict[str, Any] | None:
    """Return the config.yaml of a run directory, {} if it is missing; None if the folder contains no run."""
    config = run_dir / "config.yaml"
    if config.exists():
        return read_yaml(config) or {}
    return {} if (run_dir / "history.jsonl").exists() or checkpoints(run_dir) else None


def changed(config: Mapping[str, Any], settings: RunSettings) -> list[str]:
    """Return ``field: before -> now`` for each setting that differs from config.yaml. A setting that is not in the
    recipe has its default.

    >>> changed({"stated": {"seed": 1, "save_steps": 5}}, RunSettings({"seed": 2}))
    ['seed: 1 -> 2']
    """
    before = {str(name): value for name, value in config.get("stated", {}).items()}
    now = explicit_settings(settings)
    lines = []
    for name in sorted(before.keys() | now.keys()):
        field = fields().get(name)
        if field and field.facts.get("resume") == "may_change":
            continue
        # Convert the default as config.yaml does: a tuple among the defaults equals a list in a recipe.
        default = json.loads(json.dumps(field and field.default, default=str))
        old, new = before.get(name, default), now.get(name, default)
        # A field of an earlier version that was off changed nothing.
        if old != new and (old or field):
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

    Force does not help if the checkpoints are of other weights.
    """
    fixed = {
        "distributed_type",
        *(name for name, field in fields().items() if field.facts.get("resume") == "must_match"),
    }
    if refused := [line for line in lines if line.partition(":")[0] in fixed]:
        reason = f"contains a run whose checkpoints do not fit these settings ({'; '.join(refused)})"
        raise ConfigError("output_dir", str(run_dir), reason, "name a new folder, or give the settings that it had")
    if lines and mode != "force":
        remedy = "name a new folder, give the settings that it had, or add --resume force to continue with these"
        raise ConfigError(
            "output_dir", str(run_dir), f"contains a run with other settings ({'; '.join(lines)})", remedy
        )


def problem_hash(row: Mapping[str, Any]) -> str:
    """Return the hash of a problem and its gold answer. Another id does not make it another problem."""
    return short_hash([row["problem"], row["answer"]])


def short_hash(content: Iterable[Any]) -> str:
    """Return a hash of the JSON of a list."""
    # For each part, because the JSON of two texts in a list takes three times as long.
    return sha256(f"[{', '.join(map(AS_JSON, content))}]".encode()).hexdigest()[:12]
