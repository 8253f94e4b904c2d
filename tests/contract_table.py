"""Add the installed versions to grpo_math/trainer/contract.json: run this file when all tests have passed with them."""

import ast
import json
import re
from functools import cache
from pathlib import Path

from packaging.version import Version

import grpo_math
from grpo_math.system.machine import versions
from grpo_math.trainer.contract import FILE, HASHED, arguments_of, minor, read

PACKAGE = Path(grpo_math.__file__).parent
# The packages whose functions are not hashed.
NAMED = ("accelerate", "peft", "huggingface_hub")
# Names that are replaced or subclassed in a module that does not define them for us alone.
REPLACED = {
    *("trl.trainer.grpo_trainer.GRPOTrainer", "trl.trainer.grpo_trainer.VLLMGeneration"),
    *("trl.trainer.grpo_trainer.create_model_from_path", "trl.trainer.base_trainer._BaseTrainer"),
    *("trl.generation.vllm_generation.VLLMClient", "trl.generation.vllm_generation.LLM"),
    *("transformers.trainer.Trainer", "transformers.generation.utils.GenerationMixin"),
}


@cache
def use() -> list[str]:
    """Return what the source of this package may need, by the name that a table has for it.

    Too much, such as attributes of our own: `read` keeps what the other package has.
    """
    names = {*REPLACED}
    # A notebook's progress bar, which replaces transformers' alone.
    for path in {*PACKAGE.rglob("*.py")} - {PACKAGE / "trainer/notebook.py"}:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            # Names of a package itself are public.
            if isinstance(node, ast.ImportFrom) and "." in (node.module or ""):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.FunctionDef):
                names |= {f"{node.name}({argument})" for argument in ["", *arguments_of(node)]}
                # ``kwargs["name"]`` in a method that passes its arguments on.
                keys = re.findall(r"kwargs\['(\w+)'\]", ast.unparse(node))
                names |= {f"{node.name}({key})" for key in keys}
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                names |= {f"{name}({keyword.arg})" for keyword in node.keywords}
        if path.parent.name == "trainer":
            names |= {f"trainer.{name}" for name in re.findall(r"(?:trainer|self)\.(\w+)", source)}
            names |= {f"trainer.{name}" for name in re.findall(r'^    "(\w+)",$', source, re.MULTILINE)}
    return sorted(names)


if __name__ == "__main__":
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    known = {package: known.get(package, {}) for package in (*HASHED, *NAMED)}
    used = use()
    for package, tables in known.items():
        now = read(package, used)
        new = {*now.needed}.difference(*(table["needed"] for table in tables.values()))
        for table in tables.values():
            # The tests with the other versions show if these have the new names, too.
            table["needed"] = sorted({*table["needed"]} & {*used} | new)
        tables[minor(versions()[package])] = now._asdict()
        known[package] = dict(sorted(tables.items(), key=lambda item: Version(item[0])))
    FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
