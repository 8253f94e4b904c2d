"""Programs that fork, hang, flood, look around and break out: each row of cases/hostile_programs.yaml, and the state of
the machine afterwards."""

import os
import re
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from waiting import descendants, until

from grpo_math.tools import PythonLimits, python

CASES = yaml.safe_load((Path(__file__).parents[1] / "cases/hostile_programs.yaml").read_text(encoding="utf-8"))
LIMITS = {"cpu_seconds": 1, "wall_seconds": 30.0, "memory_mb": 200, "output_chars": 200}
CANARY = "canary-of-the-trainer"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")]


def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return each program's answer by its name, the server, the trainer's secret file and the growth of memory."""
    folder = tmp_path_factory.mktemp("programs")
    tempfile.tempdir = str(folder)  # where the programs get their folders
    secret = tmp_path_factory.mktemp("trainer") / "secret"
    secret.write_text(CANARY)
    os.environ["GRPO_MATH_CANARY"] = CANARY
    python._server = None
    server = python.server()
    tempfile.tempdir = None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = {"PID": str(os.getpid()), "PORT": str(listening.getsockname()[1]), "SECRET": str(secret)}
        calls = []
        for case in CASES:
            code = re.sub("|".join(words), lambda results: words[results[0]], case["code"])
            limits = PythonLimits(**{**LIMITS, **case.get("limits", {})})
            calls.append((code, limits))
        before = memory()
        with ThreadPoolExecutor(6) as threads:  # more than there are cores: many sleep
            answered = list(threads.map(lambda one: python.call(*one), calls))
        given = dict(zip([case["name"] for case in CASES], answered, strict=True))
        grown = memory() - before
    yield given, server, secret, grown, folder
    del os.environ["GRPO_MATH_CANARY"]
    python._server = None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_hostile_program_gets_an_answer_and_nothing_else(answers, case):
    answer = answers[0][case["name"]]
    assert re.search(case["says"], answer), str(answer)
    assert answer.status == case.get("status", answer.status), str(answer)
    assert CANARY not in answer
    assert len(answer) <= LIMITS["output_chars"] + 300


def test_nothing_is_left_behind(answers):
    _, server, secret, grown, folder = answers
    assert len(CASES) >= 80
    assert python.call("1 + 1", PythonLimits(**LIMITS)) == "2"
    until(lambda: not descendants(server.process.pid))
    assert list(folder.iterdir()) == []
    assert not Path("/dev/shm/grpo_math_pwned").exists()
    assert secret.read_text() == CANARY
    assert secret.stat().st_mode & 0o777 == 0o644
    assert grown < 50_000_000
