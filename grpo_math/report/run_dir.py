"""A run directory -> what it holds, and one line for each thing that is missing, broken or skipped.

The output folder of another trainer (trl_dir.py) counts as one, with what it tells.

It may be of a run that is still going or that was killed: a half-written line, a damaged file or an absent one is a
note and not an error.

Does not interpret what it reads.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_math import reading
from grpo_math.errors import ConfigError
from grpo_math.evaluation.compare import Results, ResultsError, read_results
from grpo_math.report import trl_dir
from grpo_math.run import lock, metrics
from grpo_math.run.checkpoints import FINISHED
from grpo_math.run.history import Lines, as_now, number, numbers, settled
from grpo_math.settings.fields import fields

History = list[dict[str, float]]


@dataclass
class Run:
    """What a run directory holds; ``notes`` say what is missing, broken or skipped."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=list)
    before: Results | None = None
    after: Results | None = None
    completions: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own: bool = True  # or that of a trainer without grpo_math, whose settings are known in part
    going: bool = False  # a process of this machine trains there

    def miss(self, note: str) -> None:
        """Note what is missing; of a run that is going, it is not due yet."""
        if not self.going:
            self.notes.append(note)


FILES = ("history.jsonl", "before.json", "after.json", "config.yaml")
MOST_LINES = 20  # of a history, that are each named in a note
MOST_COMPLETION_FILES = 250
MOST_COMPLETION_CHARACTERS = 20_000_000


def read_run(run_dir: str | Path) -> Run:
    """Read all that is readable. A folder with none of the run's files is a `ConfigError`."""
    run, reason = Run(Path(run_dir)), "is not a folder"
    if run.directory.is_dir():
        reason = f"holds no config.yaml, history.jsonl, before.json, after.json or {trl_dir.STATE}"
    kept, of_trl = [name for name in FILES if (run.directory / name).exists()], trl_dir.state_file(run.directory)
    if not kept and not of_trl and not any(run.directory.glob("completions/*.parquet")):
        raise ConfigError("run_dir", str(run_dir), reason, "give the run directory that training wrote")
    run.going = lock.owner(run.directory) is not None and not (run.directory / FINISHED).exists()
    run.own = bool({"config.yaml", "history.jsonl"} & set(kept) or (kept and not of_trl))
    if not run.own:
        _read_state(run)
    else:
        _read_config(run)
        _read_history(run)
    run.before = _read_evaluation(run, "before.json", "the accuracy before training is not known")
    run.after = _read_evaluation(run, "after.json", "the accuracy after training is not known")
    _read_completions(run)
    return run


def _read_config(run: Run) -> None:
    path = run.directory / "config.yaml"
    try:
        config = reading.read_yaml(path)
    except reading.Unreadable as error:
        if path.exists():
            run.notes.append(f"config.yaml {error}: the settings are not shown")
        else:
            run.notes.append("config.yaml is missing: the settings and versions of this run are not known")
    else:
        if isinstance(config, dict):
            run.config = {name: value for name, value in config.items() if _fits(name, value)}
            if other := [str(name)[:40] for name in config if name not in run.config]:
                said = ", ".join(other[:MOST_LINES])
                run.notes.append(f"config.yaml holds values that no run writes, which are not shown: {said}")
        else:
            run.notes.append("config.yaml holds no settings: it has to be a table of names and values")


def _fits(name: object, value: Any) -> bool:
    """Whether a setting is of a kind that its field has; of what is no field, whether it is what a run writes."""
    if not isinstance(name, str):
        return False
    if name == "num_processes":
        return isinstance(value, int) and value > 0
    field = fields().get(name)
    if value is None or field is None:
        return True
    if isinstance(value, bool):
        return bool(field.kinds & {"bool", "str"})
    if isinstance(value, int | float):
        return number(value) is not None and bool(field.kinds & {"int", "float"})
    if isinstance(value, list | dict):
        return ("list" if isinstance(value, list) else "dict") in field.kinds
    return not field.kinds <= {"int", "float", "bool", "None"}


def _read_history(run: Run) -> None:
    """One row a step. A resumed run repeats steps: the newest attempt counts, and what it threw away is dropped."""
    path = run.directory / "history.jsonl"
    try:
        lines = reading.read_bytes(path).decode("utf-8", errors="replace").split("\n")
    except reading.Unreadable as error:
        if path.exists():
            run.notes.append(f"history.jsonl {error}: there are no training curves")
        else:
            run.miss("history.jsonl is missing: there are no training curves")
        return
    kept, said = Lines(), list[str]()
    for place, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = numbers(reading.from_json(text))
            line = line and as_now(line)
        except (ValueError, AttributeError):
            line = None
        if line is None:
            # Only the last line has no line break after it, while the run writes it or after the run was killed.
            last = place == len(lines)
            if last and run.going:
                continue
            what = "half written" if last else "not a JSON object with a step"
            said.append(f"history.jsonl line {place} is {what}: it was skipped")
        elif kept.put(line):
            what = f"the run was resumed and repeats step {line[metrics.STEP]}, which counts anew"
            said.append(f"history.jsonl line {place}: {what}")
    more = len(said) - MOST_LINES
    run.notes += said if more <= 0 else [*said[:MOST_LINES], f"history.jsonl: so with {more:,} more lines"]
    run.history = kept.in_order()
    if not run.history:
        run.miss("history.jsonl has no step yet: there are no training curves")


def _read_state(run: Run) -> None:
    """History and settings of a folder that another trainer wrote, as far as they are known."""
    path = trl_dir.state_file(run.directory)
    lines: list[dict[str, Any]] = []
    try:
        lines = trl_dir.log_of(path) if path else []
    except (OSError, ValueError):
        run.notes.append(f"{trl_dir.STATE} is half written or damaged: there are no training curves")
    if path is None:
        run.notes.append(f"{trl_dir.STATE} is missing, here and in the checkpoints: there are no training curves")
    run.history = settled(lines)
    run.config = trl_dir.settings_of(run.directory, run.history)
    if run.history:
        last = f"{run.history[-1][metrics.STEP]:.0f}"
        where = str(path.relative_to(run.directory)) if path else ""
        said = f"made without grpo_math: the curves are the log of {where}, {len(run.history)} lines up to step {last}"
        cut = where != trl_dir.STATE and run.history[-1][metrics.STEP] < run.config.get("max_steps", 0)
        after = "; what came after that checkpoint is not known" if cut else ""
        run.notes.append(said + after)
        if not any(metrics.ACCURACY in line for line in run.history):
            run.notes.append("completions were not graded: accuracy is not known, rewards alone are shown")
        elif any(trl_dir.TRL_ACCURACY in line for line in run.history):
            run.notes.append("accuracy is the mean of TRL's accuracy_reward")
    settings = ", ".join(run.config) or "none"
    run.notes.append(
        f"there is no config.yaml: versions and command are not known, and of the settings only {settings}"
    )


def _read_evaluation(run: Run, name: str, without: str) -> Results | None:
    path = run.directory / name
    if not path.exists():
        if run.config.get("eval_n") != 0:
            run.miss(f"{name} is missing: {without}")
        return None
    try:
        return read_results(path)
    except ResultsError as error:
        run.notes.append(str(error).replace(str(path), name, 1))
        return None


def _read_completions(run: Run) -> None:
    """TRL's logged completions, evenly thinned by step where a run has more than a page can carry."""
    files = sorted((run.directory / "completions").glob("*.parquet"))
    if not files:
        why = "there are no training completions to show (see log_completions)"
        run.miss(f"completions/ is missing or empty: {why}")
        return
    import pyarrow
    import pyarrow.parquet as parquet

    stride = -(-len(files) // MOST_COMPLETION_FILES)
    batches: list[list[dict[str, Any]]] = []
    previous: list[Any] = []
    for path in files[::-1][::stride][::-1]:
        try:
            rows = parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError):
            run.notes.append(f"completions/{path.name} is half written or damaged: it was skipped")
            continue
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


def mapping(value: object) -> dict[str, Any]:
    """The table that is expected here; an empty one where a file holds something else, or nothing."""
    return value if isinstance(value, dict) else {}


def text_of(value: object) -> str:
    """A completion as text: TRL logs a string, or a list of chat messages whose content may come in parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(text_of(part) for part in value)
    if isinstance(value, dict):
        return text_of(value.get("content") if value.get("content") is not None else value.get("text"))
    return "" if value is None else str(value)


def prompt_of(value: object) -> tuple[str, str]:
    """A prompt as (its last user message, all of it)."""
    if not isinstance(value, list):
        return text_of(value), ""
    users = [message for message in value if isinstance(message, dict) and message.get("role") == "user"]
    short = text_of(users[-1]) if users else text_of(value)
    return short, "\n\n".join(f"{m.get('role')}: {text_of(m)}" for m in value if isinstance(m, dict))
