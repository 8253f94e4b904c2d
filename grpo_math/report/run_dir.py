"""Read a run directory: its settings, history, evaluations and completions.

A run may still be under way: the last line of its history may be incomplete, and some files do not exist yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_math.checks import Finding
from grpo_math.checks.diagnosis import diagnose
from grpo_math.checks.series import evaluation_line
from grpo_math.errors import ConfigError
from grpo_math.evaluation.meaning import PROBE, SEEDS_FILE, Line, meaning
from grpo_math.evaluation.paired import Results, ResultsError, comparison, read_results
from grpo_math.run import lock, metrics, speed_ups
from grpo_math.run.checkpoints import FINISHED
from grpo_math.run.history import read_lines, settled
from grpo_math.run.resume import run_config
from grpo_math.system.reading import is_folder, near, read_json, read_table, reading

History = list[dict[str, float]]

Pair = tuple[Results | None, Results | None]  # results of the base and of the trained model

MOST_COMPLETION_FILES = 250


@dataclass
class RunDir:
    """The content of a run directory. ``notes``: a line for each part that is left out."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=list)
    before: Results | None = None
    after: Results | None = None
    completions: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sets: list[Pair] = field(default_factory=list)  # a pair for each data set; `before` and `after` come first
    probe: dict[str, Any] = field(default_factory=dict)  # results of `evaluate --run --probe`, and of other seeds
    going: bool = False  # a process of this machine trains there
    switched_off: dict[str, list[str]] = field(default_factory=dict)  # speed-ups, and the reasons
    finished: int | None = None  # the last step of a run that has finished

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def sides(self) -> dict[str, Results]:
        """Return the evaluations that exist."""
        sides = {"before": self.before, "after": self.after}
        return {name: results for name, results in sides.items() if results}

    @property
    def model(self) -> str:
        """Return the name of the model: its name on the Hub, or that of its folder."""
        results = self.after or self.before or {}
        name = str(self.config.get("model_name_or_path") or results.get("model") or "unknown")
        return hub_name(name) or Path(name).name

    @property
    def findings(self) -> list[Finding]:
        """Return the findings of the history, with the evaluations as its first and last lines."""
        checkpoints = [path.name for path in self.directory.glob("checkpoint-*")]
        return [*probe_findings(self.probe), *diagnose(self.evaluated_history, self.config, checkpoints)]

    @property
    def meaning(self) -> list[Line]:
        """Return the lines of "What this number means", if there is a number."""
        return meaning(self.before, self.after, self.comparison, self.probe) if self.after else []

    @property
    def evaluated_history(self) -> History:
        """Return the history with the evaluations as its first and last lines, if they can be compared."""
        # Two points that cannot be compared would look like the effect of training, so neither is drawn.
        before, after = (self.before, self.after) if self.comparison else (None if self.after else self.before, None)
        last = self.finished or (int(self.history[-1][metrics.STEP]) if self.history else 1)
        return [*evaluation_line(0, before), *self.history, *evaluation_line(last, after)]

    @cached_property
    def comparison(self) -> dict[str, Any] | None:
        """Return the comparison of before and after. Results that cannot be compared become a note."""
        try:
            return _compared(self.before, self.after)
        except ResultsError as error:
            shares = [f"{results['accuracy']:.1%}" for results in self.sides.values()]
            self.notes.append(f"accuracy {' before and '.join(shares)} after training are not compared: {error}")
            return None


def probe_findings(probe: Mapping[str, Any]) -> list[Finding]:
    """Return a list with the probe's finding that the model knows problems by heart, or an empty list."""
    memory = probe.get("memory") or {}
    return [Finding("warning", memory["finding"], memory["remedy"], "known_by_heart")] if memory.get("finding") else []


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
    for file in [*sorted(folder.glob(f"evaluation/**/{PROBE}")), *folder.glob(f"evaluation/{SEEDS_FILE}")]:
        run.probe |= read_json(file)
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
        (_results(before), _results(after))
        for before, after in [
            (folder / "before.json", folder / "after.json"),
            *((one / "base.json", one / "trained.json") for one in sorted(folders)),
        ]
    ]
    # A side that training did not write comes from a later evaluation of the same problems.
    hashes = {side.get("problems_hash") for side in by_training if side}
    same = [pair for pair in later if not hashes or hashes & {side.get("problems_hash") for side in pair if side}]
    run.before, run.after = (side or (same[0][number] if same else None) for number, side in enumerate(by_training))
    others = [pair for pair in later if any(by_training) or pair is not same[0]]
    run.sets = [(run.before, run.after), *others] if others else []


def _results(file: Path) -> Results | None:
    return read_results(file) if file.exists() else None


def _compared(before: Results | None, after: Results | None) -> dict[str, Any] | None:
    """Return the comparison of two results; None if one is missing. Raises `ResultsError`."""
    return comparison(before, after, examples=None) if before and after else None


def set_rows(run: RunDir) -> list[dict[str, Any]]:
    """Return a row for each data set, if the run was evaluated on several."""
    rows = []
    for before, after in run.sets:
        results: Results = after or before or {}
        try:
            paired = _compared(before, after)
        except ResultsError as error:
            run.notes.append(f"base and trained model on {results['data']} are not compared: {error}")
            paired = None
        rows.append(
            {"data": results.get("data"), "n": results["n"], "before": before, "after": after, "paired": paired}
        )
    return rows


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
