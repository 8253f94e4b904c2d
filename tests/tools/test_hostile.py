"""Programs that fork, hang, flood, look around and break out: each row of cases/hostile_programs.yaml, and the state of
the machine afterwards."""

import os
import re
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
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
def answers(tmp_path_factory, request):
    """The answers, by name, of the programs that are tested now. They run at once, and leave nothing behind."""
    cases = [item.callspec.params["case"] for item in request.session.items if item.path == Path(__file__)]
    folder, secret = tmp_path_factory.mktemp("programs"), tmp_path_factory.mktemp("trainer") / "secret"
    secret.write_text(CANARY)
    patch = pytest.MonkeyPatch()
    patch.setenv("GRPO_MATH_CANARY", CANARY)
    patch.setattr(tempfile, "tempdir", str(folder))  # where the programs get their folders
    patch.setattr(python, "_servers", {})
    server = python.server()
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(6) as threads:
        words = {"PID": str(os.getpid()), "PORT": str(listening.getsockname()[1]), "SECRET": str(secret)}

        def answer(case):
            code = re.sub("|".join(words), lambda word: words[word[0]], case["code"])
            return case["name"], python.call(code, PythonLimits(**{**LIMITS, **case.get("limits", {})}))

        before = memory()
        yield dict(threads.map(answer, cases))
        assert memory() - before < 50_000_000
    assert python.call("1 + 1", PythonLimits(**LIMITS)) == "2"
    until(lambda: not descendants(server.process.pid))
    patch.undo()
    assert [*folder.iterdir()] == []
    assert not Path("/dev/shm/grpo_math_pwned").exists()
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == (CANARY, 0o644)


@pytest.mark.parametrize("case", CASES, ids=itemgetter("name"))
def test_a_hostile_program_gets_an_answer_and_nothing_else(answers, case):
    answer = answers[case["name"]]
    assert re.search(case["says"], answer), str(answer)
    assert answer.status == case.get("status", answer.status), str(answer)
    assert CANARY not in answer
    assert len(answer) <= LIMITS["output_chars"] + 300
    assert len(CASES) > 100
