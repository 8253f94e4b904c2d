"""Prepare a run's completions for the page's viewer: for each source its rows, filters and sort keys.

Does not read files or write HTML: page.html does.
"""

import json
import re
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from grpo_math.report.run_dir import Run
from grpo_math.rewards.columns import text_of
from grpo_math.run.metrics import CATEGORIES, RIGHT

CHANGES = {(0, 1): "wrong to correct", (1, 0): "correct to wrong", (1, 1): "correct twice", (0, 0): "wrong twice"}
MOST_TEXT = 20_000_000  # characters of all completions of a source: more would be too large for a browser
# Columns that the page shows separately.
APART = ("step", "group", "prompt", "completion", "problem_id", "gold", "verdict", "id", "problem", "category", "turns")

Row = Mapping[str, Any]


class Side(NamedTuple):
    """A completion. ``turns`` are (kind, text) with the kind said, code or output, or "" for a single turn."""

    label: str
    badge: str
    facts: dict[str, Any]
    note: str
    turns: list[tuple[str, str]]


class Item(NamedTuple):
    """A problem with its completions. ``fields`` are the values for the filters, ``keys`` for sorting."""

    title: dict[str, Any]
    question: str
    prompt: str
    sides: list[Side]
    fields: dict[str, list[str]]
    keys: dict[str, Any]


class Source(NamedTuple):
    """Rows of one kind. ``labels`` are words for values of the fields."""

    name: str
    rows: list[Item]
    labels: dict[str, str]


def sources(run: Run) -> list[Source]:
    """Return the sources that have rows, evenly thinned if they are too large."""
    known = [Source("Held-out problems", _heldout(run), CATEGORIES)]
    # groupby joins neighbours only. A group's completions are neighbours, because TRL's sampler repeats each prompt.
    groups = groupby(run.completions, key=itemgetter("step", "group"))
    known.append(Source("Training completions", [_training(list(rows)) for _, rows in groups], {}))
    shown = []
    for source in filter(lambda source: source.rows, known):
        size = sum(len(text) for row in source.rows for side in row.sides for _, text in side.turns)
        stride = -(-size // MOST_TEXT) or 1
        if stride > 1:
            run.notes.append(f"{source.name}: one row in {stride} is shown; all rows are in the files")
        shown.append(source._replace(rows=source.rows[::stride]))
    return shown


def _heldout(run: Run) -> list[Item]:
    """Return a row per problem and sample. Evaluations that are not comparable do not share rows."""
    problems: dict[Any, dict[str, Row]] = {}
    for name, results in run.sides.items():
        for row in results["rows"]:
            key = (row["id"], row.get("sample"), run.comparison is not None or name)
            problems.setdefault(key, {})[name] = row
    items = []
    for sides in problems.values():
        row = next(iter(sides.values()))
        fields = {name: [side["category"]] for name, side in sides.items()}
        if len(sides) == 2:
            was, now = (int(side["category"] in RIGHT) for side in sides.values())
            fields = {"change": [CHANGES[was, now]], **fields}
        keys = {f"tokens {name}": side["tokens"] for name, side in sides.items() if "tokens" in side}
        completions = [_side(name, str(side["category"]), side) for name, side in sides.items()]
        title = {"": row["id"], "gold": row.get("gold")}
        items.append(Item(title, str(row.get("problem")), "", completions, fields, keys))
    return items


def _training(rows: list[Row]) -> Item:
    """Return the row of a group: a problem's completions in one step."""
    first, prompt = rows[0], rows[0]["prompt"]
    badges = [row["verdict"] or "" for row in rows]
    sides = [
        _side(f"completion {number}", badge, row)
        for number, (badge, row) in enumerate(zip(badges, rows, strict=True), 1)
    ]
    title = {"step": first["step"], "problem": first["problem_id"], "gold": first["gold"]}
    if any(badges):
        title["correct"] = f"{badges.count('correct')} of {len(badges)}"
    keys = {"step": first["step"], "length": max(row["tokens"] for row in rows)}
    if rewards := [row["reward"] for row in rows if row["reward"] is not None]:
        # A group without spread has no gradient.
        keys |= {"spread of rewards": pstdev(rewards), "mean reward": fmean(rewards)}
        title["rewards"] = f"{min(rewards):.3g} to {max(rewards):.3g}"
    fields = {"step": [str(first["step"])], "verdict": badges, "note": [side.note for side in sides]}
    whole = "" if isinstance(prompt, str) else "\n\n".join(f"{m['role']}: {text_of([m], m['role'])}" for m in prompt)
    return Item(title, text_of(prompt, "user"), whole, sides, fields, keys)


def _side(label: str, badge: str, row: Row) -> Side:
    """Return a completion with the facts about it: the extracted answer, each reward, the length."""
    turns = turns_of(row.get("turns") or row["completion"])
    text = text_of(row["completion"])
    facts = {name: value for name, value in row.items() if name not in APART}
    return Side(label, badge, facts, why(row, text), turns or [("", text)])


def why(row: Row, text: str) -> str:
    """Return why a completion was not rewarded in full or not counted, or "" if that needs no explanation.

    ``row`` is a row of a training table or of an evaluation.

    >>> why({"verdict": "correct", "in_format": False, "gold": "7"}, "It is 7.")
    'correct, but outside the format'
    >>> why({"verdict": "wrong", "extracted": "3", "gold": "7"}, "3 + 4 = 7, so #### 3")
    'contains the gold answer, but another was extracted'
    """
    verdict = row.get("verdict")
    if verdict in ("crash", "bad_gold"):
        return "not graded, so it is left out of its group"
    if verdict == "uncheckable":
        return "the answer is too large, or takes too long to compute"
    if verdict == "correct":
        return "correct, but outside the format" if row.get("in_format") is False else ""
    if row.get("truncated"):
        return "cut at the length limit"
    # The gold answer 7 is not in 17, 0.7 or 70.
    gold = re.escape(str(row.get("gold"))[:200])
    if verdict and re.search(rf"(?<![\d.]){gold}(?!\d)", text):
        return "contains the gold answer, but another was extracted"
    return "no answer was found" if verdict == "no_answer" else ""


def turns_of(completion: object) -> list[tuple[str, str]]:
    """Return a completion with tool calls as (kind, text): said, code and output; [] for one turn of text.

    >>> call = {"function": {"name": "python", "arguments": {"code": "print(3 + 4)"}}}
    >>> turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "7"},
    ...          {"role": "assistant", "content": "#### 7"}]
    >>> turns_of(turns)
    [('code', 'print(3 + 4)'), ('output', '7'), ('said', '#### 7')]
    """
    turns: list[tuple[str, str]] = []
    for message in completion if isinstance(completion, list) else ():
        if text := text_of([message], message["role"]):
            output = f"output, {message['status']}" if message.get("status") else "output"
            turns.append((output if message["role"] == "tool" else "said", text))
        turns += [("code", _code(call["function"])) for call in message.get("tool_calls") or ()]
    return turns if any(kind != "said" for kind, _ in turns) else []


def _code(function: dict[str, Any]) -> str:
    """Return the program of a call of the tool python, or any other call as JSON."""
    arguments = [value for value in function["arguments"].values() if value is not None]
    if function["name"] == "python" and len(arguments) == 1:
        return str(arguments[0])
    return json.dumps(function, ensure_ascii=False, default=str)
