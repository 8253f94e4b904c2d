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


def visible(text: str) -> str:
    """The text with each unseen character as a picture or as its number; a line ends in ``\\n`` alone."""
    return UNSEEN.sub(_named, text.replace("\r\n", "\n"))


def _named(found: re.Match[str]) -> str:
    number = ord(found[0])
    return chr(0x2400 + number) if number < 0x20 else f"⟨U+{number:04X}⟩"


class Prompts(dict[tuple[str, str], int]):
    """(the question, the whole prompt) -> its number; equal prompts are held once."""

    def number(self, question: str, whole: str = "") -> int:
        return self.setdefault((visible(question), visible(whole)), len(self))


def viewer(run: Run, comparable: bool) -> dict[str, Any]:
    """``{"prompts", "sources"}``; ``comparable``: a problem's completions before and after stand side by side."""
    prompts = Prompts()
    sources = [_heldout_source(run, comparable, prompts), _training_source(run.completions, prompts)]
    return {"prompts": list(prompts), "sources": [source for source in sources if source["rows"]]}


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
        shown = [_side(name, fields[name], _row_facts(row), text_of(row["completion"])) for name, row in sides.items()]
        keys = {f"tokens {name}": row.get("tokens") for name, row in sides.items()}
        number, title = prompts.number(text_of(any_row.get("problem"))), visible(f"{key}, gold {any_row.get('gold')}")
        rows.append({"title": title, "prompt": number, "fields": fields, "keys": keys, "sides": shown})
    return _source("Held-out problems", rows, ("change", "before", "after"), CATEGORIES)


def _side(label: str, badge: str, facts: str, text: str) -> dict[str, str]:
    return {"label": label, "badge": badge, "facts": visible(facts), "text": visible(text)}


def _row_facts(row: dict[str, Any]) -> str:
    answer = "no answer" if row.get("answer") is None else f"answer {row['answer']}"
    return f"{answer}, {row['tokens']} tokens" if row.get("tokens") is not None else answer


def _training_source(completions: list[dict[str, Any]], prompts: Prompts) -> dict[str, Any]:
    rows = []
    for row in completions:
        values = {name: v for name, v in row.items() if name not in ("step", "prompt", "completion", "verdict")}
        fields = {name: str(row[name]) for name in ("step", "verdict") if row.get(name) is not None}
        text, number = text_of(row.get("completion")), prompts.number(*prompt_of(row.get("prompt")))
        facts = ", ".join(f"{name} {_short(value)}" for name, value in values.items())
        keys = {"step": row.get("step"), **values, "characters": len(text)}
        shown = [_side("completion", fields.get("verdict", ""), facts, text)]
        title = visible(f"step {row.get('step')}")
        rows.append({"title": title, "prompt": number, "fields": fields, "keys": keys, "sides": shown})
    return _source("Training completions", rows, ("step", "verdict"), {})


def _source(name: str, rows: list[dict[str, Any]], fields: tuple[str, ...], labels: dict[str, str]) -> dict[str, Any]:
    filters = []
    for field in fields:
        values = dict.fromkeys(row["fields"][field] for row in rows if field in row["fields"])
        if len(values) > 1:
            filters.append({"field": field, "values": list(values)})
    numbers = [{key: value for key, value in row.pop("keys").items() if _is_number(value)} for row in rows]
    found = dict.fromkeys(key for keys in numbers for key in keys)
    sorts = [key for key in found if len({keys.get(key) for keys in numbers}) > 1]
    for row, keys in zip(rows, numbers, strict=True):
        row["keys"] = [keys.get(key) for key in sorts]
    return {"name": name, "labels": labels, "filters": filters, "sorts": sorts, "rows": rows}


def _is_number(value: object) -> bool:
    # pandas, with which TRL writes, makes a missing reward a NaN.
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")


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
