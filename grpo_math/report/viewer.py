r"""A run's completions -> what the page's viewer shows: sources of rows, each with its filters and its sorts.

A character that would be invisible, or would turn the text around it, is shown by its name.

>>> print(visible("1\u202e2\x1b[31m\n3"))
1⟨U+202E⟩2␛[31m
3

Does not read files.
"""

import json
import re
from typing import Any

from grpo_math.report.groups import TOLD, Group, Row, groups, is_number, why
from grpo_math.report.run_dir import Run, prompt_of, text_of
from grpo_math.run.metrics import CATEGORIES, RIGHT

CHANGE_NAMES = {
    (0, 1): "wrong to right",
    (1, 0): "right to wrong",
    (1, 1): "right both times",
    (0, 0): "wrong both times",
}
# Control characters but tab and line feed; zero-width and direction marks; lone surrogates; tags.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


MOST_TEXT = 100_000  # characters of one text on the page: a browser lays out a longer line for minutes
MOST_TEXTS = 20_000_000  # of all of a source's


def shown(text: str) -> str:
    """The text as the page has it: what cannot be seen by its name, and of a very long one the beginning.

    >>> shown("x" * 100_001)[-37:]
    'x\\n(1 characters more are in the file)'
    """
    more = len(text) - MOST_TEXT
    return visible(text[:MOST_TEXT])[:MOST_TEXT] + (f"\n({more:,} characters more are in the file)" if more > 0 else "")


def visible(text: str) -> str:
    """The text with each unseen character as a picture or as its number; a line ends in ``\\n`` alone."""
    return UNSEEN.sub(_named, text.replace("\r\n", "\n"))


def _named(found: re.Match[str]) -> str:
    number = ord(found[0])
    return chr(0x2400 + number) if number < 0x20 else f"⟨U+{number:04X}⟩"


class Prompts(dict[tuple[str, str], int]):
    """(the question, the whole prompt) -> its number; equal prompts are held once."""

    def number(self, question: str, whole: str = "") -> int:
        return self.setdefault((shown(question), shown(whole)), len(self))


def viewer(run: Run, comparable: bool) -> dict[str, Any]:
    """``{"prompts", "sources"}``; ``comparable``: a problem's completions before and after stand side by side."""
    prompts = Prompts()
    sources = [_heldout_source(run, comparable, prompts), _training_source(run, prompts)]
    for source in sources:
        _bound(source, run)
    return {"prompts": list(prompts), "sources": [source for source in sources if source["rows"]]}


def _bound(source: dict[str, Any], run: Run) -> None:
    """Leave the rows out that would make the page too large for a browser, and note it."""
    size, rows = 0, source["rows"]
    for place, row in enumerate(rows):
        size += sum(len(side["text"]) for side in row["sides"])
        if size > MOST_TEXTS and place:
            source["rows"] = rows[:place]
            run.notes.append(f"{source['name']}: the first {place:,} of {len(rows):,} are shown; all are in the files")
            return


def _heldout_source(run: Run, comparable: bool, prompts: Prompts) -> dict[str, Any]:
    by_id: dict[str, dict[str, dict[str, Any]]] = {}
    for name, results in (("before", run.before), ("after", run.after)):
        for row in results["rows"] if results else ():
            key = str(row["id"]) if comparable else f"{name} {row['id']}"
            by_id.setdefault(key, {})[name] = row
    rows = []
    for key, sides in by_id.items():
        any_row = next(iter(sides.values()))
        fields = {name: str(row["category"]) for name, row in sides.items()}
        if len(sides) == 2:
            fields["change"] = CHANGE_NAMES[int(fields["before"] in RIGHT), int(fields["after"] in RIGHT)]
        shown = [
            _heldout_side(name, row, str((getattr(run, name) or {}).get("template") or ""))
            for name, row in sides.items()
        ]
        keys = {f"tokens {name}": row.get("tokens") for name, row in sides.items()}
        number, title = (
            prompts.number(text_of(any_row.get("problem"))),
            visible(f"{key[:80]}, gold {_short(any_row.get('gold'))}"),
        )
        rows.append({"title": title, "prompt": number, "fields": fields, "keys": keys, "sides": shown})
    return _source("Held-out problems", rows, ("change", "before", "after"), CATEGORIES)


def _side(label: str, badge: str, facts: str, text: str, note: str, turns: list[list[str]]) -> dict[str, Any]:
    side: dict[str, Any] = {"label": label, "badge": badge, "facts": visible(facts), "text": shown(text)}
    if turns:
        side["turns"], side["text"] = turns, "\n".join(text for _, text in turns)
    return side | ({"note": visible(note)} if note else {})


def turns_of(completion: object) -> list[list[str]]:
    """A completion with calls as (what it is, its text): what is said, code, and output; none for one turn of text.

    >>> call = {"function": {"name": "python", "arguments": {"code": "print(3 + 4)"}}}
    >>> said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "7"},
    ...         {"role": "assistant", "content": "#### 7"}]
    >>> turns_of(said)
    [['code', 'print(3 + 4)'], ['output', '7'], ['said', '#### 7']]
    """
    found: list[list[str]] = []
    for message in completion if isinstance(completion, list) else ():
        output = isinstance(message, dict) and message.get("role") == "tool"
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if text := text_of(message.get("content")) if isinstance(message, dict) else "":
            failed = f"output, {message['status']}" if output and message.get("status") else "output"
            found.append([failed if output else "said", shown(text)])
        found += [["code", shown(_code(call))] for call in (calls if isinstance(calls, list) else ())]
    return found if len(found) > 1 or any(kind != "said" for kind, _ in found) else []


def _code(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    given = {k: v for k, v in arguments.items() if v is not None} if isinstance(arguments, dict) else {}
    if isinstance(function, dict) and len(given) == 1 and function.get("name") == "python":
        return str(next(iter(given.values())))
    return json.dumps(function, ensure_ascii=False, default=str)


def _heldout_side(name: str, row: dict[str, Any], template: str) -> dict[str, Any]:
    text = text_of(row["completion"])
    facts = "no answer" if row.get("answer") is None else f"answer {_short(row['answer'])}"
    facts += f", {row['tokens']} tokens" if row.get("tokens") is not None else ""
    if "calls" in row:
        facts += f", {row['calls']} calls, {row.get('failures')} failed"
    turns = turns_of(row.get("turns"))
    return _side(name, str(row["category"]), facts, text, why(row, text, template), turns)


def _training_source(run: Run, prompts: Prompts) -> dict[str, Any]:
    template, rows = str(run.config.get("template") or ""), []
    for group in groups(run.completions):
        shown = [_training_side(n, row, template) for n, row in enumerate(group.rows, start=1)]
        fields: dict[str, Any] = {} if group.step is None else {"step": str(group.step)}
        for field, found in (("verdict", (row.get("verdict") for row in group.rows)), ("holds", _kinds(group, shown))):
            if values := dict.fromkeys(str(value) for value in found if value):
                fields[field] = list(values)
        number = prompts.number(*prompt_of(group.rows[0].get("prompt")))
        longest = max(row.get("tokens") or len(text_of(row.get("completion"))) for row in group.rows)
        unit = "tokens" if group.rows[0].get("tokens") is not None else "characters"
        keys = {
            "spread of rewards": group.spread,
            "mean reward": group.mean,
            "step": group.step,
            f"most {unit}": longest,
        }
        rows.append({"title": visible(group.title), "prompt": number, "fields": fields, "keys": keys, "sides": shown})
    return _source("Training completions", rows, ("step", "verdict", "holds"), {})


def _kinds(group: Group, shown: list[dict[str, str]]) -> list[str]:
    """What a group can be looked for by, beside its verdicts."""
    rows, kinds = group.rows, []
    if any(row.get("verdict") == "correct" and side.get("note") for row, side in zip(rows, shown, strict=True)):
        kinds.append("a right answer that is not paid, or outside the format")
    if any(side.get("note", "").startswith("the text holds") for side in shown):
        kinds.append("the gold answer, read as another")
    if any(row.get("truncated") for row in rows):
        kinds.append("a completion that was cut")
    if group.rewards and group.spread == 0:
        kinds.append("equal rewards alone")
    return kinds


def _training_side(number: int, row: Row, template: str) -> dict[str, Any]:
    """What was read, what each function paid, and what came of it."""
    facts, turns = [], turns_of(row.get("completion"))
    text = text_of(row["completion"][-1] if turns else row.get("completion"))
    if "extracted" in row:
        facts.append("no answer" if row["extracted"] is None else f"answer {_short(row['extracted'])}")
    if row.get("in_format") is not None:
        facts.append("in the format" if row["in_format"] else "not in the format")
    facts += [f"{name} {_short(value)}" for name, value in row.items() if name not in TOLD]
    one = sum(is_number(value) for name, value in row.items() if name not in TOLD) == 1  # which is the reward
    facts += [f"{name} {_short(row[name])}" for name in ("reward", "advantage")[one:] if name in row]
    if row.get("tokens") is not None:
        facts.append(f"{row['tokens']} tokens{', cut' if row.get('truncated') else ''}")
    badge = str(row["verdict"]) if row.get("verdict") else ""
    return _side(f"completion {number}", badge, ", ".join(facts), text, why(row, text, template), turns)


def _source(name: str, rows: list[dict[str, Any]], fields: tuple[str, ...], labels: dict[str, str]) -> dict[str, Any]:
    filters = []
    for field in fields:
        found = (row["fields"][field] for row in rows if field in row["fields"])
        values = dict.fromkeys(value for one in found for value in (one if isinstance(one, list) else [one]))
        if len(values) > 1:
            filters.append({"field": field, "values": list(values)})
    numbers = [{key: value for key, value in row.pop("keys").items() if is_number(value)} for row in rows]
    known = dict.fromkeys(key for keys in numbers for key in keys)
    sorts = [key for key in known if len({keys.get(key) for keys in numbers}) > 1]
    for row, keys in zip(rows, numbers, strict=True):
        row["keys"] = [keys.get(key) for key in sorts]
    return {"name": name, "labels": labels, "filters": filters, "sorts": sorts, "rows": rows}


def _short(value: object) -> str:
    if value is None or value != value:
        return "none"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:79] + "…"


def safe_json(value: object) -> str:
    r"""JSON that can stand inside a script element: ASCII alone, and no character that HTML could take for markup.

    >>> print(safe_json("</script>\u2028"))
    "\u003c/script\u003e\u2028"
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
