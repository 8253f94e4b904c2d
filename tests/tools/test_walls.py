"""The walls, tried: all hold here, each missing layer is noticed, and an ordinary user's are as good as root's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_math.errors import UserError
from grpo_math.tools import PythonLimits, ToolError, python
from grpo_math.tools.walls import MEANING, refuse_without, walls

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")


def fallen(without, processes=1):
    """The walls that do not hold without these layers."""
    server = python._Server(packages=False, without=without)
    try:
        return {wall.name for wall in walls(PythonLimits(processes=processes), server) if not wall.holds}
    finally:
        server.close()


def test_all_walls_hold_here():
    found = walls(PythonLimits())
    assert [wall.name for wall in found] == list(MEANING)
    assert [wall for wall in found if not wall.holds] == []
    assert refuse_without(PythonLimits()) == []


@pytest.mark.parametrize("processes", [1, 4])
def test_they_hold_in_a_container_without_namespaces_too(processes):
    assert fallen(["spaces"], processes) == set()


@pytest.mark.parametrize("processes", [1, 4])
def test_they_hold_by_namespaces_alone(processes):
    layers = python.server().layers
    if not layers["spaces"]:
        pytest.skip("no namespaces on this machine")
    assert fallen(["landlock", "seccomp"], processes) == set()


@pytest.mark.parametrize(
    ("without", "through"),
    [
        (["spaces", "landlock"], {"files", "trainer"}),
        (["spaces", "seccomp"], {"network", "signals"}),
        (["spaces", "landlock", "seccomp"], {"network", "files", "trainer", "signals"}),
    ],
)
def test_a_missing_layer_is_noticed(without, through):
    told = {"processes"}  # root without another user has no bound on its processes
    if "landlock" not in without:
        told.add("files")  # and owns files, whose modes it can change
    assert fallen(without) - told == through


def test_an_old_landlock_alone_does_not_hold_files():
    """Before its third version a file of the interpreter can be emptied; that is not tried, but known."""
    server = python._Server(packages=False, without=["spaces"])
    server.layers["landlock"] = 2
    try:
        assert {wall.name for wall in walls(PythonLimits(), server) if not wall.holds} == {"files"}
    finally:
        server.close()


def test_a_run_without_walls_is_refused_unless_it_asks_for_that():
    server = python._Server(packages=False, without=["spaces", "landlock", "seccomp"])
    try:
        with pytest.raises(UserError, match=r"do not all hold here .*can open connections.*walls: any") as refused:
            refuse_without(PythonLimits(), server)
        assert "\n" not in str(refused.value)
        lines = refuse_without(PythonLimits(walls="any"), server)
        assert any("wall of network does not hold" in line for line in lines)
    finally:
        server.close()


def test_a_layer_that_fails_after_it_was_found_stops_the_program(tmp_path, monkeypatch):
    """No program runs with less than was found."""
    folder = tmp_path / "shown"
    folder.mkdir()
    shown = [*python.paths(), str(folder)]
    monkeypatch.setattr(python, "PAUSES", ())
    monkeypatch.setattr(python, "paths", lambda: shown)
    server = python._Server(packages=False)
    try:
        if not server.layers["spaces"]:
            pytest.skip("no namespaces on this machine")
        assert python.call("1", PythonLimits(), server) == "1"
        folder.rmdir()
        with pytest.raises(ToolError, match=r"cannot be started: .*No such file or directory"):
            python.call("1", PythonLimits(), server)
    finally:
        server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user already")
def test_they_hold_for_an_ordinary_user():
    program = (
        "import json\nfrom grpo_math.tools import PythonLimits\nfrom grpo_math.tools.python import _Server\n"
        "from grpo_math.tools.walls import walls\n"
        "for without in ([], ['spaces']):\n"
        "    server = _Server(False, without)\n"
        "    fallen = [w.name for w in walls(PythonLimits(processes=2), server) if not w.holds]\n"
        "    print(json.dumps([fallen, server.layers]))\n"
        "    server.close()\n"
    )
    how = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "capture_output": True, "text": True}
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    for interpreter in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([interpreter, "-c", program], env=env, **how)
        except OSError:
            continue
        if done.returncode == 0:
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            assert [fallen for fallen, _ in lines] == [[], []]
            assert lines[0][1]["spaces"] in ("user", "")
            return
    pytest.skip("no interpreter and checkout that an ordinary user can read")
