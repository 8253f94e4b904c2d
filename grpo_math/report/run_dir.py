"""A run directory -> what it holds, and a line for each file that is missing or cannot be read.

The output folder of another trainer (trl_dir.py) counts as a run, with fewer things known about it. The run may still
be going: its last line may be half written, and some files are not there yet.

Does not interpret what it reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpo_math.errors import ConfigError, first_line
from grpo_math.evaluation.compare import Results, read_results
from grpo_math.reading import from_json, read_bytes
from grpo_math.report import trl_dir
from grpo_math.report.text import text_of
from grpo_math.run import lock, metrics
from grpo_math.run.checkpoints import FINISHED
from grpo_math.run.history import settled
from grpo_math.yaml_files import read_yaml

History = list[dict[str, float]]
T = TypeVar("T")

FILES = ("history.jsonl", "before.json", "after.json", "config.yaml")
MOST_COMPLETION_FILES = 250
MOST_COMPLETION_CHARACTERS = 20_000_000


@dataclass
class Run:
    """A run directory's content. ``notes`` name what is missing, cannot be read or is left out."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=list)
    before: Results | None = None
    after: Results | None = None
    completions: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own: bool = True  # False for another trainer's, whose settings are known in part
    going: bool = False  # a process of this machine trains there

    def read(self, name: str, reader: Callable[[Path], T], without: str = "") -> T | None:
        """Read a file. Note why it cannot be read, or what its absence means, unless the run is still going."""
        path = self.directory / name
        if path.exists():
            try:
                return reader(path)
            except Exception as error:  # of any library that reads it: the rest of the run is shown
                reason = first_line(error).removeprefix(f"{path}: ")
                self.notes.append(f"{name} cannot be read and is left out: {reason}")
        elif without:
            self.miss(f"{name} is missing: {without}")
        return None

    def miss(self, note: str) -> None:
        """Note that something is missing. While the run is going it may still come."""
        self.notes += [] if self.going else [note]


def read_run(run_dir: str | Path) -> Run:
    """Read a run. A folder with none of the run's files is a `ConfigError`."""
    run, reason = Run(Path(run_dir)), "is not a folder"
    if run.directory.is_dir():
        reason = f"holds no config.yaml, history.jsonl, before.json, after.json or {trl_dir.STATE}"
    kept, of_trl = [name for name in FILES if (run.directory / name).exists()], trl_dir.state_file(run.directory)
    if not kept and not of_trl and not any(run.directory.glob("completions/*.parquet")):
        raise ConfigError("run_dir", str(run_dir), reason, "give the run directory that training wrote")
    run.going = lock.owner(run.directory) is not None and not (run.directory / FINISHED).exists()
    run.own = bool({"config.yaml", "history.jsonl"} & set(kept) or (kept and not of_trl))
    if run.own:
        run.config = run.read("config.yaml", _settings, "settings and versions are not known") or {}
        run.history = run.read("history.jsonl", lambda path: _history(path, run), "there are no curves") or []
    elif of_trl:
        _read_state(run, of_trl)
    absent = "there is no such evaluation" if run.config.get("eval_n") != 0 else ""
    run.before, run.after = (run.read(name, read_results, absent) for name in ("before.json", "after.json"))
    _read_completions(run)
    return run


def _settings(path: Path) -> dict[str, Any]:
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise ValueError("it is not a table of names and values")
    return found


def _history(path: Path, run: Run) -> History:
    """Return one row per step. The newest attempt of a resumed run counts."""
    lines, damaged = [], []
    texts = read_bytes(path).decode("utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, start=1):
        try:
            lines += [dict(from_json(text))] if text.strip() else []
        except (ValueError, TypeError):
            # The last line is the one that a running process is writing.
            damaged += [] if run.going and number == len(texts) else [number]
    if damaged:
        run.notes.append(
            f"history.jsonl: {len(damaged)} lines are not JSON objects and are left out, first line {damaged[0]}"
        )
    if not (found := settled(lines)):
        run.miss("history.jsonl has no step yet: there are no curves")
    return found


def _read_state(run: Run, path: Path) -> None:
    """Read the history and the known settings of a folder that another trainer wrote."""
    name = str(path.relative_to(run.directory))
    run.history = settled(run.read(name, trl_dir.log_of) or [])
    run.config = trl_dir.settings_of(path)
    last = f"{run.history[-1][metrics.STEP]:.0f}" if run.history else "0"
    log = f"the log of {name}, {len(run.history)} lines up to step {last}"
    graded = any(metrics.ACCURACY in line for line in run.history)
    accuracy = "is the mean of TRL's accuracy_reward" if graded else "is not known: completions were not graded"
    run.notes.append(f"made without grpo_math: the curves are {log}; accuracy {accuracy}")
    settings = ", ".join(run.config) or "none"
    run.notes.append(f"there is no config.yaml: of the settings only these are known: {settings}")


def _read_completions(run: Run) -> None:
    """Read TRL's logged completions, evenly thinned by step if a run has more than a page can carry."""
    files = sorted(path.name for path in run.directory.glob("completions/*.parquet"))
    if not files:
        run.miss("completions/ has no files: there are no training completions to show (see log_completions)")
        return
    from pyarrow.parquet import read_table

    stride = -(-len(files) // MOST_COMPLETION_FILES)
    batches: list[list[dict[str, Any]]] = []
    previous: list[Any] = []
    for name in files[::-1][::stride][::-1]:
        rows = run.read(f"completions/{name}", lambda path: read_table(path).to_pylist()) or []
        # A batch that TRL trains on for several steps is logged again at each.
        texts = [(row.get("prompt"), row.get("completion")) for row in rows]
        if texts != previous:
            batches.append(rows)
        previous = texts
    size = sum(len(text_of(row.get("completion"))) for rows in batches for row in rows)
    thin = -(-size // MOST_COMPLETION_CHARACTERS) or 1
    run.completions = [row for rows in batches[::-1][::thin][::-1] for row in rows]
    if stride * thin > 1:
        shown = f"the training completions of one logged step in {stride * thin} are shown"
        run.notes.append(f"{shown}: all of them are in completions/")
