"""Rows of a data set on the Hub, or of a local folder of the same layout.

Does not interpret a row (rows.py does), and does not run code of a repository.
"""

from collections.abc import Collection, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, UserError, first_line, one_of
from grpo_math.problems import columns
from grpo_math.problems.sources import Place
from grpo_math.reading import home

SAME = {"test": "heldout", "heldout": "test"}


def rows(
    address: Place, split: str, accepted: columns.Columns, name: str, remedy: str, known: bool = False
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Return the rows of a split, numbered from 1. ``split`` may be cut, as in ``train[:500]``.

    ``known``: ``split`` is the data set's name for the split, and is not looked up.

    Raises `ConfigError` for ``name`` if the data set cannot be loaded, or has no such split, configuration or column.
    """
    import datasets

    folder = home(address.path)
    local = folder.is_dir()
    path = str(folder) if local else address.path
    try:
        if not known:
            split = split_of(split, datasets.get_dataset_split_names(path, address.config, revision=address.revision))
        cache = {"cache_dir": _cache_of(folder)} if local else {}
        table = datasets.load_dataset(path, address.config, split=split, revision=address.revision, **cache)
    except UserError:
        raise
    except Exception as error:
        # `datasets` and the Hub raise many kinds of errors. `datasets` wraps the reason in "An error occurred".
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        message = f"{type(error).__name__}: {first_line(error)}"
        reason = f"is not in a local folder, and {path} cannot be had from the Hub ({message})"
        if local:
            reason, remedy = f"is a folder that cannot be read ({message})", "check its files"
        raise ConfigError("dataset", name, reason, remedy) from None
    for field in ("problem", "answer"):
        if not columns.used(table.column_names, {field: accepted[field]}):
            remedy = columns.remedy_of(table.column_names, field, accepted[field])
            raise ConfigError("dataset", name, f"has no column for the {field}", remedy)
    # The other columns of a set on the Hub may be gigabytes.
    if known or not local:
        table = table.select_columns(columns.used(table.column_names, accepted))
    return enumerate(table, 1)


def _cache_of(folder: Path) -> str:
    """Return a cache folder for these versions of the files."""
    import datasets

    # If README.md lists the files, `datasets` returns the cached rows of a file that has changed since.
    stats = sorted((str(path), path.stat().st_mtime_ns) for path in folder.resolve().rglob("*") if path.is_file())
    return str(Path(datasets.config.HF_DATASETS_CACHE) / f"grpo_math-{sha256(repr(stats).encode()).hexdigest()[:12]}")


def split_of(split: str, names: Collection[str]) -> str:
    """Return the data set's name for a split. Raises `ConfigError`, which lists its names, for an unknown split.

    >>> split_of("test[:5]", ["train", "heldout"])
    'heldout[:5]'
    """
    base, bracket, cut = split.partition("[")
    if base not in names and SAME.get(base) in names:
        base = SAME[base]
    one_of("split", base, tuple(names))
    return base + bracket + cut
