"""A tree of processes ends with its owner: stopped, crashed, or killed by SIGKILL; seen in the list of processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import adopting, alive, descendants, until

from grpo_math.system.supervisor import SupervisedCommand, send

# A program with a child in a session of its own, and a grandchild that was forked off twice, as a daemon is.
FAMILY = """
import signal, subprocess, sys, time
kind, *generation = sys.argv[1:]
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if generation != ["daemon"]:
    below = "daemon" if generation else "child"
    subprocess.Popen([sys.executable, __file__, kind, below], start_new_session=True)
    if generation and kind == "orphan":
        sys.exit()
time.sleep(600)
"""


@pytest.fixture
def family(tmp_path):
    """The program, whose path is in the arguments of its three processes."""
    program = tmp_path / "family.py"
    program.write_text(FAMILY)
    with adopting(str(program)):
        yield str(program)


@pytest.mark.parametrize("kind", ["plain", "orphan", "stubborn"])
def test_stop_ends_children_orphans_and_what_ignores_sigterm(kind, family):
    kept = SupervisedCommand([sys.executable, family, kind], grace=0.5 if kind == "stubborn" else 30)
    until(lambda: set(alive(family)) & set(alive("daemon")))
    code = kept.stop()
    assert alive(family) == []
    assert code == 128 + (signal.SIGKILL if kind == "stubborn" else signal.SIGTERM)
    assert kept.stop() == code


@pytest.mark.parametrize(
    ("level", "number"), [(0, signal.SIGKILL), (1, signal.SIGTERM)], ids=["the owner", "the supervisor"]
)
def test_the_tree_ends_with_an_owner_that_is_killed_and_with_a_supervisor_that_is_terminated(level, number, family):
    command = f"[sys.executable, {family!r}, 'plain']"
    program = (
        f"import sys; from grpo_math.system.supervisor import SupervisedCommand; SupervisedCommand({command}).wait()"
    )
    owner = subprocess.Popen([sys.executable, "-c", program])
    until(lambda: len(alive(family)) == 4)
    [owner, *descendants(owner.pid)][level].send_signal(number)
    owner.wait()
    until(lambda: not alive(family))


def test_what_a_command_leaves_behind_is_ended_and_its_exit_code_kept(family):
    started = f"subprocess.Popen([sys.executable, {family!r}, 'plain'])"
    program = f"import subprocess, sys, time; {started}; time.sleep(0.3); raise SystemExit(7)"
    assert SupervisedCommand([sys.executable, "-c", program]).wait() == 7
    assert alive(family) == []


def test_an_interrupt_reaches_the_module_and_no_other_process(tmp_path, monkeypatch):
    (tmp_path / "ranked.py").write_text(
        "import os, pathlib, sys, time\n"
        "if not os.fork():\n    time.sleep(600)\n"  # a forked helper, with the same command
        "pathlib.Path(sys.argv[1]).touch()\n"
        "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pathlib.Path(sys.argv[1] + '.saved').touch()\n"
    )
    agent = (
        "import subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, '-m', 'ranked', name], start_new_session=True)"
        " for name in sys.argv[1:]]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ranks = [str(tmp_path / f"rank{i}") for i in (0, 1)]
    kept = SupervisedCommand([sys.executable, "-c", agent, *ranks])
    until(lambda: all(Path(rank).exists() for rank in ranks))
    assert send("ranked", signal.SIGINT)
    assert kept.wait() == 0, "the agent was not interrupted, and the ranks ended well"
    assert all(Path(f"{rank}.saved").exists() for rank in ranks)
    assert not send("ranked", signal.SIGINT)
