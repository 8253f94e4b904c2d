"""Real worker processes: limits of CPU time and memory, kills from outside, busy machines, forks, Ctrl-C, threads."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from grpo_math.grading import Verdict, grade, grade_batch, shutdown, workers
from grpo_math.grading.workers import Pool, shared_pool

ROOT = Path(__file__).parents[2]
HANGS = r"\sum_{i=1}^{10^9} \sin(i^i)"
NEEDS_WORKER = ("x^2-1", "(x-1)(x+1)")
TAKES_A_SECOND = (r"\int_0^1 x dx", r"\int_0^1 (1+x)^{30}(1-x)^{30} dx")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_of(pool: Pool) -> list[int]:
    return [worker.process.pid for worker in list(pool.workers)]


def until(holds, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


def gone(pids, within: float) -> bool:
    return until(lambda: not any(map(alive, pids)), within)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def script(body: str, **options):
    # A shell's background job starts with SIGINT ignored, and its children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", heard + textwrap.dedent(body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)


@pytest.fixture
def two():
    """A pool of two workers of its own."""
    made = Pool(2)
    yield made
    made.close()


@pytest.fixture
def one():
    made = Pool(1)
    yield made
    made.close()


def kill_when_busy(pool: Pool, seen: set[int]) -> None:
    """Kill the worker of a pool of one when it compares; not one that was seen before."""

    def killed():
        for pid in pids_of(pool):
            if pid not in seen and alive(pid):
                before = cpu_seconds(pid)
                time.sleep(0.3)
                if alive(pid) and cpu_seconds(pid) - before > 0.02:
                    os.kill(pid, signal.SIGKILL)
                    seen.add(pid)
                    return True
        return False

    assert until(killed)


# ------------------------------------------------------------------------------------------------------ its own limits


@pytest.mark.slow
def test_a_slow_answer_is_uncheckable_and_delays_no_other(two):
    jobs = [("42", HANGS), *[("x^2-1", f"(x-1)(x+1)+{n}-{n}") for n in range(20)]]
    outcomes = two.run(jobs, 0.5)
    assert (outcomes[0].verdict, outcomes[0].reason) == (Verdict.UNCHECKABLE, "more than 0.5 s of CPU time")
    assert [o.verdict for o in outcomes[1:]] == [Verdict.CORRECT] * 20
    assert outcomes[0].seconds >= 1.0  # two tries


@pytest.mark.slow
def test_each_answer_has_its_whole_limit(one):
    jobs = [(r"\int_0^1 x dx", rf"\int_0^1 (1+x)^{{{n}}}(1-x)^{{{n}}} dx") for n in (*range(3, 10), *range(3, 10))]
    one.run([NEEDS_WORKER], 4.0)
    [pid] = pids_of(one)
    before = cpu_seconds(pid)
    outcomes = one.run(jobs, 4.0)  # several times what one answer takes
    assert pids_of(one) == [pid]
    assert cpu_seconds(pid) - before > 4.0
    assert {o.verdict for o in outcomes} == {Verdict.WRONG}


@pytest.mark.full
def test_a_message_that_needs_more_memory_than_the_limit_is_uncheckable():
    small = Pool(1, memory=300_000_000)
    try:
        [outcome] = small.run([("1" * 250_000_000, "5")], 60.0)
        assert (outcome.verdict, outcome.reason) == (Verdict.UNCHECKABLE, "out of memory")
        assert small.run([NEEDS_WORKER], 60.0)[0].verdict is Verdict.CORRECT
    finally:
        small.close()


@pytest.mark.full
def test_an_answer_that_fills_the_memory_harms_no_later_answer(one):
    [outcome] = one.run([("1+2^{10^{10}}", r"\sum_{i=1}^{2} i^{10^{10}}")], 60.0)  # 2^(10^10) alone takes 1.25 GB
    assert not outcome.verdict.ungradable
    assert one.run([NEEDS_WORKER], 60.0)[0].verdict is Verdict.CORRECT
    limits = Path(f"/proc/{pids_of(one)[0]}/limits").read_text()
    assert limits.split("Max address space")[1].split()[0] == str(workers.MEMORY_BYTES)


@pytest.mark.slow
def test_a_worker_that_has_grown_is_replaced():
    """Its memory would be missing for the next answer."""
    crowded = Pool(1, memory=110_000_000)  # a worker that has just started takes more than half of it
    try:
        pids = []
        for _ in range(2):
            assert crowded.run([NEEDS_WORKER], 60.0)[0].verdict is Verdict.CORRECT
            pids += pids_of(crowded)
        assert pids == []
    finally:
        crowded.close()


@pytest.mark.full
def test_a_busy_machine_changes_no_verdict(one):
    one.run([NEEDS_WORKER], 60.0)
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(5)]
    core = min(os.sched_getaffinity(0))
    for pid in (*pids_of(one), *[process.pid for process in spinning]):
        os.sched_setaffinity(pid, {core})
    try:
        started = time.monotonic()
        [outcome] = one.run([TAKES_A_SECOND], 3.0)
        assert outcome.verdict is Verdict.WRONG
        assert time.monotonic() - started > 3.0
    finally:
        for process in spinning:
            process.kill()
            process.wait()


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
    golds = [HANGS, HANGS, "42", r"\frac{1}{9^{9^{9^9}}}", "42"]
    completions = [r"\boxed{5}", rf"\boxed{{{HANGS}}}", rf"\boxed{{{HANGS}}}", r"\boxed{1}", r"\boxed{10^{-9^{9^9}}}"]
    verdicts = [g.verdict for g in grade_batch(golds, completions, timeout=0.5)]
    bad, unsure = Verdict.BAD_GOLD, Verdict.UNCHECKABLE
    assert verdicts == [bad, Verdict.CORRECT, unsure, bad, unsure]


@pytest.mark.slow
def test_a_gold_answer_without_structure_is_compared_by_its_text():
    gold = r"\frac{0}{"
    completions = [rf"#### {gold}", "#### 5", r"#### \sqrt{", r"#### \int_0^1 x dx"]
    verdicts = [str(g.verdict) for g in grade_batch([gold] * 4, completions, answer_format="gsm8k")]
    assert verdicts[0] == "correct"
    assert set(verdicts[1:]) <= {"wrong", "unparseable"}


# ------------------------------------------------------------------------------------------------------- what kills it


@pytest.mark.slow
def test_a_worker_that_is_killed_once_costs_no_answer(one):
    results = []
    thread = threading.Thread(target=lambda: results.extend(one.run([TAKES_A_SECOND], 20.0)))
    thread.start()
    kill_when_busy(one, set())
    thread.join(60)
    assert [o.verdict for o in results] == [Verdict.WRONG]


@pytest.mark.full
def test_an_answer_whose_worker_is_killed_twice_is_a_crash(one):
    results, seen = [], set()
    thread = threading.Thread(target=lambda: results.extend(one.run([("42", HANGS)], 20.0)))
    thread.start()
    for _ in range(2):
        kill_when_busy(one, seen)
    thread.join(60)
    assert [(o.verdict, o.reason) for o in results] == [(Verdict.CRASH, "the worker was killed")]
    assert one.run([NEEDS_WORKER], 20.0)[0].verdict is Verdict.CORRECT


@pytest.mark.slow
def test_workers_that_died_while_idle_cost_no_answer(two):
    two.run([NEEDS_WORKER] * 2, 60.0)
    for pid in pids_of(two):
        os.kill(pid, signal.SIGKILL)
    assert two.run([NEEDS_WORKER], 60.0)[0].verdict is Verdict.CORRECT


@pytest.mark.full
def test_workers_that_are_killed_all_the_time_make_no_right_answer_wrong(two):
    jobs = [pair for n in range(60) for pair in (("x^2-1", f"(x-1)(x+1)+{n}-{n}"), ("x^2-1", f"(x-1)(x+2)+{n}"))]
    done, kills = [], []

    def kill():
        while len(done) < len(jobs):
            enough = min(len(jobs), len(done) + 10)  # some answers in between
            for pid in pids_of(two)[:1]:
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)
            until(lambda enough=enough: len(done) >= enough)

    thread = threading.Thread(target=kill)
    thread.start()
    outcomes = two.run(jobs, 20.0, progress=done.append)
    thread.join()
    assert len(kills) >= 5
    assert sorted(done) == list(range(len(jobs)))
    for number, outcome in enumerate(outcomes):
        assert outcome.verdict in (Verdict.WRONG if number % 2 else Verdict.CORRECT, Verdict.CRASH)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_whole_group_costs_no_answer(number, one):
    """Ctrl-C, torch's agent and SLURM send theirs to a whole group, and the trainer has a step to finish."""
    one.run([NEEDS_WORKER], 60.0)
    pids = pids_of(one)
    os.kill(pids[0], number)
    assert one.run([NEEDS_WORKER], 20.0)[0].verdict is Verdict.CORRECT
    assert pids_of(one) == pids


# ---------------------------------------------------------------------------------------- this process and its threads


@pytest.mark.slow
def test_four_threads_share_the_workers(two):
    results = {}

    def work(n):
        results[n] = two.run([(f"x^2-{n * n}", f"(x-{n})(x+{n})")] * 5, 20.0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert {n: [str(o.verdict) for o in r] for n, r in results.items()} == {n: ["correct"] * 5 for n in range(1, 5)}
    assert len(pids_of(two)) <= 2


def test_the_order_of_the_rows_is_kept_and_equal_rows_are_graded_once():
    counted = []
    rows = [("x+1", "1+x"), ("x^2-4", r"\boxed{(x-2)(x+2)}"), ("2", "3"), ("x^2-4", r"\boxed{(x-2)(x+2)}")]
    grades = grade_batch(*zip(*rows, strict=True), progress=counted.append)
    assert [str(g.verdict) for g in grades] == ["correct", "correct", "wrong", "correct"]
    assert grades[1] is grades[3]
    assert sum(counted) == 4


@pytest.mark.slow
def test_shutdown_ends_the_workers_and_grading_starts_new_ones():
    grade(*NEEDS_WORKER)
    pids = pids_of(shared_pool())
    assert pids
    shutdown()
    assert gone(pids, within=2.0)
    assert grade(*NEEDS_WORKER) is Verdict.CORRECT


def test_the_exact_path_starts_no_process_and_imports_neither_sympy_nor_torch():
    process = script("""
        import sys
        from grpo_math.grading import grade_batch, workers
        grade_batch(["72", r"\\frac12", "B", "(1,2)"], ["#### 72", "0.5", "The answer is (B).", "(1, 2)"])
        heavy = ("torch", "sympy", "math_verify", "mpmath", "numpy", "grpo_math.grading.judge")
        print([name for name in heavy if name in sys.modules], workers._pools)
    """)
    assert process.communicate(timeout=60)[0].split() == ["[]", "{}"]


GRADES_THEN = """
    import os, signal, sys, threading, time
    from grpo_math.grading import grade, workers
    def main():
        grade("x^2-1", "(x-1)(x+1)")
        print(*[w.process.pid for w in workers.shared_pool().workers], flush=True)
        {then}
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("an ordinary end", "pass"),
        ("an exception", "raise SystemExit(3)"),
        ("os._exit", "os._exit(0)"),
        ("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)"),
        ("SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)"),
    ],
)
def test_no_worker_outlives_its_parent_after(name, then):
    process = script(GRADES_THEN.format(then=then), stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in process.communicate(timeout=60)[0].split()]
    assert pids
    assert gone(pids, within=10.0), name


@pytest.mark.slow
def test_a_busy_worker_outlives_its_parent_by_its_limit_at_most():
    hangs = GRADES_THEN.format(
        then="""threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        grade("42", r"\\sum_{i=1}^{10^9} \\sin(i^i)", timeout=2.0)"""
    )
    process = script(hangs, stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in process.communicate(timeout=60)[0].split()]
    assert gone(pids, within=60.0)


@pytest.mark.slow
def test_a_worker_ends_with_its_parent_although_a_forked_child_lives_on():
    process = script(
        GRADES_THEN.format(
            then="""child = os.fork()
        if not child:
            time.sleep(300)
        print(child, flush=True)
        os._exit(0)"""
        )
    )
    lines = [process.stdout.readline() for _ in range(2)]
    (*pids,), child = map(int, lines[0].split()), int(lines[1])
    try:
        assert gone(pids, within=10.0)
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_forked_child_starts_its_own_workers_and_leaves_the_parents_alone():
    shutdown()
    grade(*NEEDS_WORKER)
    mine = set(pids_of(shared_pool()))
    child = os.fork()
    if child == 0:  # pragma: no cover - the child
        fine = False
        try:
            fine = grade("x^2-9", "(x-3)(x+3)") is Verdict.CORRECT and not mine & set(pids_of(shared_pool()))
            shutdown()
        finally:
            os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert grade("x^2-16", "(x-4)(x+4)") is Verdict.CORRECT
    assert mine <= set(pids_of(shared_pool()))


@pytest.mark.slow
def test_ctrl_c_ends_a_batch_at_once_and_leaves_no_worker():
    process = script(
        GRADES_THEN.format(then='grade("42", r"\\sum_{i=1}^{10^9} \\sin(i^i)", timeout=300.0)'),
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert until(lambda: cpu_seconds(pids[0]) > 0 and time.sleep(0.5) is None)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.count("Traceback") == 1  # the user's own; no worker prints one
    assert "KeyboardInterrupt" in errors
    assert gone(pids, within=3.0)


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_one_clear_error(monkeypatch, tmp_path, one):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no module of that name')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        workers.WorkerError, match=r"the grading worker cannot start: .* -m grpo_math\.grading\.judge \d+ says why"
    ):
        one.run([NEEDS_WORKER], 5.0)


@pytest.mark.slow
def test_the_main_module_is_not_imported_again_by_a_worker(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "print('imported', flush=True)\n"
        "from grpo_math.grading import grade\n"
        "print(grade('x^2-1', '(x-1)(x+1)'))\n"  # no __main__ guard, as in a notebook
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split() == ["imported", "correct"]


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
