"""Checkpoints that are whole: how they are written, which one is the newest, what is wrong with one.

A checkpoint is written under its final name, because transformers remembers that name while it writes. A token next to
it, .checkpoint-N.unfinished, exists until all files are on the disk and checksums.json seals them.

Does not save or load weights (transformers does), and does not decide if a run may resume (resume.py does).
"""

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.reading import Unreadable, read_json
from grpo_math.run.files import flush, replace_text

SUMS = "checksums.json"
STATE = "state_{}.pt"
FINISHED = "finished.json"
BEST = "best.json"  # step, metric, value and path of the best checkpoint of a run
UNFINISHED = ".{}.unfinished"


# Writing


@contextmanager
def sealed(folder: Path, accelerator: Any) -> Iterator[None]:
    """Fill a folder, on every rank, and seal it when all of it is on the disk.

    If anything is raised, or the process is killed, the folder is unfinished and nothing reads it.
    """
    # Only the main process creates, seals and deletes. On a network file system another machine may see an
    # old state of the folder, so it would seal or delete files that are gone.
    if accelerator.is_main_process:
        folder.parent.mkdir(parents=True, exist_ok=True)
        replace_text(_token(folder), "")
        flush(folder.parent)
        if (folder / SUMS).exists():  # of an earlier run
            shutil.rmtree(folder, ignore_errors=True)
    accelerator.wait_for_everyone()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            seal(folder)
            _token(folder).unlink()
            flush(folder.parent)
    except BaseException:
        if accelerator.is_main_process:
            _remove(folder)
        raise
    accelerator.wait_for_everyone()


def seal(folder: Path) -> None:
    """Write the checksums of all files of a folder, and wait until the disk has them."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path != folder / SUMS]
    names = sorted(str(path.relative_to(folder)) for path in paths)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: flush(folder / name), names))
        sums = dict(zip(names, pool.map(lambda name: _sum(folder / name), names), strict=True))
    replace_text(folder / SUMS, json.dumps(sums, indent=1) + "\n")
    flush(folder)


def unfinished(folder: Path) -> bool:
    """Return True if a folder is being written, or its writer was killed."""
    return _token(folder).exists()


def _token(folder: Path) -> Path:
    return folder.parent / UNFINISHED.format(folder.name)


def _remove(folder: Path) -> None:
    """Delete an unfinished folder, as far as the disk allows. The token is deleted last."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        _token(folder).unlink()


def remove_unfinished(run_dir: Path) -> None:
    """Delete the unfinished folders of a killed run."""
    start, end = UNFINISHED.split("{}")
    for token in run_dir.glob(UNFINISHED.format("*")):
        _remove(token.with_name(token.name.removeprefix(start).removesuffix(end)))


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, such as a missing or a changed file; None if the checkpoint is unchanged.

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
    if unfinished(folder):
        return "it was not written to its end"
    try:
        sums = read_json(folder / SUMS)
        names = list(sums)
    except (Unreadable, TypeError):
        return f"{SUMS} cannot be read" if (folder / SUMS).exists() else f"{SUMS} is missing"
    if missing := [name for name in names if not (folder / name).is_file()]:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor() as pool:
        for name, now in zip(names, pool.map(lambda name: _sum(folder / name), names), strict=True):
            if now != sums[name]:
                return f"{name} is not what was written"
    return None if STATE.format(0) in names else "it holds weights alone (save_only_model)"


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


# Which checkpoint


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of each finished checkpoint, the newest first, by number, because clocks jump.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> goes_on(run_dir)
    'the same command starts over'
    >>> for name in ("checkpoint-9", "checkpoint-10", "old-checkpoint-11"):
    ...     (run_dir / name).mkdir()
    >>> [step for step, _ in checkpoints(run_dir)], goes_on(run_dir)
    ([10, 9], 'the same command continues from checkpoint-10')
    """
    folders = [path for path in run_dir.glob("checkpoint-*") if path.is_dir() and not unfinished(path)]
    numbered = [(path.name.partition("-")[2], path) for path in folders]
    return sorted(((int(step), path) for step, path in numbered if step.isdigit()), reverse=True)


def goes_on(run_dir: Path) -> str:
    """Return the end of a message about a run that has ended too soon: how to resume it."""
    finished = checkpoints(run_dir)
    return f"the same command continues from {finished[0][1].name}" if finished else "the same command starts over"


def named(run_dir: Path, name: str | None) -> Path:
    """Return the folder of the checkpoint ``best``, or of the checkpoint with this folder name; of the run for None."""
    if name is None:
        return run_dir
    best = name == "best" and (run_dir / BEST).exists()
    folder = run_dir / (read_json(run_dir / BEST)["path"] if best else name)
    if not folder.is_dir() or unfinished(folder):
        reason = f"is not a checkpoint of {run_dir}"
        raise ConfigError("checkpoint", name, reason, "train with keep_best, or name a folder such as checkpoint-10")
    return folder


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, and a line about each newer one that is damaged.

    Raises `UserError` if all checkpoints are damaged.
    """
    lines: list[str] = []
    for _, folder in checkpoints(run_dir):
        if (reason := damage(folder)) is None:
            return folder, lines
        lines.append(f"{folder} is damaged ({reason})")
    if lines:
        raise UserError(f"{'; '.join(lines)}; no complete one is left: name a new output_dir")
    return None, []


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint was written. Raises `ConfigError` if the folder is not a checkpoint."""
    try:
        return int(read_json(folder / "trainer_state.json")["global_step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        reason = "holds no trainer_state.json that says its step"
        raise ConfigError("resume_from_checkpoint", str(folder), reason, "give a checkpoint's folder") from None


def set_aside_after(run_dir: Path, step: int) -> None:
    """Rename checkpoints after this step to old-checkpoint-N: the run will write these steps again."""
    for number, folder in checkpoints(run_dir):
        if number > step:
            old = folder.with_name(f"old-{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)


def rotate(run_dir: Path, step: int, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond ``limit``, except the checkpoint of this step and the best one.

    Checkpoints of later steps are of an earlier run, so they are deleted first.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> for step in (2, 4, 6, 100):
    ...     (run_dir / f"checkpoint-{step}").mkdir()
    >>> rotate(run_dir, 6, 2, str(run_dir / "checkpoint-2"))
    >>> [step for step, _ in checkpoints(run_dir)]
    [6, 2]
    """
    oldest_first = sorted(checkpoints(run_dir), key=lambda numbered: (numbered[0] <= step, numbered[0]))
    spare = [folder for number, folder in oldest_first if number != step and folder != Path(best or "")]
    kept = limit if limit and limit > 0 else len(oldest_first)
    for folder in spare[: max(0, len(oldest_first) - kept)]:
        shutil.rmtree(folder, ignore_errors=True)


def to_resume(run_dir: Path, asked: Any) -> Any:
    """Return the value for a script's ``resume_from_checkpoint``: a checkpoint that was written to its end.

    transformers, and scripts with its ``get_last_checkpoint``, take the highest number, finished or not.
    """
    half = asked is not True and bool(asked) and unfinished(Path(asked))
    finished = checkpoints(Path(asked).parent if half else run_dir)
    remove_unfinished(run_dir)
    if half:
        start = finished[0][1] if finished else "the start"
        print(f"warning: {asked} was not written to its end: continuing from {start}", file=sys.stderr)
    elif asked is not True:
        return asked
    return str(finished[0][1]) if finished else asked is True or None
