"""Move files of an earlier run, and files in the way of a new one, to RUN/earlier/N. Nothing is deleted.

The user may have files with the same names. A file belongs to a run only if it contains the text that `MARKS` gives
for its name. Other files stay, unless a run has to write a file of that name.

The checkpoints of an earlier run stay too, because a script may resume from them.
"""

import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from pathlib import Path

from grpo_math.run import speed_ups
from grpo_math.run.checkpoints import BEST, FILES, FINISHED, checkpoints

EARLIER = "earlier"
STEP, RESULTS = '"step": ', '"problems_hash": '
REPORT = {"report.html": " · grpo_math report</title>", "plots/*.png": "Software\0grpo_math"}
# Results of the last weights, as patterns -> a text that each file contains.
LAST_RESULTS = {"after.json": RESULTS, "evaluation/**/trained.*": RESULTS, **REPORT}
# Files that training writes in any folder: files of the user under these names have to make way.
TRAINING = {
    "config.yaml": "\nnum_processes: ",
    "history.jsonl": '{"step": ',
    "training_history.json": STEP,
    FINISHED: STEP,
    BEST: STEP,
    speed_ups.FILE: '"switched_off": ',
}
# All files of a run except its checkpoints. The mark of a folder is a file in it.
MARKS = {
    **LAST_RESULTS,
    **TRAINING,
    "before.json": RESULTS,
    "evaluation*/**/*.json*": RESULTS,
    "adapter": FILES,
    "completions/completions_*.parquet": "in_format",
}


def run_files(run_dir: Path, patterns: Collection[str] = MARKS.keys()) -> list[Path]:
    """Return the files and folders that a run has written."""
    return [path for pattern in patterns for path in run_dir.glob(pattern) if is_marked(path, MARKS[pattern])]


def is_marked(path: Path, mark: str) -> bool:
    return (path / mark).exists() if path.is_dir() else mark.encode() in path.read_bytes()


def in_the_way(run_dir: Path, names: Mapping[str, str]) -> list[Path]:
    """Return files of the user under the ``names`` of files that are to be written. Each name has its mark."""
    paths = [(run_dir / name, mark) for name, mark in names.items()]
    return [path for path, mark in paths if path.exists() and path.stat().st_size and not is_marked(path, mark)]


def archive(run_dir: Path, paths: Iterable[Path], folder: Path | None = None) -> Path | None:
    """Move files and folders to ``folder``, by default the next RUN/earlier/N. Return it, and print what was moved.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> archive(run_dir, [run_dir / "history.jsonl"])  # no such file
    """
    moved = []
    for path in paths:
        if path.exists():
            folder = folder or next(one for n in count(1) if not (one := run_dir / EARLIER / str(n)).exists())
            target = folder / path.relative_to(run_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            moved.append(path.relative_to(run_dir))
    if moved:
        names = dict.fromkeys(f"{path.parts[0]}/" if path.parts[1:] else path.name for path in moved)
        print(f"moved    {', '.join(names)} to {folder}", file=sys.stderr)
    return folder


def archive_results(run_dir: Path, is_new: bool) -> None:
    """Archive the results of earlier weights before a recipe trains. ``is_new``: the run starts again at step 0."""
    (run_dir / FINISHED).unlink(missing_ok=True)
    archive(run_dir, run_files(run_dir, MARKS if is_new else LAST_RESULTS))


def archive_later_checkpoints(run_dir: Path, step: int) -> None:
    """Archive checkpoints after this step, with their evaluations: the run will write these steps again."""
    later = [folder for number, folder in checkpoints(run_dir) if number > step]
    archive(run_dir, [path for folder in later for path in (folder, run_dir / f"evaluation-{folder.name}")])
