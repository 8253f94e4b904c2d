r"""The built-in data sets: the source, the meaning of the columns, and the authors' way of scoring.

The layouts come from public loaders of the sets, not from the Hub itself. If the columns of a set have changed since
then, the error lists them.

>>> SOURCES["aime2024"].splits, SOURCES["olympiadbench"].columns["answer"]
({'test': 'train'}, 'final_answer')
>>> source_of("openai/gsm8k"), source_of("openr1:extended@v1"), source_of("mine.jsonl")
('gsm8k', 'openr1', None)

Does not read data: datasets.py does.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from grpo_math.reading import home, is_table

NAME = re.compile(r"(?P<path>[^:@]+)(?::(?P<config>[^:@]+))?(?:@(?P<revision>[^:@]+))?")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TEST: Mapping[str, str] = MappingProxyType({"test": "test"})
BOTH: Mapping[str, str] = MappingProxyType({"train": "train", "test": "test"})
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
    golds: Mapping[str, str] = NONE  # start of a problem with a wrong box in its solution -> its gold answer
    without: Mapping[str, str] = NONE  # a split -> the set whose problems are left out of it


OWN = Source("", template="gsm8k")  # any data set that is not built in: a user's set, or another set on the Hub


DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

SOURCES = {
    "gsm8k": Source(
        "openai/gsm8k", "main", BOTH, {"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"}, template="gsm8k"
    ),
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval",
        columns={"subject": "type"},
        splits=BOTH,
        files={"train": "math/train.jsonl", "test": "math/test_outside_math500.jsonl"},
        # One solution boxes everything but its answer, and one box contains half of a formula.
        golds={
            "Let $\\boxed{N}$ mean the number of whole number divisors": "6",
            "What is the largest value of $x$, if $\\frac{x}{5} + \\frac{1}{5x} = \\frac{1}{2}$?": "2",
        },
        without={"test": "math500"},
    ),
    "math500": Source("HuggingFaceH4/MATH-500", splits=TEST, files={"test": "math500/test.jsonl"}),
    "numina_tir": Source("AI-MO/NuminaMath-TIR", splits=BOTH),
    "numina_cot": Source("AI-MO/NuminaMath-CoT", splits=BOTH),
    "openr1": Source("open-r1/OpenR1-Math-220k", "default", columns={"subject": "problem_type"}),
    "dapo": Source("open-r1/DAPO-Math-17k-Processed", "en", columns={"problem": "prompt", "answer": "solution"}),
    "dapo_original": Source(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        columns={"problem": "prompt", "answer": "reward_model.ground_truth"},
        around=(DAPO_BEFORE, DAPO_AFTER),
    ),
    "deepscaler": Source("agentica-org/DeepScaleR-Preview-Dataset"),
    "big_math": Source("SynthLabsAI/Big-Math-RL-Verified"),
    "deepmath": Source("zwhe99/DeepMath-103K", columns={"problem": "question", "answer": "final_answer"}),
    "polaris": Source("POLARIS-Project/Polaris-Dataset-53K"),
    "aime2024": Source("HuggingFaceH4/aime_2024", splits={"test": "train"}, samples=32, temperature=0.6),
    "aime2025": Source("math-ai/aime25", splits=TEST, samples=32, temperature=0.6),
    "aime2026": Source("MathArena/aime_2026", splits={"test": "train"}, samples=32, temperature=0.6),
    "hmmt_feb_2025": Source("MathArena/hmmt_feb_2025", splits={"test": "train"}, samples=32, temperature=0.6),
    "hmmt_feb_2026": Source("MathArena/hmmt_feb_2026", splits={"test": "train"}, samples=32, temperature=0.6),
    "amc2023": Source("math-ai/amc23", splits=TEST, samples=32, temperature=0.6),
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "OE_TO_maths_en_COMP",
        splits={"test": "train"},
        columns={"problem": "context+question", "answer": "final_answer", "subject": "subfield", "tolerance": "error"},
        absolute=1e-8,
    ),
    "minerva": Source("math-ai/minervamath", splits=TEST, relative=1e-5),
}
SUITES = {"math": ("gsm8k", "math500", "minerva", "olympiadbench", "amc2023", "aime2024", "aime2025")}


class Place(NamedTuple):
    """The parts of a data set's name. ``path`` is a name of `SOURCES`, an id on the Hub, or a path."""

    path: str
    config: str | None = None
    revision: str | None = None


def place_of(dataset: str) -> Place:
    """Split ``path[:config][@revision]``. A path that exists is not split.

    >>> place_of("owner/name:main@1a2b"), place_of("owner/name@v2")
    (Place(path='owner/name', config='main', revision='1a2b'), Place(path='owner/name', config=None, revision='v2'))
    """
    match = NAME.fullmatch(dataset)
    # A file's name may contain ":" or "@".
    if match is None or home(dataset).exists():
        return Place(dataset)
    return Place(**match.groupdict())


def source_of(dataset: str) -> str | None:
    """Return the name of the built-in set with this name or Hub id; None for other data sets."""
    path = place_of(dataset).path
    return next((name for name, source in SOURCES.items() if path in (name, source.hub)), None)


def hub_id(dataset: str) -> str | None:
    """Return the Hub id of a data set that comes from the Hub; None for other data sets.

    >>> hub_id("aime2025"), hub_id("owner/name:main"), hub_id("generated:sums"), hub_id("a/b.jsonl")
    ('math-ai/aime25', 'owner/name', None, None)
    """
    path = place_of(dataset).path
    if name := source_of(dataset):
        return SOURCES[name].hub
    is_file = is_table(path) or home(path).exists()
    return path if HUB_ID.fullmatch(path) and not is_file else None


def folder_of(name: str) -> str:
    """Return a folder name for a data set.

    >>> folder_of("owner/name:main@v1"), folder_of("data/mine.jsonl")
    ('owner_name_main_v1', 'data_mine.jsonl')
    """
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "data"


def listed(data: str) -> list[str]:
    """Split data sets at commas.

    >>> listed("gsm8k, owner/name:main")
    ['gsm8k', 'owner/name:main']
    """
    return [part.strip() for part in data.split(",")]
