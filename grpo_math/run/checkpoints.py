"""Checkpoints that are whole: how they are written, which one is the newest, what is wrong with one.

A checkpoint is written under its final name, because transformers remembers that name while it writes. A token next to
it, .checkpoint-N.unfinished, exists until all files are on the disk and files.json lists them.

transformers saves and loads the weights. resume.py decides where a run begins.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.run.files import flush, replace_text
from grpo_math.system.reading import Unreadable, read_json, read_object

FILES = "files.json"  # the size of each file of a checkpoint
STATE = "state_{}.pt"
FINISHED = "finished.json"
BEST = "best.json"  # step, metric, value and path of the best checkpoint of a run
UNFINISHED = ".{}.unfinished"

# Writing


@contextmanager
def sealed(folder: Path, accelerator: Any) -> Iterator[None]:
    """Fill a folder, and write its manifest when all of its files are on the disk. All ranks call this.

    If anything is raised, or the process is killed, the folder is unfinished, nothing reads it, and the next run in
    ``folder.parent`` deletes it.
    """
    # Only the main process writes the token and the manifest, and deletes. On a network file system another machine
    # may see an old state of the folder, so it would list or delete files that no longer exist.
    if accelerator.is_main_process:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The token comes first: if the power fails at any later moment, the folder is unfinished.
        replace_text(_token(folder), "")
        flush(folder.parent)
        # An earlier run may have files here that this run does not write, such as the state of further ranks. Files
        # that a script has added to its checkpoint stay.
        for name in (*(read_object(folder / FILES) or ()), FILES):
            (folder / name).unlink(missing_ok=True)
    # No rank writes before the old files are deleted.
    accelerator.wait_for_everyone()
    folder.mkdir(parents=True, exist_ok=True)
    yield
    # The list is made when every rank has written its files.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_manifest(folder)
        _token(folder).unlink()
        flush(folder.parent)
    accelerator.wait_for_everyone()


def write_manifest(folder: Path) -> None:
    """Write `FILES`, the sizes of all files of a folder, and wait until the disk has the files."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / FILES:
            flush(path)
            sizes[str(path.relative_to(folder))] = path.stat().st_size
    # Written last: a list on the disk means that the files in the list are on the disk too.
    replace_text(folder / FILES, json.dumps(sizes, indent=1) + "\n")
    flush(folder)


def unfinished(folder: Path) -> bool:
    """Return True if a folder is being written, or its writer was killed."""
    return _token(folder).exists()


def unfinished_names(run_dir: Path) -> list[str]:
    """Return the names of the folders of a run that are unfinished."""
    return [token.stem.removeprefix(".") for token in run_dir.glob(UNFINISHED.format("*"))]


def _token(folder: Path) -> Path:
    return folder.parent / UNFINISHED.format(folder.name)


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, such as a missing or a cut file; None if the checkpoint is whole.

    transformers would start with a new optimizer, without a word, if the file of the optimizer is missing.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "state_0.pt").write_text("3")
    >>> damage(folder)
    'files.json cannot be read'
    >>> write_manifest(folder), damage(folder)
    (None, None)
    >>> _ = (folder / "state_0.pt").write_text("")
    >>> damage(folder)
    'state_0.pt is not what was written'
    """
    if unfinished(folder):
        return "it was not written to its end"
    try:
        sizes = read_json(folder / FILES)
    except Unreadable:
        return f"{FILES} cannot be read"
    for name, size in sizes.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            return f"{name} is not what was written"
    return None if STATE.format(0) in sizes else "it contains only weights (save_only_model)"


# Which checkpoint


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of each finished checkpoint, the newest first, by number, because clocks jump.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> for name in ("checkpoint-9", "checkpoint-10", "my-checkpoint-11"):
    ...     (run_dir / name).mkdir()
    >>> [step for step, _ in checkpoints(run_dir)]
    [10, 9]
    """
    folders = [path for path in run_dir.glob("checkpoint-*") if path.is_dir() and not unfinished(path)]
    numbered = [(path.name.partition("-")[2], path) for path in folders]
    return sorted(((int(step), path) for step, path in numbered if step.isdigit()), reverse=True)


def how_to_resume(run_dir: Path, command: str = "the same command") -> str:
    """Return the end of a message about a run that has ended too soon: how to resume it with ``command``.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> how_to_resume(run_dir)
    'the same command starts over'
    >>> (run_dir / "checkpoint-9").mkdir()
    >>> _ = (run_dir / "checkpoint-9/state_0.pt").write_text("3")
    >>> write_manifest(run_dir / "checkpoint-9")
    >>> how_to_resume(run_dir)
    'the same command continues from checkpoint-9'

    With ``save_only_model`` a checkpoint cannot be resumed:

    >>> (run_dir / "checkpoint-9/state_0.pt").unlink()
    >>> write_manifest(run_dir / "checkpoint-9")
    >>> how_to_resume(run_dir).partition("cannot be resumed")[2]
    ' (it contains only weights (save_only_model)); no complete one is left: name a new output_dir'
    """
    try:
        newest, _ = newest_whole(run_dir)
    except UserError as error:
        return str(error)
    return f"{command} continues from {newest.name}" if newest else "the same command starts over"


def named(run_dir: Path, name: str | None) -> Path:
    """Return the folder of the checkpoint ``best``, or of the checkpoint with this folder name; of the run for None."""
    if name is None:
        return run_dir
    best = run_dir / BEST
    folder = run_dir / (read_json(best)["path"] if name == "best" and best.exists() else name)
    if not folder.is_dir() or unfinished(folder):
        reason = f"is not a checkpoint of {run_dir}"
        if name == "best":
            reason = f"is not known: {run_dir} " + (
                f"no longer has {folder.name}" if best.exists() else "was trained without keep_best"
            )
        saved = ", ".join(one.name for _, one in checkpoints(run_dir))
        remedy = f"name one of {saved}" if saved else "leave it out for the last weights: there is no checkpoint"
        raise ConfigError("checkpoint", name, reason, remedy)
    return folder


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, and a line about each newer one that is not.

    Raises `UserError` if none is whole.
    """
    lines: list[str] = []
    for _, folder in checkpoints(run_dir):
        if (reason := damage(folder)) is None:
            return folder, lines
        lines.append(f"{folder} cannot be resumed ({reason})")
    # No silent start from step 0: the new run would rename these folders and drop the history.
    if lines:
        raise UserError(f"{'; '.join(lines)}; no complete one is left: name a new output_dir")
    return None, []


def checkpoint_step(folder: Path) -> int:
    """Return the step after which a checkpoint was written. Raises `ConfigError` if the folder is not a checkpoint."""
    try:
        return int(read_json(folder / "trainer_state.json")["global_step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        reason = "has no trainer_state.json with its step"
        raise ConfigError("resume_from_checkpoint", str(folder), reason, "give a checkpoint's folder") from None


def remove_unfinished(run_dir: Path) -> None:
    """Delete the unfinished folders of a killed run."""
    for name in unfinished_names(run_dir):
        shutil.rmtree(run_dir / name, ignore_errors=True)
        _token(run_dir / name).unlink()  # last: a kill in between leaves the folder unfinished
