"""The parts of TRL and transformers that this package relies on, compared with versions that were not tested.

`MathGRPOTrainer` overrides private methods, which may change in any release. contract.json has a `Table` for each
version with which the tests passed, which tests/contract_table.py writes. A tested version is not read, and another is
read as text: importing a package in which a name has moved would be a traceback.
"""

import ast
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from functools import cache, lru_cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple
from warnings import catch_warnings

from packaging.version import Version

from grpo_math.errors import UserError
from grpo_math.generation.embedded import cache_dir
from grpo_math.run.metrics import METRICS, TRL_WEIGHTS
from grpo_math.system.machine import versions
from grpo_math.system.source import DeclaredField, declared_fields, source_file, source_text, syntax_tree

FILE = Path(__file__).with_name("contract.json")
# The functions of these packages are hashed. The others only have to have the names.
HASHED = ("trl", "transformers")
# This package has its own code for these: a change of TRL would have no effect, without an error.
COPIED = {
    *("_compute_loss", "_get_per_token_logps_and_entropies", "get_off_policy_mask"),
    *("get_gamma_weights", "sync_weights", "_sample", "_prefill", "nanstd", "nanmin", "nanmax"),
}
# These are compared, too, though nothing fails without the names.
ALSO_READ = {
    *("trl.trainer.utils.nanstd", "trl.trainer.utils.nanmin", "trl.trainer.utils.nanmax", "trl.trainer.utils.pad"),
    *("trl.trainer.utils.shuffle_sequence_dict", "trl.trainer.utils.split_tensor_dict"),
    *("trl.trainer.utils.use_adapter", "trl.trainer.callbacks.SyncRefModelCallback"),
    *("trl.generation.vllm_generation.extract_logprobs", "trl.generation.vllm_client.parse_logprobs"),
    *("trl.trainer.base_config._BaseConfig", "transformers.training_args.TrainingArguments"),
}
# Parts of the names that TRL logs and that are not in `METRICS`.
ALSO_LOGGED = {*TRL_WEIGHTS, "rewards/"}
# The fields of these classes, and of their bases, are settings.
SETTINGS = ("GRPOConfig", "TrainingArguments")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# The newest minor versions with which the tests passed, of packages without a table.
WITHOUT_TABLE = {"torch": "2.13", "datasets": "5.2", "deepspeed": "0.19", "vllm": "0.31"}


class Table(NamedTuple):
    """The parts of one version of a package that grpo_math relies on.

    ``needed``: ``module.name`` that is imported or replaced, ``trainer.attribute``, ``Class.method(argument)``.
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
        return f'pip install "{self.package}=={self.tested}"'

    def without(self, tried: set[str]) -> "Comparison":
        """Return the comparison without the changes of functions that the self-test has run."""
        return self._replace(changed=[line for line in self.changed if line.partition(" ")[0] not in tried])


def refuse() -> None:
    """Raise `UserError` for a version that lacks a needed name. `doctor` refuses one outside of the supported range."""
    for comparison in untested():
        if comparison.gone:
            raise UserError(f"{comparison.line}: {comparison.install}")


def warnings(args: Any) -> Iterator[str]:
    """Yield lines for each version that differs, without what the self-test has tried. ``args``: a `GRPOConfig`."""
    done = tried()
    remedy = (
        "`grpo-math selftest` has passed and does not run this. To be safe:" if done else "Run `grpo-math selftest`, or"
    )
    for comparison in untested():
        left, name = comparison.without(done), f"{comparison.package} {comparison.version}"
        if left.changed:
            yield f"{left.line}. {remedy} {left.install}."
        if new := set_by_user(args, left.fields):
            yield f"{', '.join(new)}: new in {name}, and not known to grpo_math's loss."
        known = [*stored()[comparison.package].values()][-1].fields.keys()
        if done and comparison.changed and (untried := set_by_user(args, known - done)):
            yield f"{', '.join(untried)}: set here, and `grpo-math selftest` has not tried it with {name}."


def set_by_user(args: Any, names: Collection[str]) -> list[str]:
    """Return those of these fields that do not have the value that `GRPOConfig` gives them if they are left out."""
    config = next(kind for kind in type(args).__mro__ if kind.__name__ == "GRPOConfig")
    # Some defaults follow from other fields. TRL refuses to be given this one and steps_per_generation.
    left_out = {*names, "generation_batch_size"}
    others = {one.name: getattr(args, one.name) for one in fields(config) if one.init and one.name not in left_out}
    with catch_warnings(action="ignore"):
        plain = config(**others) if names else args
    return sorted(name for name in names if getattr(args, name, None) != getattr(plain, name, None))


def passed() -> Path:
    """Return the file that `grpo-math selftest` writes when it has passed with the installed versions.

    It lists the functions that the self-test has run, and the fields of `GRPOConfig` that it has set.
    """
    words = "-".join(f"{name}-{versions().get(name)}" for name in ("grpo_math", "torch", *stored()))
    return cache_dir() / "selftest" / words


def remember(names: set[str]) -> None:
    """Write the file of `passed`, with those of the names that a table has."""
    tables = [table for tables in stored().values() for table in tables.values()]
    known = names.intersection(name for table in tables for name in (*table.functions, *table.fields))
    passed().parent.mkdir(parents=True, exist_ok=True)
    passed().write_text("\n".join(sorted(known)), encoding="utf-8")


def tried() -> set[str]:
    """Return what the self-test has tried with the installed versions; nothing if it has not passed."""
    return {*passed().read_text(encoding="utf-8").split()} if passed().exists() else set()


def newest() -> dict[str, str]:
    """Return the newest tested minor version of each package whose functions are not compared."""
    tables = {package: minor([*tables][-1]) for package, tables in stored().items() if package not in HASHED}
    return {**WITHOUT_TABLE, **tables}


def newer() -> list[str]:
    """Return the packages of `newest` that are installed in a newer version.

    >>> from unittest.mock import patch
    >>> with patch.dict(WITHOUT_TABLE, torch="2.9"), patch.dict(versions(), torch="2.13.0+cpu"):
    ...     newer()
    ['torch 2.13.0+cpu (2.9)']
    """
    here = [(name, versions()[name], tested) for name, tested in newest().items() if name in versions()]
    return [f"{name} {has} ({tested})" for name, has, tested in here if Version(minor(has)) > Version(tested)]


@cache
def untested() -> list[Comparison]:
    """Compare the installed versions that were not tested."""
    comparisons = [
        compare(package, versions()[package], tables)
        for package, tables in stored().items()
        if package in versions() and versions()[package] not in tables
    ]
    return [one for one in comparisons if one.gone or one.package in HASHED]


def compare(package: str, version: str, tables: dict[str, Table]) -> Comparison:
    """Compare the installed version with all that were tested: a function may be that of any of them."""
    newest = list(tables.values())[-1]
    now = read(package, newest.needed, newest.functions)
    missing = set.intersection(*(set(table.needed) for table in tables.values())) - {*now.needed}
    # One class that has the method is enough: the call of a method does not show the class.
    methods = {name.rpartition(".")[2] for name in now.needed if "(" in name and "__init__" not in name}
    # A class first: its methods follow from it.
    gone = sorted(
        {name for name in missing if name.rpartition(".")[2] not in methods}, key=lambda name: ("(" in name, name)
    )
    changed = []
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


def read(package: str, needed: list[str], known: Collection[str] = ()) -> Table:
    """Return the table of the installed version. ``needed``: that of a table, or all names that may be used.

    ``known``: the methods of a table. A class may inherit them by now.
    """
    names, present, functions = {*needed}, set[str](), dict[str, str]()
    logged, settings = set[Any](), dict[str, str]()
    imported = {name for name in names | ALSO_READ if name.startswith(f"{package}.")}
    for path in sorted(imported):
        module, _, name = path.rpartition(".")
        if name in defined_names(source_text(module)) or source_text(path):
            present |= {path} & names
        for source, node in definitions(module, name):
            logged |= (METRICS.keys() | ALSO_LOGGED) & defined_names(source)
            body = node.body if isinstance(node, ast.ClassDef) else [node]
            for function in [one for one in body if isinstance(one, FUNCTION)]:
                method = name if function is node else f"{name}.{function.name}"
                used = {f"{method}({argument})" for argument in ("", *argument_names(function))} & names
                is_own = package == "trl" or function.name in COPIED or f"{method}()" in used
                if method in known or (is_own and node.name == name):
                    functions.setdefault(method, digest(source, function))
                present |= used
            text = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
            if name.endswith("Trainer"):
                attributes = re.findall(r"(?:self\.|def )(\w+)(?=: [^=\n]+ = | = |\(\s*self)", text)
                present |= {f"trainer.{attribute}" for attribute in attributes} & names
            if name in SETTINGS:
                # A class comes before its bases.
                settings = {one.name: default(source, one) for one in declared_fields(node)} | settings
    hashed = package in HASHED
    return Table(sorted(present), functions if hashed else {}, sorted(logged) if hashed else [], settings)


@lru_cache(maxsize=8)
def defined_names(source: str) -> set[Any]:
    """Return the names and strings of a module. A name that is only read may be gone."""
    # A module that loads on demand lists its names as strings.
    nodes = [node for node in ast.walk(syntax_tree(source)) if not isinstance(getattr(node, "ctx", None), ast.Load)]
    return {getattr(node, key, None) for node in nodes for key in ("name", "id", "asname", "value")}


def definitions(module: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the source of the module that defines a function, and its node; or those of a class and of its bases in the
    same package. A module may import the name, and export it again.
    """
    source, file = source_text(module), source_file(module)
    parent = module if file and file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(syntax_tree(source)):
        if isinstance(node, ast.ClassDef | FUNCTION) and node.name == name:
            yield source, node
            bases = {ast.unparse(base).rpartition(".")[2] for base in getattr(node, "bases", ())} - {name}
            for base in bases:
                yield from definitions(module, base)
            return
        if isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), parent)
            exported = [alias.name for alias in node.names if name == (alias.asname or alias.name)]
            if exported and origin.partition(".")[0] == module.partition(".")[0]:
                yield from definitions(origin, exported[0])
                return


def default(source: str, field: DeclaredField) -> str:
    """Return the source of a field's default."""
    node = field.arguments.get("default", field.arguments.get("default_factory"))
    return (node and ast.get_source_segment(source, node)) or ""


def argument_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "self"]


def digest(source: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    r"""Return a hash of a function and its decorators, without its docstring, comments and empty lines.

    >>> hashes = []
    >>> for body in ("    '''Two.'''\n\n    # It is even.\n    return 2", "    return 2  # two", "    return 3"):
    ...     hashes.append(digest(f"def f(a):\n{body}", ast.parse(f"def f(a):\n{body}").body[0]))
    >>> hashes[0] == hashes[1], hashes[0] == hashes[2]
    (True, False)
    """
    first = node.body[0]
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if ast.get_docstring(node) is not None else ()
    start = min(part.lineno for part in (node, *node.decorator_list))
    # Lines of text, because what `ast.unparse` prints depends on the version of Python.
    numbers = [n for n in range(start, (node.end_lineno or 0) + 1) if n not in docstring]
    lines = source.splitlines()
    code = [re.sub(r"(^|\s)#.*", "", lines[n - 1]).rstrip() for n in numbers]
    return hashlib.sha256("\n".join(filter(None, code)).encode()).hexdigest()[:12]
