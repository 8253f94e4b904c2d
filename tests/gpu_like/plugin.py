"""Tests marked `pretended_gpu` run in a process of their own, in which the device is there.

A file's marked tests run together, in one child, when the first of them is due: one import of torch for all. Each is
then reported as itself, with what it printed and how it failed. In the child, `tests/conftest.py` calls `begin` before
anything imports torch.

Does not run a marked test where there can be no device: it is skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_like import device

MARK = "pretended_gpu"
GUARD, RESULTS = "GRPO_MATH_PRETENDED_GPU", "GRPO_MATH_PRETENDED_GPU_RESULTS"
ROOT = Path(__file__).parents[2]
LIMIT = 900  # seconds for a file


def begin() -> None:
    """In a child: make the device. Elsewhere: nothing."""
    if GUARD in os.environ:
        device.load(Path(os.environ[GUARD]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is left when others have deselected; in a child, what the parent wants of it."""
    if GUARD in os.environ:
        if RESULTS in os.environ:
            wanted = json.loads(Path(os.environ[RESULTS]).with_suffix(".wanted").read_text(encoding="utf-8"))
            items[:] = [item for item in items if item.nodeid in wanted]
        return
    of_file: dict[Path, list[str]] = {}
    for item in items:
        if item.get_closest_marker(MARK):
            of_file.setdefault(item.path, []).append(item.nodeid)
    config.stash[_wanted] = of_file


_wanted = pytest.StashKey[dict[Path, list[str]]]()
_done = pytest.StashKey[dict[str, dict[str, str]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_for_child(item):
        item.fixturenames.clear()  # type: ignore[attr-defined]  # the child sets them up


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not _is_for_child(pyfuncitem):
        return None
    _report(pyfuncitem)
    return True


def _is_for_child(item: pytest.Item) -> bool:
    return GUARD not in os.environ and item.get_closest_marker(MARK) is not None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a child: what became of a test, a line each, for the parent."""
    if RESULTS in os.environ and (report.when == "call" or not report.passed):
        line = {"id": report.nodeid, "outcome": report.outcome, "text": _text(report), "said": report.capstdout}
        with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _text(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return f"{report.longreprtext}\n{report.caplog[-4000:]}" if report.failed else ""


def _report(item: pytest.Item) -> None:
    if reason := device.hindrance():
        pytest.skip(f"no pretended GPU: {reason}")
    done = item.config.stash.setdefault(_done, {})
    if item.nodeid not in done:
        done |= run(item.config.stash[_wanted][item.path])
    mine = done[item.nodeid]
    print(mine["said"], end="")
    if mine["outcome"] == "skipped":
        pytest.skip(mine["text"].removeprefix("Skipped: "))
    if mine["outcome"] != "passed":
        pytest.fail(f"on the pretended GPU:\n{mine['text']}", pytrace=False)


def run(wanted: Sequence[str]) -> dict[str, dict[str, str]]:
    """Run tests in a child: what became of each, by its id."""
    files = dict.fromkeys(name.partition("::")[0] for name in wanted)
    built = device.library()
    results = built.parent / f"{os.getpid()}.{len(os.listdir(built.parent))}.jsonl"
    results.with_suffix(".wanted").write_text(json.dumps(wanted), encoding="utf-8")
    environment = {**os.environ, GUARD: str(built), RESULTS: str(results), "CUDA_VISIBLE_DEVICES": "0"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "--all", "-p", "no:xdist", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
        ending = f"the process ended with exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    except subprocess.TimeoutExpired:
        ending = f"the process took longer than {LIMIT} s"
    lost = {name: {"outcome": "failed", "text": ending, "said": ""} for name in wanted}
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return lost | {line["id"]: line for line in map(json.loads, lines)}
