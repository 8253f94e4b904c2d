"""The Python tool and its sandbox: what each layer holds, programs that try to break out, and what a program prints."""

import json
import os
import socket
import struct
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers.utils import get_json_schema
from waiting import descendants, until

from grpo_math.errors import ConfigError, UserError
from grpo_math.tools import (
    PythonLimits,
    ToolError,
    interpreter,
    python,
    read_limits,
    read_tools,
    sandbox,
    syscalls,
    tool_limits,
)

LIMITS = PythonLimits(wall_seconds=30.0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")


def in_a_fork(code):
    """Run a program in a fork of this process, so that a test can take a layer away from the sandbox."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        if (pid := os.fork()) == 0:
            try:
                os.dup2(writer, 1)
                os.environ.clear()
                sandbox.enter(asdict(LIMITS), python.readable_folders(python.PACKAGES), folder)
                interpreter.run(code)
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
        facts = {
            "pid": os.getpid(),
            "port": tcp.getsockname()[1],
            "name": name,
            "secret": str(secret),
            "memory": (LIMITS.memory_mb + 64) << 20,
            "shared": f"/dev/shm/grpo_math_{os.urandom(8).hex()}",
        }
        answer = run(
            (Path(__file__).parents[1] / "processes/attack.py")
            .read_text(encoding="utf-8")
            .replace('"FACTS"', repr(json.dumps(facts)))
        )
    return {kind for kind, count in json.loads(answer).items() if count}


def test_a_program_breaks_out_of_nothing():
    assert broken_into(lambda code: python.call(code, LIMITS)) == set()
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


@pytest.mark.parametrize(
    ("owner", "function", "answer", "message"),
    [
        # A pipe: Landlock takes folders.
        (python, "readable_folders", ["/proc/self/fd/0"], "cannot be started: .*landlock"),
        (syscalls.platform, "machine", "riscv64", "needs Linux on x86-64 or ARM64"),
    ],
    ids=["Landlock fails", "a machine without a filter"],
)
def test_without_each_of_its_layers_no_program_runs(owner, function, answer, message, monkeypatch):
    monkeypatch.setattr(python, "_servers", {})
    monkeypatch.setattr(python, "PAUSES", (0.0,))
    monkeypatch.setattr(owner, function, lambda *packages: answer)
    with pytest.raises(ToolError, match=message):
        python.call("1", LIMITS)


def test_packages_that_are_links_into_an_installers_cache_can_be_read_in_both_places(tmp_path, monkeypatch):
    (tmp_path / "cache/linked").mkdir(parents=True)
    (tmp_path / "cache/linked/__init__.py").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site/linked").symlink_to(tmp_path / "cache/linked")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert python.readable_folders(("linked", "missing"))[-2:] == [f"{tmp_path}/site", f"{tmp_path}/cache"]


# What the tool prints, cuts and refuses, and the form in which TRL takes it


@pytest.mark.parametrize(
    ("code", "limits", "text", "status"),
    [
        ("print(6 * 7)", {}, "42", "done"),
        ("x = 6\nx * 7", {}, "42", "done"),
        ("x = 1", {}, "(no output)", "done"),
        ("print('before')\n[][0]", {}, "before\nIndexError: list index out of range", "failed"),
        ("def f(", {}, "SyntaxError: '(' was never closed", "failed"),
        ("raise SystemExit('no')", {}, "no", "failed"),
        ("raise SystemExit(1)", {}, "(no output)", "failed"),
        ("import threading\nthreading.Timer(0.3, print, [7]).start()\n6", {}, "6\n7", "done"),
        (
            "import threading, time\nthreads = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(32)]\n"
            "for one in threads:\n    one.start()\nlen(threads)",
            *({}, "32", "done"),
        ),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\nP(3)", {}, "P(x=3)", "done"),
        ("'é', '∑'", {}, "('é', '∑')", "done"),
        ("import sys\nprint('w', file=sys.stderr)\n1", {}, "1", "done"),
        ("import numpy, sympy\nint(numpy.arange(5) @ numpy.arange(5)), sympy.prime(10)", {}, "(30, 29)", "done"),
        pytest.param(
            *("while True: pass", {"cpu_seconds": 1, "wall_seconds": 100.0}),
            *("TimeoutError: stopped after 1 CPU seconds", "timeout"),
            id="the program's own seconds and not the clock's",
        ),
        pytest.param(
            *("for n in range(1000): print(n)", {"output_chars": 10}),
            *("0\n1\n2\n3\n4\n\n(cut: it printed more than 10 characters)", "failed"),
            id="output is cut and says so",
        ),
        pytest.param(
            *("print('é' * 300_000)", {"output_chars": 300_000}, "é" * 300_000, "done"),
            id="more than a pipe holds is read to its end",
        ),
    ],
)
def test_a_program_is_answered_as_by_a_python_prompt(code, limits, text, status):
    answer = python.call(code, replace(LIMITS, **limits))
    assert (answer, answer.status) == (text, status)


def test_each_call_is_new_and_random_numbers_repeat():
    code = "import random\nseen = globals().get('seen', 0) + 1\nprint(seen, random.random(), hash('text'))"
    assert len({python.call(code, LIMITS) for _ in range(3)}) == 1


def test_a_server_that_died_is_started_again():
    old = python.server().process
    old.kill()
    old.wait(timeout=60)
    assert python.call("1 + 1", LIMITS) == "2"
    assert python.server().process.pid != old.pid


@pytest.mark.slow
def test_programs_end_with_the_process_that_asked_for_them():
    """Killed where it stands, a trainer leaves no program behind."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(python.server().process.pid).encode())
            python.call("import time\ntime.sleep(100)", PythonLimits(wall_seconds=100.0))
        finally:
            os._exit(1)
    server = int(os.read(reader, 100))
    until(lambda: len(descendants(server)) == 2)  # the program, and the process that keeps it
    time.sleep(0.5)  # the program is in its sleep
    left = [server, *(process.pid for process in descendants(server))]
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    until(lambda: not any(Path(f"/proc/{one}").exists() for one in left), 60.0)


OWN_TOOLS = '''
def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return str(a + b)


def bare(a):
    return a
'''


def test_transformers_describes_the_tools_to_a_model(tmp_path, monkeypatch):
    (tmp_path / "own_tools.py").write_text(OWN_TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    limits = PythonLimits(output_chars=3)
    tools = read_tools(["python", "own_tools:add"], limits)
    schemas = [get_json_schema(tool)["function"] for tool in tools]
    required = {schema["name"]: schema["parameters"]["required"] for schema in schemas}
    assert required == {"python": ["code"], "add": ["a", "b"]}
    assert [tool_limits(tool) for tool in tools] == [limits, None]
    assert tools[0](code="12345").startswith("123\n(cut")
    for name, says in (("own_tools:bare", "cannot be shown to a model"), ("shell", "is not known")):
        with pytest.raises(ConfigError, match=f"^tools='{name}' {says}.*: "):
            read_tools([name], limits)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cpu_seconds": 1.5}, "python.cpu_seconds=1.5 is not a whole number"),
        ({"wall_seconds": True}, "python.wall_seconds=True is not a number"),
        ({"wall_seconds": float("nan")}, "python.wall_seconds=nan is out of range"),
        ({"processes": 4}, "python='processes' is not known"),
        ({"memory": 1}, "python='memory' is not known: did you mean 'memory_mb'?"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(given, says):
    with pytest.raises(ConfigError) as refused:
        read_limits(given)
    assert str(refused.value).startswith(says)
