"""The Python tool: what it prints, cuts and refuses, and the form in which TRL takes it."""

import os
import sys
import time
from pathlib import Path

import pytest
from transformers.utils import get_json_schema
from waiting import descendants, until

from grpo_math.errors import ConfigError
from grpo_math.tools import PythonLimits, limits_of, python, read_limits, read_tools

LIMITS = PythonLimits()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        ("print(6 * 7)", "42", "done"),
        ("x = 6\nx * 7", "42", "done"),
        ("x = 1", "(no output)", "done"),
        ("print('before')\n[][0]", "before\nIndexError: list index out of range", "failed"),
        ("def f(", "SyntaxError: '(' was never closed", "failed"),
        ("raise SystemExit('no')", "(no output)", "failed"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\nP(3)", "P(x=3)", "done"),
        ("'é', '∑'", "('é', '∑')", "done"),
        ("import sys\nprint('w', file=sys.stderr)\n1", "1", "done"),
        ("import numpy, sympy\nint(numpy.arange(5) @ numpy.arange(5)), sympy.prime(10)", "(30, 29)", "done"),
    ],
)
def test_a_program_is_answered_as_by_a_python_prompt(code, text, status):
    answer = python.call(code, LIMITS)
    assert (answer, answer.status) == (text, status)


@pytest.mark.slow
def test_cpu_seconds_are_the_programs_own_and_not_the_clocks():
    answer = python.call("while True: pass", PythonLimits(cpu_seconds=1, wall_seconds=100.0))
    assert (answer, answer.status) == ("TimeoutError: stopped after 1 CPU seconds", "timeout")


def test_output_is_cut_and_says_so_and_more_than_a_pipe_holds_is_read_to_its_end():
    answer = python.call("for n in range(1000): print(n)", PythonLimits(output_chars=10))
    assert answer == "0\n1\n2\n3\n4\n\n(cut: it printed more than 10 characters)"
    assert len(python.call("print('é' * 300_000)", PythonLimits(output_chars=300_000))) == 300_000


def test_each_call_is_new_and_random_numbers_repeat():
    code = "import random\nseen = globals().get('seen', 0) + 1\nprint(seen, random.random(), hash('text'))"
    assert len({python.call(code, LIMITS) for _ in range(3)}) == 1


def test_a_server_that_died_is_started_again():
    old = python.server().process
    old.kill()
    old.wait(timeout=60)
    assert python.call("1 + 1", LIMITS) == "2"
    assert python.server().process.pid != old.pid


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


def test_transformers_describes_the_tools_to_a_model(tmp_path, monkeypatch):
    text = 'def add(a: int, b: int) -> str:\n    """Add.\n\n    Args:\n        a: One.\n        b: Another.\n    """\n'
    (tmp_path / "own_tools.py").write_text(f"{text}    return str(a + b)\n\ndef bare(a):\n    return a\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    limits = PythonLimits(output_chars=3)
    tools = read_tools(["python", "own_tools:add"], limits)
    schemas = [get_json_schema(tool)["function"] for tool in tools]
    parameters = {schema["name"]: schema["parameters"]["required"] for schema in schemas}
    assert parameters == {"python": ["code"], "add": ["a", "b"]}
    assert [limits_of(tool) for tool in tools] == [limits, None]
    assert tools[0](code="12345").startswith("123\n(cut")
    for names, says in (
        (["own_tools:bare"], "tools='own_tools:bare' cannot be shown to a model"),
        (["own_tools:none"], "tools='own_tools:none' names no function of own_tools"),
        (["shell"], "tools='shell' is not known"),
    ):
        with pytest.raises(ConfigError, match=f"^{says}.*: ") as refused:
            read_tools(names, limits)
        assert "\n" not in str(refused.value)


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
