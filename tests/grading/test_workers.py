"""Real worker processes: limits of CPU time and memory, kills from outside, busy machines, forks, Ctrl-C, threads.

At the end, answers that hang, fill memory, or break out: each row of cases/hostile_answers.jsonl, and the machine
afterwards. A text there is a list of [piece, count], so that a 100,000-character string takes a short line.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from waiting import until

from grpo_math.grading import Verdict, grade, grade_batch, workers
from grpo_math.grading.where import TAIL
from grpo_math.grading.workers import Pool

ROOT = Path(__file__).parents[2]
HANGS = r"\sum_{i=1}^{10^9} \sin(i^i)"
NEEDS_WORKER = ("x^2-1", "(x-1)(x+1)")


def pids_of(pool: Pool) -> list[int]:
    return [worker.process.pid for worker in list(pool.workers)]


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def one():
    with contextlib.closing(Pool(1)) as pool:
        yield pool


# ------------------------------------------------------------------------------------------------------ its own limits


@pytest.mark.slow
def test_a_slow_answer_is_uncheckable_and_delays_no_other():
    jobs = [("42", HANGS), *[("x^2-1", f"(x-1)(x+1)+{n}-{n}") for n in range(20)]]
    with contextlib.closing(Pool(2)) as pool:
        slow, *others = pool.run(jobs, 0.5)
    assert (slow.verdict, slow.reason) == (Verdict.UNCHECKABLE, "more than 0.5 s of CPU time")
    assert [o.verdict for o in others] == [Verdict.CORRECT] * 20
    assert slow.seconds >= 0.5  # one try


@pytest.mark.full
def test_an_answer_that_fills_the_memory_harms_no_later_answer(one):
    [outcome] = one.run([("1+2^{10^{10}}", r"\sum_{i=1}^{2} i^{10^{10}}")], 60.0)  # 2^(10^10) alone takes 1.25 GB
    assert not outcome.verdict.ungradable
    assert one.run([NEEDS_WORKER], 60.0)[0].verdict is Verdict.CORRECT
    limits = Path(f"/proc/{pids_of(one)[0]}/limits").read_text()
    assert limits.split("Max address space")[1].split()[0] == str(workers.MEMORY_BYTES)


@pytest.mark.slow
def test_a_worker_that_does_not_reply_is_replaced(one, monkeypatch):
    monkeypatch.setattr(workers, "WALL", 1)
    one.run([NEEDS_WORKER], 60.0)
    [stopped] = pids_of(one)
    os.kill(stopped, signal.SIGSTOP)
    assert one.run([NEEDS_WORKER], 2.0)[0].verdict is Verdict.CORRECT
    assert not alive(stopped)


@pytest.mark.slow
def test_a_gold_answer_that_cannot_be_checked_is_a_bad_gold():
    completions = [r"\boxed{5}", rf"\boxed{{{HANGS}}}", rf"\boxed{{{HANGS}}}"]
    grades = grade_batch([HANGS, HANGS, "42"], completions, timeout=0.3)
    assert [g.verdict for g in grades] == [Verdict.BAD_GOLD, Verdict.CORRECT, Verdict.UNCHECKABLE]


# ------------------------------------------------------------------------------------------------------- what kills it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kills", "outcome"),
    [
        ((r"\int_0^1 x dx", r"\int_0^1 (1+x)^{30}(1-x)^{30} dx"), 1, (Verdict.WRONG, "Math-Verify")),
        (("42", HANGS), 2, (Verdict.CRASH, "the worker was killed")),
    ],
)
def test_an_answer_whose_worker_is_killed_once_is_compared_again_and_twice_is_a_crash(job, kills, outcome, one):
    outcomes, killed = [], set()
    thread = threading.Thread(target=lambda: outcomes.extend(one.run([job], 20.0)))
    thread.start()
    for _ in range(kills):
        until(lambda: set(pids_of(one)) - killed)
        time.sleep(0.3)  # the worker compares
        [pid] = set(pids_of(one)) - killed
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    thread.join(120)
    assert [(results.verdict, results.reason) for results in outcomes] == [outcome]
    one.run([NEEDS_WORKER], 20.0)
    for pid in pids_of(one):  # while it is idle
        os.kill(pid, signal.SIGKILL)
    assert one.run([NEEDS_WORKER], 20.0)[0].verdict is Verdict.CORRECT


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_costs_no_answer(number, one):
    """Ctrl-C, torch's agent and SLURM send theirs to a whole group, and the trainer has a step to finish."""
    one.run([NEEDS_WORKER], 60.0)
    pids = pids_of(one)
    os.kill(pids[0], number)
    assert one.run([NEEDS_WORKER], 20.0)[0].verdict is Verdict.CORRECT
    assert pids_of(one) == pids


# ---------------------------------------------------------------------------------------- this process and its threads


def test_the_order_of_the_rows_is_kept_and_equal_rows_are_graded_once():
    counted = []
    rows = [("x+1", "1+x"), ("x^2-4", r"\boxed{(x-2)(x+2)}"), ("2", "3"), ("x^2-4", r"\boxed{(x-2)(x+2)}")]
    grades = grade_batch(*zip(*rows, strict=True), progress=counted.append)
    assert [str(g.verdict) for g in grades] == ["correct", "correct", "wrong", "correct"]
    assert grades[1] is grades[3]
    assert sum(counted) == 4


GRADES_THEN = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with SIGINT ignored
from grpo_math.grading import grade, grade_batch, workers
grade_batch(["72", r"\\frac12", "B", "(1,2)"], ["#### 72", "0.5", "The answer is (B).", "(1, 2)"])
heavy = ("torch", "sympy", "math_verify", "mpmath", "numpy", "grpo_math.grading.judge")
assert not workers._pools and not set(heavy) & set(sys.modules)  # exact answers need no worker
grade("x^2-1", "(x-1)(x+1)")
print(*[w.process.pid for w in workers.shared_pool().workers], flush=True)
hangs = r"\\sum_{i=1}^{10^9} \\sin(i^i)"
"""
FORK = """
child = os.fork()
if child:
    os._exit(0)
parents = [w.process.pid for w in workers.shared_pool().workers]
grade("x^2-9", "(x-3)(x+3)")
own = [w.process.pid for w in workers.shared_pool().workers]
print(set(own).isdisjoint(parents), flush=True)
sys.stdin.read()
"""
ENDS = {
    "an ordinary end": "",
    "os._exit": "os._exit(0)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL while a worker compares": """
threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()
grade("42", hangs, timeout=2.0)
""",
    "Ctrl-C while a worker compares": """
threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
grade("42", hangs, timeout=300.0)
""",
    "a forked child lives on": FORK,
}


@pytest.mark.slow
@pytest.mark.parametrize("then", ENDS)
def test_no_worker_outlives_its_parent_after(then):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", GRADES_THEN + ENDS[then]]
    with subprocess.Popen(command, text=True, cwd=ROOT, start_new_session=True, **pipes) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert pids
        if then == "a forked child lives on":
            assert process.stdout.readline() == "True\n"
        process.wait(60)
        until(lambda: not any(map(alive, pids)), 60.0, "a worker is left")
        # With Ctrl-C it is the user's own. No worker prints one.
        assert process.communicate()[1].count("Traceback") == ("Ctrl-C" in then)


@pytest.mark.slow
def test_threads_share_the_workers_and_a_program_without_a_main_guard_is_not_imported_again(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "print('imported', flush=True)\n"
        "import sys, threading\n"
        "from grpo_math.grading import grade, shutdown\n"
        "work = lambda n: sys.stdout.write(grade(f'x^2-{n * n}', f'(x-{n})(x+{n})') + '\\n')\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 4)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "shutdown()\n"
        "work(4)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split() == ["imported", *["correct"] * 4]


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_one_clear_error(monkeypatch, tmp_path, one):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no module of that name')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        workers.WorkerError, match=r"the grading worker cannot start: .* -m grpo_math\.grading\.judge \d+ says why"
    ):
        one.run([NEEDS_WORKER], 5.0)


LIMITED = """
import os, resource, sys
from grpo_math.grading import workers
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
pauses = []
def sleep(pause):
    pauses.append(pause)
    if len(pauses) == int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
workers.time.sleep = sleep
print(workers.Pool(1).run([("x^2-1", "(x-1)(x+1)")], 20.0)[0].verdict, pauses)
"""


@pytest.mark.slow
def test_a_system_without_open_files_left_is_asked_again_and_then_one_clear_error():
    again = subprocess.run([sys.executable, "-c", LIMITED, "2"], cwd=ROOT, capture_output=True, text=True)
    assert again.stdout == "correct [0.5, 2.0]\n", again.stderr
    done = subprocess.run([sys.executable, "-c", LIMITED, "0"], cwd=ROOT, capture_output=True, text=True)
    message = f"the grading worker cannot start: Too many open files: {workers.REMEDY}"
    assert done.stderr.splitlines()[-1].endswith(message)


# --------------------------------------------------------------------------------------------------- hostile answers

CASES = Path(__file__).parents[1] / "cases" / "hostile_answers.jsonl"

CALLER = 0.1  # seconds of CPU time in this process: ten times what the documentation says, for a slow machine
PWNED = Path("/tmp/grpo_math_pwned")  # what the rows would make


def text(pieces):
    return "".join(piece * count for piece, count in pieces)


@pytest.fixture(scope="module")
def graded():
    """(row, grade, seconds of CPU time in this process) for every row, one call each, with a worker ready."""
    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    results = []
    assert sum(str(PWNED) in text(row["prediction"]) for row in rows) >= 2
    PWNED.unlink(missing_ok=True)  # of a failed test
    for row in rows:
        grade("x^2-1", r"\boxed{(x-1)(x+1)}")  # waits for a worker where the last row had its killed
        started = time.process_time()
        [result] = grade_batch([text(row["gold"])], [text(row["prediction"])], timeout=0.5)
        results.append((row, result, time.process_time() - started))
    return results


@pytest.mark.slow
def test_every_row_costs_this_process_little(graded):
    assert [(row["kind"], seconds) for row, _, seconds in graded if seconds > CALLER] == []


@pytest.mark.slow
def test_a_true_pair_is_never_called_wrong_and_a_false_pair_is_never_called_correct(graded):
    same = [(row, g) for row, g, _ in graded if row["truth"] == "same" and len(text(row["prediction"])) <= TAIL]
    assert len(same) >= 20
    assert [row for row, g in same if g.verdict in (Verdict.WRONG, Verdict.NO_ANSWER)] == []
    assert [row for row, g, _ in graded if row["truth"] == "different" and g.verdict is Verdict.CORRECT] == []


@pytest.mark.slow
def test_no_answer_makes_itself_ungradable(graded):
    """Otherwise a policy could leave its bad answers out of the group's mean."""
    rows = [(row, g) for row, g, _ in graded if text(row["gold"]) == "42"]
    assert len(rows) >= 40
    assert [(row["kind"], g.reason) for row, g in rows if g.verdict.ungradable] == []


@pytest.mark.slow
def test_no_code_in_an_answer_ran_and_the_workers_are_within_their_memory(graded):
    assert not PWNED.exists()
    assert grade(r"\sqrt{12}", r"\boxed{2\sqrt{3}}") is Verdict.CORRECT
    for worker in workers.shared_pool().workers:
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        assert int(status.split("VmPeak:")[1].split()[0]) * 1024 <= workers.MEMORY_BYTES  # its peak
