"""Add the installed versions to grpo_math/trainer/contract.json: run this file when all tests have passed with them."""

import ast
import json
import re
from functools import cache
from pathlib import Path

from packaging.version import Version

import grpo_math
from grpo_math.system.machine import versions
from grpo_math.trainer.contract import FILE, FUNCTION, HASHED, argument_names, read

PACKAGE = Path(grpo_math.__file__).parent
# The packages whose functions are not hashed.
NAMED = ("accelerate", "peft", "huggingface_hub")
# Names that are replaced, subclassed or imitated in a module that does not define them for us alone.
REPLACED = {
    *("trl.trainer.grpo_trainer.GRPOTrainer", "trl.trainer.grpo_trainer.VLLMGeneration"),
    *("trl.trainer.grpo_trainer.create_model_from_path", "trl.trainer.base_trainer._BaseTrainer"),
    *("trl.generation.vllm_generation.VLLMClient", "trl.generation.vllm_generation.LLM"),
    *("transformers.trainer.Trainer", "transformers.generation.utils.GenerationMixin"),
    *("trl.trainer.grpo_config.GRPOConfig", "transformers.cache_utils.LinearAttentionLayer"),
}
# The call of a method does not show the class: it may be one of these, or the called name may be a function or a class.
OWNERS = ("{}", "{}.__init__", *(f"{name.rpartition('.')[2]}.{{}}" for name in sorted(REPLACED)))


def passed_on(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return "", and the arguments of a function, also ``kwargs["name"]`` of one that passes its arguments on."""
    return ["", *argument_names(node), *re.findall(r"kwargs\['(\w+)'\]", ast.unparse(node))]


@cache
def use() -> list[str]:
    """Return what the source of this package may need, by the name that a table has for it.

    Too much, such as attributes of our own: `read` keeps what the other package has.
    """
    names = {*REPLACED}
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            # Names of a package itself are public.
            if isinstance(node, ast.ImportFrom) and "." in (node.module or ""):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                methods = [method for method in node.body if isinstance(method, FUNCTION)]
                for base in (ast.unparse(base).rpartition(".")[2] for base in node.bases):
                    names |= {f"{base}.{method.name}({one})" for method in methods for one in passed_on(method)}
            elif isinstance(node, FUNCTION) and node.name != "__init__":
                names |= {f"{owner.format(node.name)}({one})" for one in passed_on(node) for owner in OWNERS}
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                names |= {f"{owner.format(name)}({one.arg})" for one in node.keywords for owner in OWNERS}
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
            table["needed"] = sorted({*table["needed"]} & {*now.needed} | new)
        tables[versions()[package]] = now._asdict()
        known[package] = dict(sorted(tables.items(), key=lambda item: Version(item[0])))
    FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
