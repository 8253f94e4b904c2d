"""Fill the computed tables of docs/: `python docs/make_tables.py` lists the pages that differ, `--write` writes them.

settings.md is written as a whole, from the fields of a recipe and their help texts; the source of the fields is parsed,
not imported. In other pages a table stands between ``<!-- table NAME: ... -->`` and ``<!-- end -->``.

Does not describe the fields of TRL and transformers, which have pages of their own, and measures nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from grpo_math.settings.fields import TABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = (("grpo_math/settings/arguments.py", "TrainArguments"), ("grpo_math/trainer/config.py", "MathGRPOConfig"))
BLOCK = re.compile(r"(<!-- table (\w+): .*? -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)
HEAD = """# Settings

```bash
grpo-math doctor --config launch/configs/demo_cpu.yaml --learning_rate 1e-4 --output_dir runs/checked
```

```text
ok: no error, no warning
```

A recipe takes the fields below, and every field of TRL's
[`GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig), transformers'
[`TrainingArguments`](https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments) and
TRL's [`ModelConfig`](https://github.com/huggingface/trl/blob/main/trl/trainer/model_config.py). The default is in
brackets. The command line wins over the recipe.
"""


def own_fields() -> dict[str, tuple[str, str]]:
    """Return our fields by name: the default as a recipe writes it, and the help text."""
    fields = {}
    for file, name in SOURCES:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        for line in body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
                default, text = map(ast.literal_eval, line.value.args)  # of setting(default, help)
                fields[ast.unparse(line.target)] = (_yaml(default), re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text))
    return fields


def _yaml(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f"`[{', '.join(value)}]`"
    return f"`{str(value).lower().replace('e-0', 'e-')}`"


def settings() -> str:
    """Return the text of settings.md. Each field belongs to one group; a new field has to be put into one."""
    fields = own_fields()
    grouped = [name for names in TABLES["groups"].values() for name in names]
    assert sorted(grouped) == sorted(fields), f"a group of fields.yaml needs, or has: {set(grouped) ^ set(fields)}"
    parts = [HEAD]
    for title, names in TABLES["groups"].items():
        lines = [f"- **`{name}`** ({default}): {text}" for name in names for default, text in [fields[name]]]
        lines = [line.replace(" ()", "") for line in lines]
        parts.append("\n".join([f"## {title}\n", *lines, ""]))
    return "\n".join(parts)


def table(name: str) -> str:
    """Return a computed table as Markdown. The program of each is imported only here: some need torch."""
    sys.path[:0] = [path for path in (str(ROOT / "tests"),) if path not in sys.path]
    if name == "findings":
        return findings()
    if name == "methods":
        return methods()
    from benchmarks import layouts

    return layouts.tables()[name]


def findings() -> str:
    """Return the symptom of each finding. The line of a finding has the cause and the remedy."""
    from grpo_math.checks.diagnosis import CHECKS

    return "\n".join(f"- `{name}`: {check.symptom}" for name, check in CHECKS.items())


def methods() -> str:
    """Return the rows of methods.yaml."""
    from grpo_math.settings.recipe import METHODS

    columns = ("title", "name", "fields", "changes", "measured", "verl", "openrlhf", "prime_rl")
    lines = [
        "|method|name|fields|what it changes in GRPO|measured by|verl|OpenRLHF|prime-rl|",
        "|---" * len(columns) + "|",
    ]
    for name, method in METHODS.items():
        title = f"{method['title']} ({method['paper']})" if "paper" in method else method["title"]
        fields = ", ".join(f"`{field}: {_value(value)}`" for field, value in method["fields"].items())
        row = {**method, "title": title, "name": f"`{name}`", "fields": fields}
        lines.append(f"|{'|'.join(row.get(column, '-') for column in columns)}|")
    return "\n".join(lines)


def _value(value: object) -> str:
    return _yaml(value).strip("`")


def pages() -> dict[Path, str]:
    """Return each page with a computed part and the text that it has to have."""
    texts = {DOCS / "settings.md": settings()}
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
