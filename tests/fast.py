"""What `./launch/test.sh --fast` runs: the tests marked core, and all of each light file but what is marked slow.

A file is light when importing it loads none of HEAVY. That is read from import statements, its own and those of the
files of this repository that it imports, without running them: a file that is neither light nor has a core test is not
even imported. A light test that asks for a model (a fixture of `MODELS`) counts as slow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "safetensors", "huggingface_hub", "pandas"}
MODELS = {"smollm", "tokenizer", "tiny"}


@cache
def imports(path: Path) -> set[str]:
    """The names that importing a file imports: not what its functions do when they are called."""
    names: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += ast.iter_child_nodes(node)
    return names


def files_of(name: str) -> Iterator[Path]:
    """The files of this repository that `import name` runs: those of the packages above it too."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        for folder in (ROOT, ROOT / "tests"):
            stem = folder.joinpath(*parts[:n])
            yield from (path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file())


@cache
def light(path: Path) -> bool:
    seen, left = set(), {path}
    while left:
        seen |= left
        names = {name for file in left for name in imports(file)}
        if {name.partition(".")[0] for name in names} & HEAVY:
            return False
        left = {file for name in names for file in files_of(name)} - seen
    return True


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".py" or "mark.core" in collection_path.read_text(encoding="utf-8"):
        return None
    return None if light(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def kept(item: pytest.Item) -> bool:
        slow = item.get_closest_marker("slow") or MODELS & set(getattr(item, "fixturenames", ()))
        return bool(item.get_closest_marker("core") or (light(item.path) and not slow))

    config.hook.pytest_deselected(items=[item for item in items if not kept(item)])
    items[:] = [item for item in items if kept(item)]
