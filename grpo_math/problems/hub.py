"""Rows of a data set on the Hub, or of a local folder of the same layout, with only the columns that are looked at.

Does not know what a row means (datasets.py), and runs no code of a repository.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError, first_line
from grpo_math.problems import columns
from grpo_math.problems.columns import Columns
from grpo_math.problems.sources import Place
from grpo_math.reading import home

SAME = {"test": "heldout", "heldout": "test"}
Rows = Iterator[tuple[int, Mapping[str, Any]]]


def rows(place: Place, split: str, wanted: Columns, name: str, remedy: str, known: bool = False) -> Rows:
    """(number, row) of a split, counted from 1; ``split`` may be cut, as in ``train[:500]``.

    ``known``: the split is the set's own, and is not looked up. Raises `ConfigError` of ``name`` for what cannot be
    had, and for a split, a configuration or a column that is not there.
    """
    import datasets

    folder = home(place.path)
    local = folder.is_dir()
    path = str(folder) if local else place.path
    if local and place.revision:
        raise ConfigError("dataset", name, "is a folder, which has no revisions", f"leave out @{place.revision}")
    try:
        if not local:
            _ask(path)
        if not known:
            split = _split(split, datasets.get_dataset_split_names(path, place.config, revision=place.revision))
        own = {"cache_dir": _cache_of(folder)} if local else {}
        found = datasets.load_dataset(path, place.config, split=split, revision=place.revision, **own)
        if getattr(found, "column_names", None) is None:
            raise ValueError("it is no table of rows")
    except UserError:
        raise
    except Exception as error:  # whatever stands between here and the Hub, the remedy is the same
        raise _cannot(path, local, name, error, remedy) from None
    columns.refuse_missing(found.column_names, wanted, name)
    return enumerate(found.select_columns(columns.used(found.column_names, wanted)), 1)


def _cache_of(folder: Path) -> str:
    """A cache for the files as they are now: `datasets` goes by the folder's name, and would give a changed one's old
    rows again."""
    import datasets

    files = sorted(path for path in folder.resolve().rglob("*") if path.is_file())
    stats = [(str(path), path.stat()) for path in files]
    said = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    digest = sha256(said.encode()).hexdigest()[:12]
    return str(Path(datasets.config.HF_DATASETS_CACHE) / f"grpo_math-{digest}")


def _ask(path: str) -> None:
    """One short call first: load_dataset would try for half a minute, and print each try."""
    import datasets
    import huggingface_hub

    owner, _, repository = path.partition("/")
    if not (Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}___{repository.lower()}").is_dir():
        huggingface_hub.HfApi().dataset_info(path, timeout=10)


def _split(split: str, names: list[str]) -> str:
    """The split by the name that the data set gives it. Raises `ConfigError` with its names."""
    base, bracket, cut = split.partition("[")
    if base not in names:
        base = SAME.get(base, base)
    if base not in names:
        remedy = f"use one of {', '.join(names)}"
        if names == ["train"]:
            remedy += ", or hold rows out of it: train[:200] to evaluate on, train[200:] to train on"
        raise ConfigError("split", split, "is no split of it", remedy)
    return base + bracket + cut


def _cannot(path: str, local: bool, name: str, error: Exception, remedy: str) -> ConfigError:
    words = " ".join(str(error).split())[:200] if isinstance(error, ValueError) else first_line(error)[:120]
    said = f"{type(error).__name__}: {words}"
    if local:
        return ConfigError("dataset", name, f"is a folder that cannot be read ({said})", "check its files")
    kind = type(error).__name__
    if kind == "GatedRepoError" or "gated" in str(error).lower():
        remedy = f"accept its terms on huggingface.co/datasets/{path} and sign in with hf auth login"
    return ConfigError(
        "dataset", name, f"is not in a local folder, and {path} cannot be had from the Hub ({said})", remedy
    )
