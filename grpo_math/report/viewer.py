"""A run's completions -> the rows of the page's viewer: for each source its rows, its filters and its sort orders.

Does not read files, and does not write HTML: page.html does.
"""

import json
from typing import Any, NamedTuple

from grpo_math.report.groups import KNOWN, Group, Row, groups, is_number, why
from grpo_math.report.run_dir import Run
from grpo_math.report.text import prompt_of, shown, text_of
from grpo_math.run.metrics import CATEGORIES, RIGHT

CHANGES = {(0, 1): "wrong to right", (1, 0): "right to wrong", (1, 1): "right both times", (0, 0): "wrong both times"}
MOST_TEXTS = 20_000_000  # characters of all texts of a source


class Side(NamedTuple):
    """A completion. ``turns`` are (kind, text): one without a kind, or what was said, code and output."""

    label: str
    badge: str
    facts: str
    note: str
    turns: list[tuple[str, str]]


class Item(NamedTuple):
    """A problem with its completions. ``fields`` are what the filters look at, ``keys`` what it is sorted by."""

    title: str
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

    @property
    def filters(self) -> dict[str, list[str]]:
        """The values of each field that differs between rows."""
        found: dict[str, dict[str, None]] = {}
        for row in self.rows:
            for field, values in row.fields.items():
                found.setdefault(field, {}).update(dict.fromkeys(values))
        return {field: list(values) for field, values in found.items() if len(values) > 1}

    @property
    def sorts(self) -> list[str]:
        """The keys whose numbers differ between rows."""
        names = dict.fromkeys(name for row in self.rows for name in row.keys)
        return [name for name in names if len({row.keys.get(name) for row in self.rows}) > 1]


def sources(run: Run, comparable: bool) -> list[Source]:
    """Return the sources that have rows. ``comparable``: a problem's completions before and after are one row."""
    heldout = Source("Held-out problems", _heldout(run, comparable), CATEGORIES)
    training = Source("Training completions", _training(run), {})
    return [source._replace(rows=_bounded(source, run)) for source in (heldout, training) if source.rows]


def _bounded(source: Source, run: Run) -> list[Item]:
    """Leave out the rows that would make the page too large for a browser, and note it."""
    rows, size = source.rows, 0
    for place, row in enumerate(rows):
        size += sum(len(text) for side in row.sides for _, text in side.turns)
        if size > MOST_TEXTS and place:
            run.notes.append(f"{source.name}: the first {place:,} of {len(rows):,} are shown; all are in the files")
            return rows[:place]
    return rows


def _heldout(run: Run, comparable: bool) -> list[Item]:
    problems: dict[Any, dict[str, Row]] = {}
    for name, results in (("before", run.before), ("after", run.after)):
        for row in results["rows"] if results else ():
            key = (row["id"], row.get("sample"), comparable or name)
            problems.setdefault(key, {})[name] = row
    found = []
    for sides in problems.values():
        row = next(iter(sides.values()))
        fields = {name: [str(side["category"])] for name, side in sides.items()}
        if len(sides) == 2:
            was, now = (int(side["category"] in RIGHT) for side in sides.values())
            fields = {"change": [CHANGES[was, now]], **fields}
        keys = {f"tokens {name}": side["tokens"] for name, side in sides.items() if is_number(side.get("tokens"))}
        title = f"{str(row['id'])[:80]}, gold {_short(row.get('gold'))}"
        templates = {name: getattr(run, name).get("template") or "" for name in sides}
        completions = [_heldout_side(name, side, templates[name]) for name, side in sides.items()]
        found.append(Item(title, shown(text_of(row.get("problem"))), "", completions, fields, keys))
    return found


def _heldout_side(name: str, row: Row, template: str) -> Side:
    text = text_of(row["completion"])
    facts = ["no answer" if row.get("answer") is None else f"answer {_short(row['answer'])}"]
    facts += [f"{row['tokens']} tokens"] if row.get("tokens") is not None else []
    facts += [f"{row['calls']} calls, {row.get('failures')} failed"] if "calls" in row else []
    turns = turns_of(row.get("turns")) or [("", shown(text))]
    return Side(name, str(row["category"]), ", ".join(facts), why(row, text, template), turns)


def _training(run: Run) -> list[Item]:
    template, found = str(run.config.get("answer_format") or run.config.get("prompt_template") or ""), []
    for group in groups(run.completions):
        sides = [_training_side(number, row, template) for number, row in enumerate(group.rows, start=1)]
        verdicts = dict.fromkeys(str(row["verdict"]) for row in group.rows if row.get("verdict"))
        fields = {"step": [str(group.step)], "verdict": list(verdicts), "holds": _kinds(group, sides)}
        unit = "tokens" if group.rows[0].get("tokens") is not None else "characters"
        longest = max(row.get("tokens") or len(text_of(row.get("completion"))) for row in group.rows)
        keys = {"spread of rewards": group.spread, "mean reward": group.mean, "step": group.step}
        keys = {name: value for name, value in (keys | {f"most {unit}": longest}).items() if is_number(value)}
        question, prompt = map(shown, prompt_of(group.rows[0].get("prompt")))
        found.append(Item(group.title, question, prompt, sides, fields, keys))
    return found


def _kinds(group: Group, sides: list[Side]) -> list[str]:
    """Return what a group can be looked for by, besides its verdicts."""
    kinds = {
        "a right answer that is not paid, or outside the format": any(
            row.get("verdict") == "correct" and side.note for row, side in zip(group.rows, sides, strict=True)
        ),
        "the gold answer, read as another": any(side.note.startswith("the text holds") for side in sides),
        "a completion that was cut": any(row.get("truncated") for row in group.rows),
        "equal rewards alone": group.spread == 0,
    }
    return [kind for kind, holds in kinds.items() if holds]


def _training_side(number: int, row: Row, template: str) -> Side:
    """Say which answer was read, what each function paid, and the result."""
    turns, facts = turns_of(row.get("completion")), []
    text = text_of(row["completion"][-1] if turns else row.get("completion"))
    if "extracted" in row:
        facts.append("no answer" if row["extracted"] is None else f"answer {_short(row['extracted'])}")
    if row.get("in_format") is not None:
        facts.append("in the format" if row["in_format"] else "not in the format")
    paid = {name: value for name, value in row.items() if name not in KNOWN}
    only_reward = sum(map(is_number, paid.values())) == 1  # it is also the sum
    paid |= {name: row[name] for name in ("reward", "advantage")[only_reward:] if name in row}
    facts += [f"{name} {_short(value)}" for name, value in paid.items()]
    if row.get("tokens") is not None:
        facts.append(f"{row['tokens']} tokens{', cut' if row.get('truncated') else ''}")
    note, badge = why(row, text, template), str(row.get("verdict") or "")
    return Side(f"completion {number}", badge, ", ".join(facts), note, turns or [("", shown(text))])


def turns_of(completion: object) -> list[tuple[str, str]]:
    """Return a completion with tool calls as (kind, text): said, code and output; nothing for one turn of text.

    >>> call = {"function": {"name": "python", "arguments": {"code": "print(3 + 4)"}}}
    >>> said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "7"},
    ...         {"role": "assistant", "content": "#### 7"}]
    >>> turns_of(said)
    [('code', 'print(3 + 4)'), ('output', '7'), ('said', '#### 7')]
    """
    found: list[tuple[str, str]] = []
    for message in completion if isinstance(completion, list) else ():
        if text := text_of(message.get("content")):
            output = f"output, {message['status']}" if message.get("status") else "output"
            found.append((output if message.get("role") == "tool" else "said", shown(text)))
        found += [("code", shown(_code(call["function"]))) for call in message.get("tool_calls") or ()]
    return found if len(found) > 1 or any(kind != "said" for kind, _ in found) else []


def _code(function: dict[str, Any]) -> str:
    """Return the program of a call of the tool python, or any other call as JSON."""
    arguments = [value for value in (function.get("arguments") or {}).values() if value is not None]
    if function["name"] == "python" and len(arguments) == 1:
        return str(arguments[0])
    return json.dumps(function, ensure_ascii=False, default=str)


def _short(value: object) -> str:
    if value is None or value != value:
        return "none"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:79] + "…"
