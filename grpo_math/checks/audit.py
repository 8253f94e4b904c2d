r"""The rows of a data set that teach nothing or something wrong, each with its line and the reason.

row_kinds.py has the faults of a single row. Here are those of rows that are compared: gold answers that contradict or
do not equal themselves, problems that repeat each other or are in a test set, prompts that are too long.
``--write_clean`` writes the rows that can teach, as they are, and a second file with the others.

Does not ask a model, and does not know whether a gold answer is right.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo_math.checks import row_kinds
from grpo_math.checks.check_rewards import BAD_SHARE, contradictions, not_correct, verdicts
from grpo_math.checks.check_services import cache_only
from grpo_math.checks.golds import WHOLE_NUMBER, decimal_commas, in_words, plain, readings
from grpo_math.checks.row_kinds import (
    CHOICES,
    CONTRADICTORY,
    IN_A_TEST,
    IN_PROSE,
    LONG,
    NEVER_CORRECT,
    NO_ANSWER,
    NOT_BARE,
    NOT_CORRECT,
    OWN_TEXT,
    REPEATED,
    UNUSABLE,
    shown,
)
from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, DataError, Finding, UserError
from grpo_math.grading import Verdict
from grpo_math.grading.equal.text import repaired
from grpo_math.problems import contamination, stored
from grpo_math.problems.datasets import Data, good_rows, load_problems, open_rows
from grpo_math.problems.from_recipe import renamed_error_fields
from grpo_math.problems.prompts import AS_IS
from grpo_math.problems.rows import HALF
from grpo_math.problems.sources import source_name
from grpo_math.problems.stored import Stored, bar, batches
from grpo_math.run.files import replace_text
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.reading import Unreadable, from_json

logger = logging.getLogger(__name__)

TESTS = "gsm8k,math500"
PROMPT_TOKENS = 512
CHARACTERS = 4  # of a token, about; no tokenizer is loaded
THIRD, NEARLY_ALL = 1 / 3, 0.8
ALIKE = 0.75  # of the words of two problems with the same numbers and the same gold answer
NEIGHBOURS = 50  # earlier problems with the same numbers that a problem is compared with
EXAMPLES = 3  # of a kind
GRADED = 10_000  # gold answers that are graded at once
SAMPLE = 20_000  # problems that `doctor` reads
COLUMN = "bare_answer"  # of --bare_numbers


Row = Mapping[str, Any]  # problem, answer, and line
# A line and its fault: the check is the kind, the message shows the row.
Fault = tuple[int, Finding]


def audit(
    settings: RunSettings, tests: str, prompt_tokens: int, clean: str | None, bare_numbers: bool, keep_choices: bool
) -> tuple[dict[str, Any], str]:
    """Audit the data set of a recipe, and write the clean rows to ``clean``. Return the result, and the result as text.

    ``tests``: the data sets that must not overlap. ``prompt_tokens``: the longest prompt.
    """
    note = cache_only([settings.dataset, *tests.split(",")])
    notes = [note] if note else []
    data, n, rows, faults = read(settings)
    golds = [row["answer"] for row in rows]
    commas = decimal_commas(golds)
    faults += [*row_faults(rows, prompt_tokens, commas), *overlap_faults(rows, tests, settings, notes)]
    if keep_choices:
        faults = [(line, one._replace(level="warning") if one.check == CHOICES.name else one) for line, one in faults]
    common = most_common(golds)
    bare = {row["line"]: plain(row["answer"], commas) for row in rows} if bare_numbers else {}
    faults += bare_faults(rows, bare)
    faults.sort(key=itemgetter(0))
    # A number in the new column replaces the words.
    mended = {row["line"] for row in rows if bare[row["line"]] != row["answer"]} if bare else set()
    left_out = [
        (line, one)
        for line, one in faults
        if one.level == "error" and not (line in mended and one.check in (IN_PROSE.name, NOT_CORRECT.name))
    ]
    read_as = readings(golds)
    left_out_lines = {line for line, _ in left_out}
    result: dict[str, Any] = {
        "ok": len(left_out_lines) < n if clean else not faults and not common,
        "rows": n,
        "read_as": {name: len(some) for name, some in read_as.items()},
        "faults": [*by_kind(faults)],
        "left_out": len(left_out_lines),
        "most_common": common,
        "notes": notes,
        "files": write_clean(clean, data, left_out, bare) if clean else [],
    }
    return result, "\n".join(lines(result, read_as))


def by_kind(faults: Sequence[Fault]) -> Iterator[dict[str, Any]]:
    """Yield each kind of fault with its rows, the most frequent kind first."""
    for name, count in Counter(one.check for _, one in faults).most_common():
        same = [(line, one) for line, one in faults if one.check == name]
        yield {
            "kind": name,
            "count": count,
            "remedy": same[0][1].remedy,
            "left_out": same[0][1].level == "error",
            "examples": [f"line {line}, {one.message}" for line, one in same[:EXAMPLES]],
            "lines": [line for line, _ in same],
        }


def lines(result: Mapping[str, Any], read_as: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the lines of the text output."""
    yield f"gold answers as the grader reads them: {in_words(read_as)}"
    for one in result["faults"]:
        yield f"{one['count']:7,}  {one['kind']}: {one['remedy']} ({'left out' if one['left_out'] else 'kept'})"
        yield from (f"         {example}" for example in one["examples"])
    if common := result["most_common"]:
        yield f"{common['count']:7,}  gold answers are {common['answer']!r}: a guess is rewarded"
    yield from (f"note: {note}" for note in result["notes"])
    yield from (f"written  {name}" for name in result["files"])
    faulty = len({line for one in result["faults"] for line in one["lines"]})
    end = f", {result['rows'] - result['left_out']:,} are written" * bool(result["files"])
    yield f"{'ok' if result['ok'] else 'not ok'}: {faulty:,} of {result['rows']:,} rows have a fault{end}"


def check(setup: Setup) -> Iterator[Finding]:
    """Yield one line for `doctor`, without what other checks report: self-grading, contradictions and test sets."""
    n, sample = len(setup.problems.rows), setup.problems.sample(SAMPLE)
    rows = [{**row, "line": line} for line, row in enumerate(sample, 1)]
    faults = [*single_faults(rows), *repeated(rows)]
    lost = {line: one.message for line, one in faults if one.check in NEVER_CORRECT}
    if len(lost) > BAD_SHARE * len(rows):
        message = f"{len(lost)} of {len(rows)} gold answers are not values that an answer can match"
        remedy = "grpo-math audit RECIPE --write_clean FILE leaves them out"
        yield Finding("error", f"{message}; the first is {next(iter(lost.values()))}", remedy)
    words = [f"{count} {kind}" for kind, count in Counter(one.check for _, one in faults).most_common()]
    if common := most_common([str(row["answer"]) for row in rows]):
        count, answer = common["count"], common["answer"]
        if count < NEARLY_ALL * len(rows):
            words += [f"{count} gold answers are {answer!r}"]
        else:
            message = f"{count} of {len(rows)} gold answers are {answer!r}, so a model can learn to write it always"
            yield Finding("warning", message, "check the data, and which column has the answer")
    of_all = f" in {len(rows):,} of {n:,} problems, evenly spread:" if len(rows) < n else ""
    if words or of_all:
        yield Finding("info", f"data:{of_all} {', '.join(words) or 'no fault'}; grpo-math audit RECIPE shows them")


def raw_text(raw: Any) -> str:
    """Return a row as one line of JSON, in which text is text and not codes, unless a code is half a character.

    >>> raw_text(b'{"answer":1e2}'), raw_text(rb'{"answer":"\\u00e9"}')
    ('{"answer":1e2}', '{"answer": "é"}')
    """
    if isinstance(raw, bytes):
        text = raw.decode(errors="replace").strip()
        if "\\u" not in text:
            return text
        try:
            raw = from_json(text)
        except Unreadable:
            return text
    text = json.dumps(raw, ensure_ascii=False, default=str)
    return json.dumps(raw, default=str) if HALF.search(text) else text


def read(settings: Any) -> tuple[Data, int, Stored, list[Fault]]:
    """Return the data set, the number of its rows, the rows that can be read, and a fault for each other row."""
    dataset, split = settings.dataset, settings.dataset_split
    faults: list[Fault] = []
    first: list[DataError] = []

    def bad(raw: Any, error: DataError) -> None:
        kind = NO_ANSWER if error.field in ("answer", *data.accepted["answer"]) else UNUSABLE
        faults.append((error.line, kind.finding(f"{error.field} {error.reason}: {shown(raw_text(raw))}")))
        first[:] = first or [error]

    with renamed_error_fields({"split": "dataset_split"}):
        data = open_rows(dataset, split, settings.columns)._replace(label="line", file=dataset)
        rows = good_rows(data, settings.prompt_template == AS_IS, bad, logger.warning)
    if not rows:
        raise first[0] if first else ConfigError("dataset", dataset, "has no rows", "check the file")
    return data, len(rows) + len(faults), rows, faults


def single_faults(rows: Stored | Sequence[Row]) -> Iterator[Fault]:
    """Yield the faults that a row shows alone."""
    for row in bar(rows, "reading each problem", len(rows)):
        for fault in row_kinds.faults(row):
            yield row["line"], fault


def row_faults(rows: Stored, prompt_tokens: int, commas: bool) -> Iterator[Fault]:
    """Yield the faults of rows, alone, graded, and compared with each other."""
    yield from single_faults(rows)
    as_plain = partial(plain, commas=commas)
    # In batches, because the completions and grades of all rows take much memory.
    for batch in batches(bar(rows, "grading gold answers", len(rows)), GRADED):
        for row in batch:
            if len(row["problem"]) > CHARACTERS * prompt_tokens:
                yield row["line"], LONG.finding(f"about {len(row['problem']) // CHARACTERS:,} tokens", prompt_tokens)
        others = [row for row in batch if not WHOLE_NUMBER.fullmatch(row["answer"])]
        for row, verdict in not_correct(others, repaired, "boxed"):
            yield row["line"], NOT_CORRECT.finding(verdict)
        changed = [row for row in others if as_plain(row["answer"]) != row["answer"]]
        for row, verdict in not_correct(changed, as_plain, "boxed"):
            yield row["line"], OWN_TEXT.finding(f"{shown(row['answer'])}: {verdict}")
    pairs = contradictions(rows)
    for row, other in [*pairs, *((other, one) for one, other in pairs)]:
        text = f"{shown(row['answer'])}, line {other['line']} has {shown(other['answer'])}"
        yield row["line"], CONTRADICTORY.finding(text)
    yield from repeated(rows)


def repeated(rows: Stored | Sequence[Row]) -> Iterator[Fault]:
    """Yield the problems that repeat an earlier one: the same numbers in order, gold answer, and most words."""
    # Hashes of digits first, because words take much time and memory, and few problems have the same digits and answer.
    several = stored.repeated(
        hash((re.sub(r"\D+", "", row["problem"]), row["answer"])) for row in bar(rows, "comparing problems", len(rows))
    )
    earlier: dict[Any, list[tuple[set[str], int]]] = {}
    for row in compress(rows, several):
        words = contamination.words(row["problem"])
        numbers, distinct = tuple(word for word in words if not word.isalpha()), {*words}
        neighbours = earlier.setdefault((numbers, row["answer"]), [])
        near = [line for other, line in neighbours if len(distinct & other) >= ALIKE * len(distinct | other)]
        if near:
            yield row["line"], REPEATED.finding(f"as line {near[0]}: {shown(row['problem'])}")
        elif len(neighbours) < NEIGHBOURS:
            neighbours.append((distinct, row["line"]))


def bare_faults(rows: Stored, bare: Mapping[int, str]) -> Iterator[Fault]:
    """Yield the rows whose own gold answer is not correct against its number, which would replace it."""
    changed = (row for row in rows if bare and bare[row["line"]] != row["answer"])
    for batch in batches(changed, GRADED):
        golds, answers = [bare[row["line"]] for row in batch], [repaired(row["answer"]) for row in batch]
        for row, verdict in zip(batch, verdicts(golds, answers, "boxed"), strict=True):
            if verdict is not Verdict.CORRECT:
                text = f"{shown(row['answer'])} is {verdict} against {bare[row['line']]!r}"
                yield row["line"], NOT_BARE.finding(text)


def overlap_faults(rows: Stored, names: str, settings: Any, notes: list[str]) -> Iterator[Fault]:
    """Yield the problems that are in a test set, by the rule of problems/contamination.py."""
    sets: dict[str, Any] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if source_name(settings.dataset) == name and not settings.dataset_split.startswith("train"):
            continue
        try:
            sets[name] = load_problems(name, "test", skip_bad_rows=True)
        except UserError as error:
            notes.append(f"not compared with {name}: {error}")
    for row, equal, similar in contamination.matches(sets, rows):
        for name in sorted({name for name, _ in equal | similar}):
            yield row["line"], IN_A_TEST.finding(shown(row["problem"]), name)


def most_common(golds: Sequence[str]) -> dict[str, Any] | None:
    """Return the most common gold answer if it is a third of them. Equal numbers are one answer.

    >>> most_common(["9", "9.0", "Yes", "2"])
    {'answer': '9', 'count': 2}
    """
    keys = [_key(gold) for gold in golds]
    for key, n in Counter(keys).most_common(1):
        if n >= max(2, THIRD * len(golds)):
            return {"answer": golds[keys.index(key)], "count": n}
    return None


def _key(gold: str) -> float | str:
    try:
        return float(gold)
    except ValueError:
        return gold.strip().casefold()


def write_clean(name: str, data: Data, left_out: Sequence[Fault], bare: Mapping[int, str]) -> list[str]:
    """Write the rows without a fault of ``left_out``, and the others with lines and reasons. Return the files' names.

    ``bare`` has a plain number for the gold answers of some lines, which is written in a new column.
    """
    reasons: dict[int, list[str]] = {}
    for line, fault in left_out:
        reasons.setdefault(line, []).append(f"{fault.check}: {fault.message}")

    others = (
        json.dumps({"line": line, "reasons": reasons[line], "row": raw_text(raw)}, ensure_ascii=False)
        for line, raw in data.rows()
        if line in reasons
    )
    kept = ((line, raw_text(raw)) for line, raw in data.rows() if line not in reasons)
    texts = (
        json.dumps(json.loads(text) | {COLUMN: bare[line]}, ensure_ascii=False) if bare else text for line, text in kept
    )
    files = {name: texts, f"{name}.left_out.jsonl": others}
    for path, lines in files.items():
        replace_text(Path(path), (f"{line}\n" for line in lines))
    return list(files)
