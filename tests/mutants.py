"""Change the code at random and print the changes that no quick test notices.

    python tests/mutants.py PACKAGE ... [--n 40] [--seed 0]

A mutant is one small change inside a function: a comparison is flipped, a `not` dropped, `+` becomes `-`, a number or
a truth value changes, two arguments swap, or a statement goes. Each mutant is made alone, in a copy of the repository.
The quick tests run there until one fails: the doctests of the package and `--fast` of `tests/PACKAGE`, those of the
changed file first, and then the tests of other folders that import the file. The mutants that pass all tests are
printed as a diff. Read them: either a test is missing, or the line can go, or both versions are right. A test that
fails on the unchanged code, too, is printed, and does not count.

Does not change strings, log calls, messages, annotations, matrices of example numbers, or the constants of a module or
class. The self-test is left out, because only slow tests run it.
"""

import argparse
import ast
import compileall
import difflib
import gc
import importlib
import multiprocessing
import os
import py_compile
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS, LIMIT = 30, 600  # the limits of one test, and of one run of pytest
PASSED = (0, 5)  # exit codes of pytest: all passed, and there is no test
SELF_TEST = {Path("grpo_math/checks", name) for name in ("selftest.py", "compared.py", "tiny_model.py")}
# Most tests import these modules. They are loaded once, before the forks.
HEAVY = ("datasets", "hypothesis", "peft", "pytest", "torch", "trl.trainer.grpo_trainer")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
OPPOSITE: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Without the assignment of a name, its reader would fail, which any test notices.
DELETED = ast.AugAssign | ast.Raise | ast.Delete | ast.If | ast.For | ast.Continue | ast.Break | ast.Return
LOGGING = {"print", "say", "warn", "debug", "info", "warning", "warning_once", "error", "switched_off"}
# Keywords without an effect on a correct program, and arguments whose order is free.
LAYOUT = {"strict", "flush", "indent", "stacklevel", "non_blocking", "timeout"}
SYMMETRIC = {"max", "min", "gcd", "isclose", "allclose", "promote_types", "transpose"}


class Mutant(NamedTuple):
    """`path`, relative to the repository, has `text` from byte `start` to byte `end`."""

    path: Path
    line: int
    start: int
    end: int
    text: str

    def source(self, original: bytes) -> bytes:
        return original[: self.start] + self.text.encode() + original[self.end :]

    def diff(self, original: bytes) -> str:
        old, new = (text.decode().splitlines() for text in (original, self.source(original)))
        lines = list(difflib.unified_diff(old, new, n=2, lineterm=""))[2:]
        return "\n".join([f"{self.path}:{self.line}", *lines, ""])


def mutants_of(path: Path, source: bytes) -> list[Mutant]:
    """Return the mutants of one file that compile.

    >>> source = b"def f(a, b=1):\\n    print('a', 1)\\n    if not a:\\n        g(a, b)\\n"
    >>> for mutant in mutants_of(Path("f.py"), source):
    ...     print(mutant.line, source[mutant.start : mutant.end].decode().split()[0], "->", mutant.text)
    1 1 -> 2
    3 if -> pass
    3 not -> (a)
    4 g(a, -> pass
    4 g(a, -> g(b, a)
    >>> mutants_of(Path("f.py"), b"NUMBER = 1\\n")
    []
    """
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    mutants = []
    for node in _nodes(ast.parse(source), in_function=False):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        for text in _changes(node):
            mutant = Mutant(path, node.lineno, start, end, text)
            with suppress(SyntaxError):  # an elif cannot go without its if
                compile(mutant.source(source), path, "exec")
                mutants.append(mutant)
    return mutants


def _nodes(node: ast.AST, in_function: bool) -> Iterator[ast.AST]:
    """Yield the nodes of functions that may change."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LOGGING:
        return
    if in_function and hasattr(node, "lineno"):
        yield node
    for name, value in ast.iter_fields(node):
        # An f-string is text, and `raise` has the text of a message.
        if name in ("annotation", "returns", "decorator_list", "exc", "cause") or isinstance(node, ast.JoinedStr):
            continue
        # A matrix of numbers is an example, and another one would do.
        if isinstance(node, ast.List) and any(isinstance(row, ast.List) for row in node.elts):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and getattr(child, "arg", None) not in LAYOUT:
                yield from _nodes(child, in_function or isinstance(node, FUNCTIONS))


def _changes(node: ast.AST) -> Iterator[str]:
    """Yield what may replace the node."""
    match node:
        case ast.Compare(left, [operator, *others], values) if type(operator) in OPPOSITE:
            yield ast.unparse(ast.Compare(left, [OPPOSITE[type(operator)](), *others], values))
        case ast.BoolOp(operator, values):
            yield ast.unparse(ast.BoolOp(OPPOSITE[type(operator)](), values))
        case ast.BinOp(left, operator, right) if type(operator) in OPPOSITE and not _is_text(left, right):
            yield ast.unparse(ast.BinOp(left, OPPOSITE[type(operator)](), right))
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value) | float(value)):
            yield str(value + 1)
        case ast.Call(function, [first, second, *others], keywords) if _may_swap(function, first, second):
            yield ast.unparse(ast.Call(function, [second, first, *others], keywords))
        case ast.Expr(ast.Call() as call) if any(_nodes(call, in_function=True)):
            yield "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript(), *_]):
            yield "pass"
        case _ if isinstance(node, DELETED):
            yield "pass"


def _is_text(*operands: ast.expr) -> bool:
    return any(isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", 0), str) for node in operands)


def _may_swap(function: ast.expr, first: ast.expr, second: ast.expr) -> bool:
    name = getattr(function, "attr", getattr(function, "id", ""))
    unpacked = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    return name not in SYMMETRIC and not unpacked and ast.unparse(first) != ast.unparse(second)


def sample(root: Path, package: str, n: int, seed: int) -> list[Mutant]:
    """Return ``n`` mutants of a package. A change of the code elsewhere does not change which."""
    paths = {path.relative_to(root) for path in root.glob(f"grpo_math/{package}/**/*.py")}
    mutants = {}
    for path in paths - SELF_TEST:
        source = (root / path).read_bytes()
        for mutant in mutants_of(path, source):
            line = source[source.rfind(b"\n", 0, mutant.start) : mutant.end].decode()
            mutants[sha256(f"{seed} {path} {line} {mutant.text}".encode()).hexdigest()] = mutant
    return [mutants[key] for key in sorted(mutants)[:n]]


def quick_tests(package: str, path: Path) -> Iterator[list[str]]:
    """Yield the tests of the file `path`, the doctests and tests of its package, and other tests that import it."""
    tests = sorted(ROOT.glob(f"tests/{package}/test_*{path.stem}*.py"))
    yield [str(path), *(str(file.relative_to(ROOT)) for file in tests)]
    yield [f"grpo_math/{package}", f"tests/{package}"]
    imported = re.compile(rf"grpo_math\.{package}(\.| import .*\b){path.stem}\b")
    # Another process has the pretended GPU.
    others = {*ROOT.glob("tests/*/test_*.py")} - {*ROOT.glob(f"tests/{package}/*"), *ROOT.glob("tests/gpu_like/*")}
    if files := [str(file.relative_to(ROOT)) for file in sorted(others) if imported.search(file.read_text())]:
        yield files


class LastStarted:
    """A plugin of pytest that writes the id of each test that starts, and of a file that cannot be imported."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write_text(nodeid)

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:
            self.file.write_text(report.nodeid)


def failed_test(tests: list[str], copy: Path) -> str:
    """Run the tests in the copy, in a fork of this process, until one fails or hangs. Return its id, or ""."""
    last = copy.parent / "last"
    last.write_text(tests[-1])  # if not even conftest.py can be imported
    child = multiprocessing.get_context("fork").Process(target=_run, args=(tests, copy))
    child.start()
    child.join(LIMIT)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # also the processes that a test left behind
    child.join()
    return last.read_text() if child.exitcode not in PASSED else ""


def _run(tests: list[str], copy: Path) -> None:
    """Run the tests in the copy and end this process."""
    os.setpgid(0, 0)
    log = os.open(copy.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if ROOT not in (Path(entry), Path(entry).parent))]
    options = ["-x", "-q", "--assert=plain", f"--timeout={SECONDS}", "-p", "no:cacheprovider"]
    # tests/conftest.py has the option, and doctests alone do not load it.
    options += ["--fast"] * any(test.startswith("tests/") for test in tests)
    plugins = [LastStarted(copy.parent / "last")]
    os._exit(importlib.import_module("pytest").main([*options, *tests], plugins))


def try_out(packages: list[str], n: int, seed: int) -> None:
    """Print each mutant of a random sample that survives, and how many were caught."""
    os.environ.update(ENVIRONMENT)
    for name in HEAVY:
        importlib.import_module(name)
    gc.freeze()  # pytest collects garbage at its end: not what all forks share
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build"))
        # A compiled file counts for exactly its source, not for its date.
        compileall.compile_dir(copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        for package in packages:
            survived, mutants = 0, sample(copy, package, n, seed)
            for mutant in mutants:
                original = (copy / mutant.path).read_bytes()
                (copy / mutant.path).write_bytes(mutant.source(original))
                tests = quick_tests(package, mutant.path)
                failed = next(filter(None, (failed_test(some, copy) for some in tests)), "")
                (copy / mutant.path).write_bytes(original)
                # A test that fails on the unchanged code shows nothing.
                if failed and failed not in sound and failed_test([failed], copy):
                    print(f"{failed} fails on the unchanged code", flush=True)
                    failed = ""
                if failed:
                    sound.add(failed)
                else:
                    survived += 1
                    print(mutant.diff(original), flush=True)
            print(f"{package}: {len(mutants) - survived} of {len(mutants)} mutants caught", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packages = sorted({path.parent.name for path in ROOT.glob("grpo_math/*/__init__.py")})
    parser.add_argument("packages", nargs="+", choices=packages, metavar="PACKAGE", help="a folder of grpo_math")
    parser.add_argument("--n", type=int, default=40, help="number of mutants of each package, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    try_out(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
