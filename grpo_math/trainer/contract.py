"""The parts of TRL and transformers that this package relies on, compared with versions that were not tested.

`MathGRPOTrainer` overrides private methods, which may change in any release. contract.json has a `Table` for each minor
version with which the tests passed, which tests/contract_table.py writes. A tested version is not read, and another is
read as text: importing a package in which a name has moved would be a traceback.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from grpo_math.errors import UserError
from grpo_math.generation.embedded import cache_dir
from grpo_math.run.metrics import METRICS
from grpo_math.system.machine import versions

FILE = Path(__file__).with_name("contract.json")
# The functions of these packages are hashed. The others only have to have the names.
HASHED = ("trl", "transformers")
# This package has its own code for these: a change of TRL would have no effect, without an error.
COPIED = {
    *("_compute_loss", "_get_per_token_logps_and_entropies", "get_off_policy_mask"),
    *("get_gamma_weights", "sync_weights", "_sample", "_prefill", "nanstd"),
}
# The newest minor version of the other packages with which the tests passed (constraints-newest.txt; torch,
# DeepSpeed and vLLM: constraints-vllm.txt).
NEWEST = {
    "torch": "2.13",
    "accelerate": "1.15",
    "peft": "0.21",
    "datasets": "5.2",
    "huggingface_hub": "2.4",
    "deepspeed": "0.19",
    "vllm": "0.31",
}


class Table(NamedTuple):
    """The parts of one minor version of a package that grpo_math relies on.

    ``needed``: ``module.name`` that is imported or replaced, ``trainer.attribute``, ``method(argument)``.
    ``functions``: a hash of the source of each. ``logged``: names of metrics. ``fields``: those of `GRPOConfig`, with
    the source of their defaults.
    """

    needed: list[str]
    functions: dict[str, str]
    logged: list[str]
    fields: dict[str, str]


class Comparison(NamedTuple):
    """An installed version that was not tested: what is gone, what has changed, and the new fields of `GRPOConfig`."""

    package: str
    version: str
    tested: str
    gone: list[str]
    changed: list[str]
    fields: list[str]

    @property
    def line(self) -> str:
        differences = [*(f"{name} is gone" for name in self.gone), *self.changed]
        differences += [f"GRPOConfig.{name} is new" for name in self.fields]
        words = "; ".join(differences[:4]) + f"; and {len(differences) - 4} more" * (len(differences) > 4)
        same = f"what grpo_math relies on is as in {self.tested}"
        return f"{self.package} {self.version} was not tested: {words or same}"

    @property
    def install(self) -> str:
        return f'pip install "{self.package}=={self.tested}.*"'


def refuse() -> None:
    """Raise `UserError` for a version that lacks a needed name. `doctor` refuses one outside of the supported range."""
    for comparison in untested():
        if comparison.gone:
            raise UserError(f"{comparison.line}: {comparison.install}")


def warnings(args: Any) -> Iterator[str]:
    """Yield a line for each version that differs, unless the self-test has passed with it. ``args``: a `GRPOConfig`.

    A field that is set and that our loss does not know is warned about all the same.
    """
    for comparison in untested():
        if comparison.changed and not passed().exists():
            yield f"{comparison.line}. Run `grpo-math selftest`, or {comparison.install}."
        defaults = {name: getattr(type(args), name, None) for name in comparison.fields}
        if ignored := [name for name, default in defaults.items() if getattr(args, name, default) != default]:
            new = f"new in {comparison.package} {comparison.version}"
            yield f"{', '.join(ignored)}: {new}, and not known to grpo_math's loss."


def passed() -> Path:
    """Return the file that `grpo-math selftest` writes when it has passed with the installed versions."""
    words = "-".join(f"{name}-{versions().get(name)}" for name in ("grpo_math", *stored(), *list(NEWEST)[:3]))
    return cache_dir() / "selftest" / words


def newer() -> list[str]:
    """Return the packages of `NEWEST` that are installed in a newer version.

    >>> from unittest.mock import patch
    >>> with patch.dict(NEWEST, torch="2.9"), patch.dict(versions(), torch="2.13.0+cpu"):
    ...     newer()
    ['torch 2.13.0+cpu (2.9)']
    """
    here = {name: versions()[name] for name in NEWEST if name in versions()}
    return [
        f"{name} {has} ({NEWEST[name]})" for name, has in here.items() if Version(minor(has)) > Version(NEWEST[name])
    ]


@cache
def untested() -> list[Comparison]:
    """Compare the installed versions that were not tested."""
    comparisons = [
        compare(package, versions()[package], tables)
        for package, tables in stored().items()
        if package in versions() and minor(versions()[package]) not in tables
    ]
    return [one for one in comparisons if one.gone or one.package in HASHED]


def compare(package: str, version: str, tables: dict[str, Table]) -> Comparison:
    """Compare the installed version with all that were tested: a function may be that of any of them."""
    newest = list(tables.values())[-1]
    now = read(package, newest.needed)
    needed = set.intersection(*(set(table.needed) for table in tables.values()))
    # A class first: its methods follow from it.
    gone, changed = sorted(needed - {*now.needed}, key=lambda name: ("." not in name, name)), []
    for name in newest.functions:
        if now.functions.get(name) not in {table.functions.get(name) for table in tables.values()}:
            copy = ", and grpo_math has its own" * (name.rpartition(".")[2] in COPIED)
            changed.append(f"{name} is {'changed' if name in now.functions else 'gone or has moved'}{copy}")
    changed += [f"the metric {name} is gone" for name in newest.logged if name not in now.logged]
    for name in newest.fields:
        default = now.fields.get(name)
        if default not in {table.fields.get(name) for table in tables.values()}:
            changed.append(f"GRPOConfig.{name} is {f'{default} by default' if default else 'gone'}")
    fields = [name for name in now.fields if all(name not in table.fields for table in tables.values())]
    changed.sort(key=lambda line: "its own" not in line)
    return Comparison(package, version, list(tables)[-1], gone, changed, fields)


def minor(version: str) -> str:
    """Return the first two numbers of a version.

    >>> minor("1.16.0")
    '1.16'
    """
    return ".".join(version.split(".")[:2])


def stored() -> dict[str, dict[str, Table]]:
    """Return {package: {minor version: table}}."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {package: {name: Table(**table) for name, table in tables.items()} for package, tables in content.items()}


def read(package: str, needed: list[str]) -> Table:
    """Return the table of the installed version. ``needed``: that of a table, or all names that may be used."""
    imported = [name.rpartition(".") for name in needed if name.startswith(f"{package}.")]
    modules, names = ({parts[index] for parts in imported} for index in (0, 2))
    present, functions, literals = set[str](), dict[str, str](), set[Any]()
    for module in sorted(modules):
        source = source_of(module)
        tree = ast.parse(source)
        # A module that loads on demand lists its names as strings. A name that is only read may be gone.
        nodes = [node for node in ast.walk(tree) if not isinstance(getattr(node, "ctx", None), ast.Load)]
        words = {getattr(node, key, None) for node in nodes for key in ("name", "id", "asname", "value")}
        literals |= words if package in HASHED else set()
        for name in needed:
            if name.rpartition(".")[0] == module and (name.rpartition(".")[2] in words or source_of(name)):
                present.add(name)
        for name, node in functions_of(tree):
            owner, _, method = name.rpartition(".")
            if (
                package in HASHED
                and ((owner or method) in names or method in COPIED)
                and (package == "trl" or f"{method}()" in needed or method in COPIED)
            ):
                functions[name] = digest(source, node)
                present |= {f"{method}({argument})" for argument in ["", *arguments_of(node)]}
        if module.endswith("trainer"):
            attributes = re.findall(r"(?:self\.|def )(\w+)(?=: [^=\n]+ = | = |\(\s*self)", source)
            present |= {f"trainer.{name}" for name in attributes}
    default = r"^    (\w+): .*?= (?:field\(\s+default(?:_factory)?=)?(.*?),?$"
    fields = re.findall(default, source_of(f"{package}.trainer.grpo_config"), re.MULTILINE)
    return Table(sorted(present & {*needed}), functions, sorted({*METRICS} & literals), dict(fields))


def source_of(module: str) -> str:
    """Return the source of an installed module without importing it, or "" if the module does not exist."""
    package, *parts = module.split(".")
    spec = find_spec(package)
    folder = Path(((spec and spec.submodule_search_locations) or [""])[0], *parts)
    files = (folder.with_suffix(".py"), folder / "__init__.py")
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield ``function`` and ``Class.method``, each with its node."""
    for statement in tree.body:
        owner = f"{statement.name}." if isinstance(statement, ast.ClassDef) else ""
        for node in statement.body if isinstance(statement, ast.ClassDef) else [statement]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner + node.name, node


def arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "self"]


def digest(source: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    r"""Return a hash of a function without its docstring, comments and empty lines.

    >>> hashes = []
    >>> for body in ("    '''Two.'''\n\n    # It is even.\n    return 2", "    return 2  # two", "    return 3"):
    ...     hashes.append(digest(f"def f(a):\n{body}", ast.parse(f"def f(a):\n{body}").body[0]))
    >>> hashes[0] == hashes[1], hashes[0] == hashes[2]
    (True, False)
    """
    first = node.body[0]
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if ast.get_docstring(node) is not None else ()
    # Lines of text, because what `ast.unparse` prints depends on the version of Python.
    numbers = [n for n in range(node.lineno, (node.end_lineno or 0) + 1) if n not in docstring]
    lines = source.splitlines()
    code = [re.sub(r"(^|\s)#.*", "", lines[n - 1]).rstrip() for n in numbers]
    return hashlib.sha256("\n".join(filter(None, code)).encode()).hexdigest()[:12]
