"""Read a run directory: its settings, history, evaluations and completions.

A run may still be under way: the last line of its history may be incomplete, and some files do not exist yet.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation.evaluation import Evaluation, read
from grpo_math.run import lock, speed_ups
from grpo_math.run.checkpoints import FINISHED
from grpo_math.run.history import read_lines, settled
from grpo_math.run.resume import run_config
from grpo_math.system.reading import is_folder, near, read_json, reading
from grpo_math.system.table_files import read_table

History = list[dict[str, float]]

BaseAndTrained = tuple[Evaluation | None, Evaluation | None]  # of the base and of the trained model

MOST_COMPLETION_FILES = 250


@dataclass
class RunDir:
    """The content of a run directory. ``notes``: a line for each part that is left out."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=list)
    before: Evaluation | None = None
    after: Evaluation | None = None
    completions: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # One for each data set; `before` and `after` come first.
    sets: list[BaseAndTrained] = field(default_factory=list)
    going: bool = False  # a process of this machine trains there
    switched_off: dict[str, list[str]] = field(default_factory=dict)  # speed-ups, and the reasons
    finished: int | None = None  # the last step of a run that has finished

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def sides(self) -> dict[str, Evaluation]:
        """Return the evaluations that exist."""
        sides = {"before": self.before, "after": self.after}
        return {name: evaluation for name, evaluation in sides.items() if evaluation}

    @property
    def model(self) -> str:
        """Return the name of the model: its name on the Hub, or that of its folder."""
        evaluated = [side.settings.get("model") for side in (self.after, self.before) if side]
        name = str(next(filter(None, (self.config.get("model_name_or_path"), *evaluated)), "unknown"))
        return hub_name(name) or Path(name).name


def hub_name(model: str) -> str | None:
    """Return a model's name on the Hub; None for a folder.

    >>> hub_name("Qwen/Qwen2.5-1.5B"), hub_name("./models/mine")
    ('Qwen/Qwen2.5-1.5B', None)
    """
    return None if is_folder(model) else model


def read_run(run_dir: str | Path) -> RunDir:
    """Read a run. Raise `ConfigError` for a folder without any of its files.

    >>> read_run("runs/nowhere")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: run_dir='runs/nowhere' contains no config.yaml, history.jsonl, before.json or ...
    """
    run = RunDir(Path(run_dir))
    folder = run.directory
    if (finished := folder / FINISHED).exists():
        run.finished = read_json(finished)["step"]
    run.going = lock.owner(folder) is not None and run.finished is None
    run.config = run_config(folder) or {}
    if (history := folder / "history.jsonl").exists():
        with reading(history):
            # One row per step: the newest attempt of a resumed run counts.
            run.history = settled(read_lines(history))
    if (reasons := folder / speed_ups.FILE).exists():
        run.switched_off = read_json(reasons)["switched_off"]
    _read_evaluations(run)
    _read_completions(run)
    if not (run.config or run.history or run.sides or run.completions):
        reason = "contains no config.yaml, history.jsonl, before.json or after.json"
        raise ConfigError(
            "run_dir", str(run_dir), reason, near(run_dir) or "give the run directory that training wrote"
        )
    return run


def _read_evaluations(run: RunDir) -> None:
    """Read the evaluations of training, and those that `grpo-math evaluate --run` made later, of any data sets."""
    folder = run.directory
    folders = {path.parent for name in ("base", "trained") for path in folder.glob(f"evaluation/**/{name}.json")}
    by_training, *later = [
        (_evaluation(before), _evaluation(after))
        for before, after in [
            (folder / "before.json", folder / "after.json"),
            *((one / "base.json", one / "trained.json") for one in sorted(folders)),
        ]
    ]
    # A side that training did not write comes from a later evaluation of the same problems in the same way. A later
    # evaluation of both sides repeats those of training.
    protocols = {side.protocol for side in by_training if side}
    same = [pair for pair in later if protocols & {side.protocol for side in pair if side}] if protocols else later[:1]
    run.before, run.after = (side or (same[0][number] if same else None) for number, side in enumerate(by_training))
    others = [pair for pair in later if not any(pair is one for one in same)]
    run.sets = [(run.before, run.after), *others] if others else []


def _evaluation(file: Path) -> Evaluation | None:
    return read(file) if file.exists() else None


def completion_files(run_dir: Path) -> list[Path]:
    """Return TRL's files of logged completions, in order of steps."""
    # TRL pads the step in the name to five digits: from step 100,000 the names are longer.
    return sorted(run_dir.glob("completions/*.parquet"), key=lambda path: (len(path.name), path.name))


def _read_completions(run: RunDir) -> None:
    """Read TRL's logged completions, evenly thinned by step if there are many files."""
    files = completion_files(run.directory)
    stride = -(-len(files) // MOST_COMPLETION_FILES) or 1
    if stride > 1:
        run.notes.append(f"the completions of one logged step in {stride} are shown: the others are in completions/")
    texts: list[Any] = []
    # Files are counted from the newest back, so that the last step is shown.
    for path in files[::-1][::stride][::-1]:
        rows = [row for _, row in read_table(path)]
        # TRL logs a batch again at each step that trains on it.
        earlier, texts = texts, [(row["prompt"], row["completion"]) for row in rows]
        if texts != earlier:
            run.completions += rows
