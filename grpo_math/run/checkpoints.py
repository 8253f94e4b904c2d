"""Checkpoints that are whole: how they are written, which one is the newest, what is wrong with one.

A checkpoint is written to RUN/.writing, gets a checksum of each of its files, and is renamed to RUN/checkpoint-N: what
bears such a name was whole on the disk.

Does not save or load weights (transformers does), nor decide whether a run goes on (resume.py does).
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.reading import Unreadable, read_json
from grpo_math.run.files import flush, replace_text

WRITING = ".writing"
SUMS = "checksums.json"
STATE = "state_{}.pt"
FINISHED = "finished.json"


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
    flush(target.parent)


def seal(folder: Path) -> None:
    """Write the checksums of all files of a folder, and wait until the disk has them."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: flush(folder / name), names))
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
        return int(read_json(folder / "trainer_state.json")["global_step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        reason = "holds no trainer_state.json that says its step"
        raise ConfigError("resume_from_checkpoint", str(folder), reason, "give a checkpoint's folder") from None


def set_aside_after(run_dir: Path, step: int) -> None:
    """Checkpoints after this step, which the run will come to again, are renamed to old-checkpoint-N."""
    for number, folder in checkpoints(run_dir):
        if number > step:
            old = folder.with_name(f"old-{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
