"""Modules of installed packages as text and as syntax trees.

Importing TRL takes seconds, and a name that has moved would be a traceback.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class DeclaredField(NamedTuple):
    """A field of a dataclass. ``arguments``: those of `dataclasses.field`; a plain default is the argument default."""

    name: str
    annotation: str
    arguments: dict[str | None, ast.expr]


def source_file(module: str) -> Path | None:
    package, *parts = module.split(".")
    # For a top-level package, find_spec does not import the package.
    spec = find_spec(package)
    folder = Path(((spec and spec.submodule_search_locations) or [""])[0], *parts)
    return next(filter(Path.is_file, (folder.with_suffix(".py"), folder / "__init__.py")), None)


def source_text(module: str) -> str:
    """Return the source of an installed module, or "" if the module does not exist."""
    file = source_file(module)
    return file.read_text(encoding="utf-8") if file else ""


@lru_cache(maxsize=8)
def syntax_tree(source: str) -> ast.Module:
    return ast.parse(source)


def declared_fields(node: ast.ClassDef) -> Iterator[DeclaredField]:
    """Yield the fields with a default that a dataclass itself declares.

    >>> [one] = declared_fields(ast.parse("class A:\\n  beta: float = field(default=0.1, metadata={})").body[0])
    >>> one.name, one.annotation, {name: ast.unparse(value) for name, value in one.arguments.items()}
    ('beta', 'float', {'default': '0.1', 'metadata': '{}'})
    """
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and (value := line.value) is not None:
            keywords = value.keywords if isinstance(value, ast.Call) else [ast.keyword("default", value)]
            arguments = {word.arg: word.value for word in keywords}
            yield DeclaredField(ast.unparse(line.target), ast.unparse(line.annotation), arguments)
