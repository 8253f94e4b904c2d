r"""The built-in data sets of sources.yaml: the source, the meaning of the columns, and the authors' way of scoring.

>>> SOURCES["aime2024"].splits, SOURCES["olympiadbench"].columns["answer"]
({'test': 'train'}, 'final_answer')
>>> source_name("openai/gsm8k"), source_name("openr1:extended@v1"), source_name("mine.jsonl")
('gsm8k', 'openr1', None)

datasets.py reads the data.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from grpo_math.system.reading import home
from grpo_math.system.table_files import is_table
from grpo_math.system.yaml_files import read_yaml

NAME = re.compile(r"(?P<path>[^:@]+)(?::(?P<config>[^:@]+))?(?:@(?P<revision>[^:@]+))?")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
NONE: Mapping[str, str] = MappingProxyType({})


class Source(NamedTuple):
    """A built-in data set: its source, and its differences from other sets."""

    hub: str
    config: str | None = None
    splits: Mapping[str, str] = MappingProxyType({"train": "train"})  # our name of a split -> the Hub's
    files: Mapping[str, str] = NONE  # a split's file under the data folder, for the sets that have one
    columns: Mapping[str, str] = NONE  # the columns without a common name, as in --columns
    template: str = "boxed"
    samples: int = 1  # completions of each problem in an evaluation: mean@n, for the small sets
    temperature: float = 0.0
    absolute: float = 0.0  # accepted distance from the gold answer; the column `tolerance` overrides it
    relative: float = 0.0  # accepted distance as a share of the gold answer
    around: tuple[str, str] = ("", "")  # the instructions before and after each problem, which are removed
    gold_answers: Mapping[str, str] = NONE  # start of a problem with a wrong box in its solution -> its gold answer
    without: Mapping[str, str] = NONE  # a split -> the set whose problems are left out of it


# Any data set that is not built in: a user's set, or another set on the Hub.
DEFAULT_SOURCE = Source("", template="gsm8k")
SOURCES = {name: Source(**entry) for name, entry in read_yaml(Path(__file__).with_name("sources.yaml")).items()}
SUITES = {"math": ("gsm8k", "math500", "minerva", "olympiadbench", "amc2023", "aime2024", "aime2025")}


class DatasetRef(NamedTuple):
    """The parts of a data set's name. ``path`` is a name of `SOURCES`, an id on the Hub, or a path."""

    path: str
    config: str | None = None
    revision: str | None = None


def parse_ref(dataset: str) -> DatasetRef:
    """Split ``path[:config][@revision]``. A path that exists is not split.

    >>> parse_ref("owner/name:main@1a2b"), parse_ref("owner/name@v2")
    (DatasetRef(path='owner/name', config='main', revision='1a2b'), DatasetRef(path='owner/name', config=None, \
revision='v2'))
    """
    match = NAME.fullmatch(dataset)
    # A file's name may contain ":" or "@".
    if match is None or home(dataset).exists():
        return DatasetRef(dataset)
    return DatasetRef(**match.groupdict())


def source_name(dataset: str) -> str | None:
    """Return the name of the built-in set with this name or Hub id; None for other data sets."""
    path = parse_ref(dataset).path
    return next((name for name, source in SOURCES.items() if path in (name, source.hub)), None)


def hub_id(dataset: str) -> str | None:
    """Return the Hub id of a data set that comes from the Hub; None for other data sets.

    >>> hub_id("aime2025"), hub_id("owner/name:main"), hub_id("generated:sums"), hub_id("a/b.jsonl")
    ('math-ai/aime25', 'owner/name', None, None)
    """
    path = parse_ref(dataset).path
    if name := source_name(dataset):
        return SOURCES[name].hub
    return path if HUB_ID.fullmatch(path) and not is_table(path) and not home(path).is_dir() else None


def folder_name(name: str) -> str:
    """Return a folder name for a data set.

    >>> folder_name("owner/name:main@v1"), folder_name("data/mine.jsonl")
    ('owner_name_main_v1', 'data_mine.jsonl')
    """
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "data"


def listed(data: str) -> list[str]:
    """Split data sets at commas, except those in the parameters of a generator.

    >>> listed("gsm8k, owner/name:main")
    ['gsm8k', 'owner/name:main']
    """
    return [part.strip() for part in re.split(r",(?![^{}]{0,500}\})", data)]
