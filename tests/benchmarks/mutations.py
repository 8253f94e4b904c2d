"""How many of the ways in which the code can be broken do the tests notice?

    python tests/benchmarks/mutations.py [--only TEXT...] [--results FILE] [--unbroken]

Each entry of mutations.yaml is made, one at a time, in a copy of the repository in a temporary folder, and its tests
are run there: *caught* if one of them fails, *let through* if all pass. Every verdict is a line of FILE as soon as it
is known, and what was caught is not run again; an entry whose texts or tests are others is. ``--only`` runs those
whose file, promise, or tests contain a TEXT. ``--unbroken`` runs their tests on the code as it is, where they have to
pass: a test that fails anyway notices nothing. Ends with 1 where anything was let through, or failed unbroken.

Torch is loaded once: each entry runs in a fork of a process that has it.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".yaml")
LIMIT = 400.0  # seconds, after which an entry's tests are killed: it hangs, or the machine is too busy to tell
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Mutation(NamedTuple):
    """``old`` becomes ``new`` in ``file``, which breaks the promise ``breaks``: one of ``tests`` must fail."""

    file: str
    breaks: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return sha256(repr(tuple(self)).encode()).hexdigest()[:16]


def mutations() -> list[Mutation]:
    """Those of mutations.yaml; a ``\\n`` in an unquoted text is a new line."""
    files = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return [
        Mutation(
            file, one["breaks"], *(one[name] for name in ("old", "new")), tuple(one.get("tests", of_file["tests"]))
        )
        for file, of_file in files.items()
        for one in of_file["mutations"]
    ]


def copied(folder: Path) -> Path:
    """The repository, compiled; what is compiled counts for the very source alone, however fast a file changes."""
    copy = folder / "repository"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build")
    shutil.copytree(ROOT, copy, ignore=ignored)
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(copy / "grpo_math", quiet=1, invalidation_mode=checked)
    return copy


def load() -> None:
    """Import what most tests import, for all that are forked from here."""
    os.environ.update(SETTINGS)
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401


def verdict(mutation: Mutation, copy: Path, log: Path) -> str:
    path = copy / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        return "text not found"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        code = _code_of(mutation.tests, copy, log)
    finally:
        path.write_text(text, encoding="utf-8")
    if code < 0:  # by a signal, after LIMIT for example: nothing is known
        return "killed"
    return {0: "let through", 4: "no such test", 5: "no such test"}.get(code, "caught")


def _code_of(tests: tuple[str, ...], copy: Path, log: Path) -> int:
    """What pytest ends with, in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            with open(log, "wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.setpgid(0, 0)
            os.chdir(copy)
            os.environ["PYTHONPATH"] = str(copy)
            sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
            import pytest

            # The doctests of a module alone do not load the conftest of the tests, which has this option.
            tiers = ["--all"] if any(test.startswith("tests/") for test in tests) else ["--doctest-modules"]
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tiers, *tests]))
        except BaseException:
            code = 1
        os._exit(code)
    started = time.monotonic()
    while time.monotonic() - started < LIMIT:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return -9


def run(chosen: list[Mutation], results: Path) -> Iterator[tuple[Mutation, str]]:
    """Each with its verdict, old or new."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    known = {line["key"]: "caught" for line in map(json.loads, lines) if line["verdict"] == "caught"}
    yield from ((one, known[one.key]) for one in chosen if one.key in known)
    todo = [one for one in chosen if one.key not in known]
    if not todo:
        return
    load()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for number, one in enumerate(todo, start=1):
            begun = time.monotonic()
            found = verdict(one, copy, Path(folder) / "log")
            if found == "no such test":
                print((Path(folder) / "log").read_text(encoding="utf-8", errors="replace")[-500:], file=sys.stderr)
            line = {"key": one.key, "verdict": found, "file": one.file, "breaks": one.breaks}
            line["seconds"] = round(time.monotonic() - begun, 1)
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            left = (time.monotonic() - started) / number * (len(todo) - number)
            where = f"{number} of {len(todo)}, {line['seconds']:.0f} s, about {left / 60:.0f} min to go"
            print(f"{found:<14} {one.file}: {one.breaks} ({where})", file=sys.stderr, flush=True)
            yield one, found


def unbroken(tests: list[str]) -> int:
    """How many of them fail on the code as it is."""
    load()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy, log = copied(Path(folder)), Path(folder) / "log"
        for number, test in enumerate(tests, start=1):
            if code := _code_of((test,), copy, log):
                failed += 1
                print(log.read_text(encoding="utf-8", errors="replace")[-2000:])
            print(f"{'failed' if code else 'passed'} {test} ({number} of {len(tests)})", file=sys.stderr, flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="those whose file, promise or tests contain one of these"
    )
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "grpo_math-mutations.jsonl")
    parser.add_argument("--unbroken", action="store_true", help="the tests on the unbroken code: all have to pass")
    given = parser.parse_args()
    chosen = [
        one for one in mutations() if any(text in " ".join((one.file, one.breaks, *one.tests)) for text in given.only)
    ]
    if given.unbroken:
        return unbroken(sorted({test for one in chosen for test in one.tests}))
    found = list(run(chosen, given.results))
    for one, word in found:
        if word != "caught":
            print(f"{word}: {one.file}: {one.breaks}\n    {one.old!r} -> {one.new!r}\n    {' '.join(one.tests)}")
    counts = Counter(word for _, word in found)
    print(f"{counts['caught']} of {len(found)} caught ({counts['caught'] / max(1, len(found)):.1%})")
    return int(counts["caught"] < len(found))


if __name__ == "__main__":
    sys.exit(main())
