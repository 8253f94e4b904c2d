"""Prepare a run's completions for the page's viewer: for each source its rows, filters and sort keys."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from grpo_math.evaluation.summary import Record
from grpo_math.report.run_dir import RunDir
from grpo_math.rewards.inputs import completion_text
from grpo_math.run.metrics import CATEGORIES

CHANGES = {(0, 1): "wrong to correct", (1, 0): "correct to wrong", (1, 1): "correct twice", (0, 0): "wrong twice"}
MOST_TEXT = 20_000_000  # characters of all completions of a source: more would be too large for a browser
# Columns that the page shows separately.
SEPARATE_COLUMNS = (
    "step",
    "group",
    "prompt",
    "completion",
    "problem_id",
    "gold",
    "verdict",
    "id",
    "problem",
    "category",
)

# A row of a table of completions or of an evaluation.
Row = Mapping[str, Any]


class Section(NamedTuple):
    """Rows of one kind, and the words for values of their fields.

    A row is a problem: its ``title``, ``question``, whole ``prompt`` and ``completions``, the values for the filters
    (``fields``) and for sorting (``keys``). A completion has a ``label``, ``badge``, ``facts`` and ``note``, and its
    ``turns``: (kind, text) with the kind text, call or output, or "" for a single turn.
    """

    name: str
    rows: list[dict[str, Any]]
    labels: dict[str, str]


def sources(run: RunDir, compared: bool) -> list[Section]:
    """Return the sources that have rows, evenly thinned if they are too large.

    ``compared``: the evaluations before and after are of the same problems.
    """
    heldout = Section("Held-out problems", _heldout(run, compared), CATEGORIES)
    # groupby joins neighbours only. A group's completions are neighbours, as TRL's sampler repeats each prompt.
    groups = [list(rows) for _, rows in groupby(run.completions, key=itemgetter("step", "group"))]
    training = Section("Training completions", [_training(rows) for rows in groups], {})
    shown = []
    for source in filter(attrgetter("rows"), (heldout, training)):
        size = sum(len(text) for row in source.rows for one in row["completions"] for _, text in one["turns"])
        stride = -(-size // MOST_TEXT) or 1
        if stride > 1:
            run.notes.append(f"{source.name}: one row in {stride} is shown; all rows are in the files")
        shown.append(source._replace(rows=source.rows[::stride]))
    for source in shown:
        _leave_out_constants([one["facts"] for row in source.rows for one in row["completions"]])
    return shown


def _leave_out_constants(facts: Sequence[dict[str, Any]]) -> None:
    """Remove the number of a sample and the level from all completions if every completion has the same."""
    for name in ("sample", "level"):
        if len({str(one.get(name)) for one in facts}) == 1:
            for one in facts:
                one.pop(name, None)


def _heldout(run: RunDir, compared: bool) -> list[dict[str, Any]]:
    """Return a row per problem and sample. Evaluations that are not comparable do not share rows."""
    problems: dict[Any, dict[str, Record]] = {}
    for name, evaluation in run.sides.items():
        for record in evaluation.records:
            problems.setdefault((record.key, compared or name), {})[name] = record
    items = []
    for sides in problems.values():
        record = next(iter(sides.values()))
        fields = {name: [side.category] for name, side in sides.items()}
        if len(sides) == 2:
            was, now = (int(side.right) for side in sides.values())
            fields = {"change": [CHANGES[was, now]], **fields}
        items.append(
            {
                "title": {"": record.id, "gold": record.gold},
                "question": record.problem,
                "completions": [_completion(name, side.category, side.to_dict()) for name, side in sides.items()],
                "fields": fields,
                "keys": {f"tokens {name}": side.tokens for name, side in sides.items()},
            }
        )
    return items


def _training(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the row of a group: a problem's completions in one step."""
    first, prompt = rows[0], rows[0]["prompt"]
    badges = [row["verdict"] or "" for row in rows]
    completions = [
        _completion(f"completion {number}", badge, row)
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
    notes = [completion["note"] for completion in completions]
    prompt_text = (
        ""
        if isinstance(prompt, str)
        else "\n\n".join(f"{m['role']}: {completion_text([m], m['role'])}" for m in prompt)
    )
    return {
        "title": title,
        "question": completion_text(prompt, "user"),
        "prompt": prompt_text,
        "completions": completions,
        "fields": {"step": [str(first["step"])], "verdict": badges, "note": notes},
        "keys": keys,
    }


def _completion(label: str, badge: str, row: Row) -> dict[str, Any]:
    """Return a completion with the facts about it: the extracted answer, each reward, the length."""
    text = completion_text(row["completion"])
    return {
        "label": label,
        "badge": badge,
        "facts": {name: value for name, value in row.items() if name not in SEPARATE_COLUMNS},
        "note": why(row, text),
        "turns": turn_pieces(row["completion"]) or [("", text)],
    }


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
    if verdict == "correct":
        return "correct, but outside the format" if row.get("in_format") is False else ""
    if row.get("truncated"):
        return "cut at the length limit"
    # The gold answer 7 is not in 17, 0.7 or 70.
    gold = re.escape(str(row.get("gold"))[:200])
    if verdict and re.search(rf"(?<![\d.]){gold}(?!\d)", text):
        return "contains the gold answer, but another was extracted"
    return ""


def turn_pieces(completion: object) -> list[tuple[str, str]]:
    """Return a completion with tool calls as (kind, content): text, call and output; [] for one turn of text.

    >>> call = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    >>> turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "7"},
    ...          {"role": "assistant", "content": "#### 7"}]
    >>> turn_pieces(turns)
    [('call', '{"name": "add", "arguments": {"a": 3, "b": 4}}'), ('output', '7'), ('text', '#### 7')]
    >>> turn_pieces(turns[2:]), turn_pieces([]), turn_pieces("text"), turn_pieces(None)
    ([], [], [], [])
    """
    turns: list[tuple[str, str]] = []
    for message in completion if isinstance(completion, list) else ():
        if text := completion_text([message], message["role"]):
            turns.append(("output" if message["role"] == "tool" else "text", text))
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        turns += [("call", json.dumps(call, ensure_ascii=False, default=str)) for call in calls]
    return turns if any(kind != "text" for kind, _ in turns) else []
