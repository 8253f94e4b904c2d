"""The sandbox: what each layer holds, as root and as an ordinary user, and environments in unusual places."""

import json
import os
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import asdict
from pathlib import Path

import pytest

from grpo_math.errors import UserError
from grpo_math.tools import PythonLimits, ToolError, program, python, sandbox, syscalls

ROOT = Path(__file__).parents[2]
LIMITS = PythonLimits(wall_seconds=30.0)
ATTACK = (Path(__file__).parents[1] / "processes/attack.py").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")


def in_the_tool(code):
    return python.call(code, LIMITS)


def in_a_fork(code):
    """Run a program in a fork of this process, so that a test can take a layer away from the sandbox."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        if (pid := os.fork()) == 0:
            try:
                os.dup2(writer, 1)
                os.environ.clear()
                sandbox.enter(asdict(LIMITS), python.readable_folders(), folder)
                program.run(code)
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
    with open(reader, encoding="utf-8") as output:
        return output.read()


def broken_into(run):
    """Let a program attack this process; return what it could do."""
    name = f"\0grpo_math_{os.getpid()}_{os.urandom(4).hex()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as local,
    ):
        os.chmod(folder, 0o777)
        secret = Path(folder, "secret")
        secret.touch()
        local.bind(name)
        local.listen()
        memory = (LIMITS.memory_mb + 64) << 20
        facts = {"pid": os.getpid(), "port": tcp.getsockname()[1], "name": name, "secret": str(secret)}
        facts |= {"memory": memory, "shared": f"/dev/shm/grpo_math_{os.urandom(8).hex()}"}
        answer = run(ATTACK.replace('"FACTS"', repr(json.dumps(facts))))
    return {kind for kind, count in json.loads(answer).items() if count}


def test_a_program_breaks_out_of_nothing():
    assert broken_into(in_the_tool) == set()
    sandbox.require_layers()


@pytest.mark.parametrize(
    ("missing", "open_to_it"),
    [
        (["landlock"], {"files", "trainer"}),
        (["seccomp"], {"network", "processes", "signals"}),
        (["landlock", "seccomp"], {"network", "files", "processes", "trainer", "signals"}),
    ],
)
def test_each_layer_holds_what_the_docs_say(monkeypatch, missing, open_to_it):
    if "landlock" in missing:
        monkeypatch.setattr(sandbox, "_restrict_files", lambda *arguments: None)
    if "seccomp" in missing:
        monkeypatch.setattr(syscalls, "program", lambda: struct.pack("HBBI", syscalls.RETURN, 0, 0, syscalls.ALLOW))
    assert broken_into(in_a_fork) - {"files"} == open_to_it - {"files"}  # without seccomp, an owner can change modes
    monkeypatch.setattr(sandbox, "layers", lambda: {"landlock": 6, "seccomp": 1} | dict.fromkeys(missing, 0))
    with pytest.raises(UserError, match=f"(?i)cannot be sandboxed here .no {missing[0]}"):
        sandbox.require_layers()


@pytest.mark.parametrize("version", [1, 3])
def test_an_older_landlock_holds_as_much(monkeypatch, version):
    if sandbox.layers()["landlock"] < version:
        pytest.skip(f"this kernel has no Landlock {version}")
    monkeypatch.setattr(sandbox, "layers", lambda: {"landlock": version, "seccomp": 1})
    assert broken_into(in_a_fork) == set()


def test_a_layer_that_fails_stops_the_program(monkeypatch):
    monkeypatch.setattr(python, "_server", None)
    monkeypatch.setattr(python, "PAUSES", (0.0,))
    monkeypatch.setattr(python, "readable_folders", lambda: ["/proc/self/fd/0"])  # a pipe: Landlock takes folders
    with pytest.raises(ToolError, match=r"cannot be started: .*landlock"):
        python.call("1", LIMITS)


PROBE = (
    "import importlib.util\n"
    "from grpo_math.tools import PythonLimits, call\n"
    "limits = PythonLimits(wall_seconds=60.0)\n"
    "numpy = 'numpy' if importlib.util.find_spec('numpy') else 'math'\n"
    "print(call(f'import random, {numpy}; print({numpy}.gcd(84, 126))', limits), end=' ')\n"
    "print(call(\"open('/etc/passwd')\", limits).status)\n"
)
PACKAGES = ("yaml", "numpy", "numpy.libs")  # what the probe needs


def answer_of(interpreter, **options):
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **options.pop("env", {})}
    ran = subprocess.run([interpreter, "-c", PROBE], env=env, capture_output=True, text=True, cwd="/", **options)
    return ran.stdout or ran.stderr[-2000:]


def link_packages(folder):
    """Link the packages that the probe needs, as some installers do from their cache."""
    [library] = folder.glob("lib/python*")
    site = library / "site-packages"
    site.mkdir(exist_ok=True)
    for name in PACKAGES:
        if (package := Path(sysconfig.get_path("platlib"), name)).exists():
            (site / name).symlink_to(package)


@pytest.mark.slow
def test_the_environment_may_be_read_only_behind_a_link_in_a_temporary_folder_with_spaces(tmp_path):
    folder = tmp_path / "mein Ordner – ü 数"
    venv.create(folder, symlinks=True)
    link_packages(folder)
    (tmp_path / "link").symlink_to(folder)
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert answer_of(tmp_path / "link/bin/python") == "42 failed\n"
    finally:
        for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user already")
def test_an_ordinary_user_has_the_tool_too():
    user = {"user": 65534, "group": 65534, "extra_groups": []}
    for interpreter in (sys.executable, "/usr/bin/python3"):
        try:
            answer = answer_of(interpreter, **user)
        except OSError:
            continue
        if "Permission" not in answer and "No module named 'grpo_math'" not in answer:
            assert answer == "42 failed\n"
            return
    pytest.skip("no interpreter and checkout that an ordinary user can read")
