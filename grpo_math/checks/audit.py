r"""`grpo-math audit`: the rows of a data set that teach nothing or something wrong, each with its line and the reason.

Gold answers that cannot be graded or that a guess hits, problems that contradict or repeat each other or are in a test
set, prompts that are too long. ``--write_clean`` writes the other rows as they are, and a second file with the rows
that are left out.

Does not ask a model, and does not know whether a gold answer is right.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.checks import Finding
from grpo_math.checks.rewards import DAMAGED, contradictions, is_damaged, not_correct
from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, DataError, UserError, escaped
from grpo_math.grading.equal.text import repaired
from grpo_math.grading.equal.units import measure
from grpo_math.problems import contamination
from grpo_math.problems.datasets import Data, good_rows, load_problems, open_rows
from grpo_math.problems.from_recipe import naming
from grpo_math.problems.prompts import AS_IS
from grpo_math.problems.sources import SOURCES, hub_id, source_name
from grpo_math.problems.stored import Stored, bar, batches
from grpo_math.reading import is_table
from grpo_math.run.files import replace_text
from grpo_math.run.streams import Answer
from grpo_math.settings import recipe
from grpo_math.settings.shipped import target_options

TESTS = "gsm8k,math500"
PROMPT_TOKENS = 512
CHARACTERS = 4  # of a token, about; no tokenizer is loaded
THIRD = 1 / 3
ALIKE = 0.75  # of the words of two problems with the same numbers and the same gold answer
NEIGHBOURS = 50  # earlier problems with the same numbers that a problem is compared with
PROSE = 5  # words
SHOWN = 80  # characters of an example
GRADED = 10_000  # gold answers that are graded at once
SAMPLE = 10_000  # problems that `doctor` reads

WRAPPED = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}|[$~]")
PROOF = re.compile(
    r"\b(?:proofs?|prove[dns]?|q\.?e\.?d|as (?:required|desired)|to be shown|(?:is|have) shown)\b"
    r"|\\(?:blacksquare|square|Box|qed)|∎|证明",
    re.IGNORECASE,
)
NOT_FOUND = re.compile(
    r"[\s\-.?_]*(?:not? ?(?:found|available|provided|given)|no answer|no solution given|n[./]?a|none|null|nan"
    r"|un(?:known|answered|solved)|tbd|todo|error|omitted|missing|\[\]|answers? (?:may|will|can) vary|略|see .*)?"
    r"[\s\-.?_]*",
    re.IGNORECASE,
)
SEVERAL = re.compile(
    r"\S\s*(?:\bor\b|;)\s*\S|(?:^|\s)\(?(?:a|1|i)\)\s.*\s\(?(?:b|2|ii)\)\s|\brespectively\b", re.DOTALL | re.IGNORECASE
)
EQUATIONS = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*=[^=]+\b(?:and|,)\s*[A-Za-z](?:_\{?\w+\}?)?\s*=")
LETTER = re.compile(
    r"(?i:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?\s*)?\(?[A-H]\)?[.:]?|\(?[A-H]\)\s*\S.*"
)
# What Python or JavaScript prints for an object that is not text.
CODE = re.compile(
    r"<[^<>]+ (?:at 0x[0-9a-f]+|object)>|<(?:class|function|built-in) .*>|\[object Object\]|[{\[]\s*'\w+'\s*:.*"
    r"|b'.*'|(?:\w+\.)*(?:Fraction|Decimal|Integer|Rational|Float|float\d*|int\d*|array|tensor|Series|Poly)\(.*\)"
    r"|(?:lambda\b|def |print\().*",
    re.DOTALL,
)
DEGREES = re.compile(r"\^?\{?\\(?:circ|degree)\}?|\\?[%$]?")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


Row = Mapping[str, Any]  # problem, answer, and line


class Fault(NamedTuple):
    """A fault of a row. ``kind`` is counted; ``example`` shows the row."""

    kind: str
    line: int
    example: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="a recipe, or the name or file of a data set")
    add("--write_clean", metavar="FILE", help="write the rows without a fault, and FILE.left_out.jsonl")
    add("--tests", default=TESTS, help=f"sets that must not overlap (default: {TESTS})")
    add("--prompt_tokens", type=int, default=PROMPT_TOKENS, metavar="N", help="the longest problem (default: 512)")


def run(args: argparse.Namespace) -> Answer:
    """Audit the data set, and write the clean rows if a file is named."""
    target = args.config
    is_recipe = Path(target or "").suffix in (".yaml", ".yml")
    is_data = target and not is_recipe and (hub_id(target) or is_table(target) or Path(target).is_dir())
    words = target_options(target, "--dataset", SOURCES, bool(is_data))
    settings = recipe.read_and_set_env([*words, *args.fields]).sound().values
    clean = args.write_clean
    if clean and Path(clean).exists():
        raise ConfigError("write_clean", clean, "exists", "name a new file")
    if clean and not clean.endswith(".jsonl"):
        raise ConfigError("write_clean", clean, "is not a .jsonl file", "the rows are written as lines of JSON")
    data, n, rows, faults = read(settings)
    notes: list[str] = []
    faults += [*row_faults(rows, args.prompt_tokens), *overlap_faults(rows, args.tests, settings, notes)]
    common = most_common(rows)
    faults.sort(key=lambda fault: fault.line)
    kinds = Counter(fault.kind for fault in faults).most_common()
    by_kind = {kind: [fault for fault in faults if fault.kind == kind] for kind, _ in kinds}
    fault_kinds = [
        {"kind": kind, "count": len(same), "line": same[0].line, "example": same[0].example}
        | {"lines": [fault.line for fault in same]}
        for kind, same in by_kind.items()
    ]
    result: dict[str, Any] = {
        "ok": not fault_kinds and not common,
        "rows": n,
        "faults": fault_kinds,
        "left_out": len({fault.line for fault in faults}),
        "most_common": common,
        "notes": notes,
        "files": write_clean(clean, data, faults) if clean else [],
    }
    text = [
        *(f"{one['count']:7,}  {one['kind']}: line {one['line']}, {one['example']}" for one in fault_kinds),
        *([f"{common['count']:7,}  gold answers are {common['answer']!r}: a guess is rewarded"] if common else []),
        *(f"note: {note}" for note in notes),
        *(f"written  {name}" for name in result["files"]),
        f"{'ok' if result['ok'] else 'not ok'}: {result['left_out']:,} of {n:,} rows have a fault",
    ]
    return Answer(result, "\n".join(text), result["ok"] or bool(clean))


def check(setup: Setup) -> Iterator[Finding]:
    """Yield one line for `doctor`, without what other checks report: self-grading, contradictions and test sets."""
    n, sample = len(setup.problems.rows), setup.problems.sample(SAMPLE)
    rows = [{**row, "line": line} for line, row in enumerate(sample, 1)]
    faults = [fault for row in rows for fault in gold_faults(row)] + [*repeated(rows)]
    words = [f"{count} {kind}" for kind, count in Counter(fault.kind for fault in faults).most_common()]
    if common := most_common(rows):
        words += [f"{common['count']} gold answers are {common['answer']!r}"]
    of_all = f" in a sample of {len(rows):,}, one in {-(-n // SAMPLE)} of {n:,} problems," if len(rows) < n else ""
    if words or of_all:
        yield Finding("info", f"data:{of_all} {', '.join(words) or 'nothing found'}; grpo-math audit shows them")


def shown(text: object) -> str:
    return repr(escaped(str(text))[:SHOWN])


def raw_text(raw: Any) -> str:
    return raw.decode(errors="replace").strip() if isinstance(raw, bytes) else json.dumps(raw, default=str)


def read(settings: Any) -> tuple[Data, int, Stored, list[Fault]]:
    """Return the data set, the number of its rows, the rows that can be read, and a fault for each other row."""
    dataset, split = settings["dataset"], settings["dataset_split"]
    if dataset.partition(":")[0] == "generated":
        made = load_problems(dataset, split)
        data = Data("line", dataset, lambda: enumerate(map(dict, made), 1))
    else:
        with naming({"split": "dataset_split"}):
            data = open_rows(dataset, split, settings["columns"])._replace(label="line", file=dataset)
    faults: list[Fault] = []

    def bad(raw: Any, error: DataError) -> None:
        of_answer = error.field in ("answer", *data.accepted["answer"])
        kind = "no gold answer" if of_answer else "rows that cannot be used"
        faults.append(Fault(kind, error.line, f"{error.field} {error.reason}: {shown(raw_text(raw))}"))

    with naming({"split": "dataset_split"}):
        rows = good_rows(data, settings["prompt_template"] == AS_IS, bad)
    n = len(rows) + len(faults)
    if not n:
        raise ConfigError("dataset", dataset, "has no rows", "check the file")
    return data, n, rows, faults


def row_faults(rows: Stored, prompt_tokens: int) -> Iterator[Fault]:
    """Yield the faults of rows, alone and compared with each other."""
    for batch in batches(bar(rows, "reading gold answers", len(rows)), GRADED):
        for row in batch:
            yield from gold_faults(row)
            if len(row["problem"]) > CHARACTERS * prompt_tokens:
                text = f"about {len(row['problem']) // CHARACTERS:,} tokens"
                yield Fault(f"problems longer than {prompt_tokens} tokens", row["line"], text)
        for row, verdict in not_correct(batch, repaired, "boxed"):
            yield Fault("gold answers that are not correct against themselves", row["line"], verdict)
    pairs = contradictions(rows)
    for row, other in [*pairs, *((other, one) for one, other in pairs)]:
        text = f"{shown(row['answer'])}, line {other['line']} has {shown(other['answer'])}"
        yield Fault("contradictory gold answers", row["line"], text)
    yield from repeated(rows)


def gold_faults(row: Row) -> Iterator[Fault]:
    """Yield at most one fault of a gold answer.

    >>> golds = ({"answer": text, "line": 1} for text in ("7", "the second", "cm", "5 or 7"))
    >>> [fault.kind for gold in golds for fault in gold_faults(gold)]
    ['gold answers that are a unit only', 'gold answers with several answers']
    """
    gold = row["answer"]
    plain = WRAPPED.sub(r"\1", gold).strip()
    # A LaTeX command is not a word of prose.
    words = WORD.findall(re.sub(r"\\[A-Za-z]+|\$[^$]*\$", " ", gold.replace("\\text", "")))
    # One letter may be a variable.
    unit = measure(f"\\text{{{plain}}}" if len(plain) > 1 else plain)
    is_phrase = re.match("(?:an?|the) ", plain, re.IGNORECASE)
    kinds = {
        "gold answers that are code objects": CODE.fullmatch(gold),
        "gold answers that are proofs": PROOF.search(gold),
        "no gold answer": NOT_FOUND.fullmatch(plain),
        "multiple-choice letters": LETTER.fullmatch(plain),
        "gold answers that are a unit only": (unit and not is_phrase) or DEGREES.fullmatch(plain),
        "gold answers with several answers": SEVERAL.search(gold) or EQUATIONS.search(plain),
        f"gold answers that are {DAMAGED}": is_damaged(gold),
        "gold answers in prose, which nobody can match": len(words) >= PROSE,
    }
    for kind in [kind for kind, matched in kinds.items() if matched][:1]:
        yield Fault(kind, row["line"], shown(gold))


def repeated(rows: Stored | Sequence[Row]) -> Iterator[Fault]:
    """Yield the problems that repeat an earlier one: the same numbers in order, gold answer, and most words."""
    # Hashes first, because the words of all problems take much memory, and few have the same numbers and answer.
    keys = [hash(_numbers_and_gold(row)) for row in bar(rows, "comparing problems", len(rows))]
    counts = Counter(keys)
    earlier: dict[Any, list[tuple[set[str], int]]] = {}
    for row in compress(rows, (counts[key] > 1 for key in keys)):
        neighbours = earlier.setdefault(_numbers_and_gold(row), [])
        distinct = {*contamination.words(row["problem"])}
        near = [line for other, line in neighbours if len(distinct & other) >= ALIKE * len(distinct | other)]
        if near:
            yield Fault("near-duplicate problems", row["line"], f"as line {near[0]}: {shown(row['problem'])}")
        elif len(neighbours) < NEIGHBOURS:
            neighbours.append((distinct, row["line"]))


def _numbers_and_gold(row: Row) -> tuple[tuple[str, ...], str]:
    return tuple(word for word in contamination.words(row["problem"]) if not word.isalpha()), row["answer"]


def overlap_faults(rows: Stored, names: str, settings: Any, notes: list[str]) -> Iterator[Fault]:
    """Yield the problems that are in a test set, by the rule of problems/contamination.py."""
    sets: dict[str, Any] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if source_name(settings["dataset"]) == name and not settings["dataset_split"].startswith("train"):
            continue
        try:
            sets[name] = load_problems(name, "test", skip_bad_rows=True)
        except UserError as error:
            notes.append(f"not compared with {name}: {error}")
    for row, equal, similar in contamination.matches(sets, rows):
        for name in sorted({name for name, _ in equal | similar}):
            yield Fault(f"problems of {name}, a test set", row["line"], shown(row["problem"]))


def most_common(rows: Stored | Sequence[Row]) -> dict[str, Any] | None:
    """Return the most common gold answer if a third of the rows have it."""
    counted = Counter(row["answer"] for row in rows).most_common(1)
    return next(({"answer": text, "count": n} for text, n in counted if n >= max(2, THIRD * len(rows))), None)


def write_clean(name: str, data: Data, faults: Sequence[Fault]) -> list[str]:
    """Write the rows without a fault, and next to them the others with their lines and reasons. Return the names."""
    reasons: dict[int, list[str]] = {}
    for fault in faults:
        reasons.setdefault(fault.line, []).append(f"{fault.kind}: {fault.example}")
    others = (
        json.dumps({"line": line, "reasons": reasons[line], "row": raw_text(raw)}, ensure_ascii=False)
        for line, raw in data.rows()
        if line in reasons
    )
    files = {
        name: (raw_text(raw) for line, raw in data.rows() if line not in reasons),
        f"{name}.left_out.jsonl": others,
    }
    for path, lines in files.items():
        replace_text(Path(path), (f"{line}\n" for line in lines))
    return list(files)
