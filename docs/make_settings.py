"""Writes docs/settings.md from the fields of a recipe and their help texts: `python docs/make_settings.py`.

The fields' source is parsed, not imported, so this takes no torch. Does not describe the fields of TRL and
transformers, which have pages of their own.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from grpo_math.settings.groups import GROUPS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
SOURCES = (("grpo_math/settings/arguments.py", "TrainArguments"), ("grpo_math/trainer/config.py", "MathGRPOConfig"))
HEAD = """# Settings

Written by `python docs/make_settings.py` from the help texts in `grpo_math/settings/arguments.py` and
`grpo_math/trainer/config.py`; edit them there.

A recipe is a YAML file. Each of its fields can also be given on the command line (`--learning_rate 1e-4`), where it
wins over the recipe. A recipe takes the fields below, and every field of

- TRL's [`GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig): group size, lengths, loss type,
  clipping, KL, sampling, vLLM;
- transformers' [`TrainingArguments`](https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments):
  learning rate, schedule, optimizer, saving, logging, precision;
- TRL's [`ModelConfig`](https://github.com/huggingface/trl/blob/main/trl/trainer/model_config.py): the model, LoRA,
  quantisation.

A misspelt field, a value of the wrong kind and a combination that cannot work are refused before weights are loaded, in
one line that says what to change. A field that has no effect next to another one is a warning. `grpo-math doctor
--config RECIPE.yaml` checks a recipe without training.
"""


def own_fields() -> dict[str, tuple[str, str]]:
    """Our fields by name: the default as a recipe writes it, and the help text."""
    found = {}
    for file, name in SOURCES:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        for line in body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
                default, text = map(ast.literal_eval, line.value.args)  # of setting(default, help)
                found[ast.unparse(line.target)] = (_yaml(default), re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text))
    return found


def _yaml(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f"`[{', '.join(value)}]`"
    return f"`{str(value).lower().replace('e-0', 'e-')}`"


def page() -> str:
    """The page as text. Every field stands in one group; a new one has to be put into one."""
    fields = own_fields()
    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(fields), f"put into a group of GROUPS, or take out: {set(named) ^ set(fields)}"
    parts = [HEAD]
    for title, names in GROUPS.items():
        rows = [f"| `{name}` | {' | '.join(fields[name])} |" for name in names]
        parts.append("\n".join([f"## {title}\n", "| field | default | meaning |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
