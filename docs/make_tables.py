"""Fill the computed tables of docs/: `python docs/make_tables.py` lists the pages that differ, `--write` writes them.

A table is between ``<!-- table NAME: ... -->`` and ``<!-- end -->``. The settings are the fields of a recipe that TRL
and transformers do not have.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

from grpo_math.settings.own import TOPICS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- table (\w+): .*? -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)


def _yaml(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower().replace('e-0', 'e-')}`"


def settings() -> str:
    """Return our fields, in the groups of their dataclasses."""
    groups: dict[str, list[str]] = {}
    for kind in (kind for topic in TOPICS for kind in vars(topic).values() if dataclasses.is_dataclass(kind)):
        groups.setdefault(str(kind.__doc__).rstrip("."), []).extend(map(_line, dataclasses.fields(kind)))
    return "\n\n".join("\n".join([f"### {title}\n", *lines]) for title, lines in groups.items())


def _line(one: dataclasses.Field) -> str:
    """Return the line of a field: the default as a recipe writes it, and the first sentence of the help text."""
    default = _yaml(one.default_factory() if one.default is dataclasses.MISSING else one.default)
    text = one.metadata["help"].partition(". ")[0].rstrip(".")
    return f"- **`{one.name}`** ({default}): {text}.".replace(" ()", "")


def table(name: str) -> str:
    """Return a computed table as Markdown. The program of each is imported only here: some need torch."""
    sys.path[:0] = [path for path in (str(ROOT / "tests"),) if path not in sys.path]
    if program := {"settings": settings, "findings": findings, "methods": methods, "figures": figures}.get(name):
        return program()
    from benchmarks import layouts

    return layouts.tables()[name]


def findings() -> str:
    """Return the names of the findings. The line of a finding has the symptom, the cause and the remedy."""
    from grpo_math.checks.diagnosis import CHECKS

    return ", ".join(f"`{name}`" for name in CHECKS)


def figures() -> str:
    """Return a row for each line of the files of figures, or a sentence without any."""
    files = sorted((ROOT / "tests/gpu/figures").glob("*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines:
        return "Nothing was measured yet."
    rows = ["| card | versions | command | claim | measured |", "|---" * 5 + "|"]
    for line in lines:
        versions = ", ".join(f"{name} {line[name]}" for name in ("torch", "transformers", "trl"))
        claim = line["figure"].removeprefix("test_").replace("_", " ")  # the name of the test
        rows.append(f"| {line['device']} | {versions} | `{line['command']}` | {claim} | {line['says']} |")
    return "\n".join(rows)


def methods() -> str:
    """Return the rows of methods.yaml."""
    from grpo_math.settings.recipe import METHODS

    columns = ("title", "name", "fields", "changes", "open", "measured", "verl", "openrlhf", "prime_rl")
    lines = [
        "|method|name|fields|what it changes in GRPO|left to you|measured on|verl|OpenRLHF|prime-rl|",
        "|---" * len(columns) + "|",
    ]
    for name, method in METHODS.items():
        title = f"{method['title']} ({method['paper']})" if "paper" in method else method["title"]
        fields = "<br>".join(f"`{field}: {_value(value)}`" for field, value in method["fields"].items())
        row = {**method, "title": title, "name": f"`{name}`", "fields": fields}
        lines.append(f"|{'|'.join(row.get(column, '-') for column in columns)}|")
    return "\n".join(lines)


def _value(value: object) -> str:
    return _yaml(value).strip("`")


def pages() -> dict[Path, str]:
    """Return each page with a computed part and the text that it has to have."""
    texts = {}
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if BLOCK.search(page):
            texts[path] = BLOCK.sub(lambda block: block[1] + table(block[2]) + block[4], page)
    return texts


def main() -> int:
    """Write or list the pages that differ; exit code 1 if some differ and nothing is written."""
    write = "--write" in sys.argv[1:]
    differ = {path: text for path, text in pages().items() if path.read_text(encoding="utf-8") != text}
    for path, text in differ.items():
        print(f"{'written' if write else 'differs'}: {path.relative_to(ROOT)}")
        if write:
            path.write_text(text, encoding="utf-8")
    return int(bool(differ) and not write)


if __name__ == "__main__":
    sys.exit(main())
