"""One hostile property a test: killed in time, capped in memory, one death one answer, no orphans, any thread."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_math.grading import Verdict, grade, grade_batch, pool, shutdown
from grpo_math.grading.pool import Pool

ROOT = Path(__file__).parents[2]
HANGS = r"\sum_{i=1}^{10^9} \sin(i^i)"
NEEDS_WORKER = ("x^2-1", "(x-1)(x+1)")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def script(body: str, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # A shell's background job starts with SIGINT ignored, and its children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen(
        [sys.executable, "-c", heard + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


@pytest.fixture
def two():
    """A pool of two workers of its own."""
    made = Pool(2)
    yield made
    made.close()


def ready(pool_):
    """The pids of a pool whose workers have all come up: they block SIGINT first of all, then limit themselves."""
    pool_.run([NEEDS_WORKER], timeout=5.0)
    pids = pool_.pids()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        limits = [Path(f"/proc/{pid}/limits").read_text().split("Max address space")[1].split()[0] for pid in pids]
        if "unlimited" not in limits:
            return pids
        time.sleep(0.05)
    raise AssertionError(f"workers did not come up: {limits}")


def test_a_hung_answer_times_out_and_delays_no_other(two):
    started = time.monotonic()
    jobs = [("42", HANGS), *[("x^2-1", f"(x-1)(x+1)+{n}-{n}") for n in range(20)]]
    outcomes = two.run(jobs, timeout=1.0)
    assert outcomes[0].verdict is Verdict.TIMEOUT
    assert [o.verdict for o in outcomes[1:]] == [Verdict.CORRECT] * 20
    assert outcomes[0].seconds >= 1.0
    assert time.monotonic() - started < 15  # on a busy machine; a limit that did not hold would take for ever


def test_every_answer_has_its_whole_limit_after_a_kill_too(monkeypatch):
    limits, send = [], pool._Worker.send
    monkeypatch.setattr(pool._Worker, "send", lambda worker, job: limits.append(job["limit"]) or send(worker, job))
    one = Pool(1)
    try:
        outcomes = one.run([("42", HANGS)] * 3, timeout=0.5)
    finally:
        one.close()
    assert [o.verdict for o in outcomes] == [Verdict.TIMEOUT] * 3
    assert all(o.seconds >= 0.5 for o in outcomes)
    assert limits == [0.5] * 3


def test_a_worker_has_parsed_and_verified_before_it_says_that_it_is_ready():
    process = script("""
        from grpo_math.grading import symbolic
        parse, verify, called = symbolic.parse, symbolic.verify, []
        symbolic.parse = lambda *given, **named: called.append("parse") or parse(*given, **named)
        symbolic.verify = lambda *given, **named: called.append("verify") or verify(*given, **named)
        symbolic.prepare()
        print(*called)
    """)
    assert process.communicate(timeout=60)[0].split() == ["parse", "parse", "verify"]


def test_another_worker_warms_up_while_an_answer_uses_up_its_time(two):
    two.run([("42", HANGS)], timeout=1.0)
    assert len(two.pids()) == 2  # the successor of the one that was killed, and the one that was warmed up meanwhile


def test_a_worker_that_is_up_is_taken_before_one_that_still_starts(two):
    starting, up = (SimpleNamespace(process=SimpleNamespace(poll=lambda: None), is_up=lambda u=u: u) for u in (0, 1))
    two._idle.extend([starting, up])
    assert two._take(block=False) is up
    assert two._take(block=False) is starting


def test_workers_outlive_the_thread_that_needed_them_first(two):
    thread = threading.Thread(target=lambda: two.run([NEEDS_WORKER], timeout=5.0))
    thread.start()
    thread.join()
    pids = two.pids()
    assert pids
    assert not gone(pids, within=0.5)
    assert two.run([NEEDS_WORKER], timeout=5.0)[0].verdict is Verdict.CORRECT
    assert set(pids) <= set(two.pids())


def test_a_killed_worker_takes_one_answer_with_it_and_is_replaced(two):
    two.run([NEEDS_WORKER], timeout=5.0)
    results = []
    thread = threading.Thread(target=lambda: results.extend(two.run([("42", HANGS)], timeout=20.0)))
    thread.start()
    time.sleep(0.5)
    for pid in two.pids():
        os.kill(pid, signal.SIGKILL)
    thread.join(10)
    assert [o.verdict for o in results] == [Verdict.CRASH]
    assert two.run([NEEDS_WORKER] * 3, timeout=5.0)[2].verdict is Verdict.CORRECT


@pytest.mark.slow
def test_workers_that_are_killed_all_the_time_cost_their_own_answers_and_no_other(two):
    """Each kill costs at most the answer under way, which says so; all others are graded as if nothing had been."""
    two.run([NEEDS_WORKER], timeout=5.0)
    right, wrong = [("x^2-1", f"(x-1)(x+1)+{n}-{n}") for n in range(60)], ("x^2-1", "(x-1)(x+2)")
    jobs, done, kills = [job for pair in right for job in (pair, wrong)], [], []

    def kill():
        while len(done) < len(jobs):
            before = len(done)
            if pids := two.pids():
                os.kill(pids[len(kills) % len(pids)], signal.SIGKILL)
                kills.append(pids[0])
            while before + 10 > len(done) < len(jobs):  # some answers in between
                time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    outcomes = two.run(jobs, timeout=20.0, progress=done.append)
    thread.join()
    crashed = [i for i, outcome in enumerate(outcomes) if outcome.verdict is Verdict.CRASH]
    assert len(kills) >= 5
    assert len(crashed) <= len(kills)
    assert {outcomes[i].reason for i in crashed} <= {"the worker died"}
    for i, outcome in enumerate(outcomes):
        assert i in crashed or outcome.verdict is (Verdict.WRONG if i % 2 else Verdict.CORRECT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_group_costs_no_answer(number, two):
    """torch's agent and SLURM send theirs to a rank's whole group, and the rank has a step to finish."""
    pids = ready(two)
    for pid in pids:
        os.kill(pid, number)
    assert two.run([NEEDS_WORKER], timeout=20.0)[0].verdict is Verdict.CORRECT
    assert two.pids() == pids


@pytest.mark.slow
def test_workers_that_are_killed_all_the_time_do_not_end_a_run_nor_make_an_answer_wrong(tiny, tmp_path, monkeypatch):
    """Every completion reads as a right answer that only a worker can grade. Killed ones are named, never wrong."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from grpo_math import MathGRPOConfig, MathGRPOTrainer
    from grpo_math.run.metrics import verdict_key
    from grpo_math.trainer import trainer as trainer_module

    class UntilSixKills(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= 4 and len(kills) >= 6

    made, ended, kills = [], threading.Event(), []

    def right(completion):
        made.append(completion)
        return rf"\boxed{{(x-1)(x+1)+{len(made)}-{len(made)}}}"

    def kill():
        while not ended.wait(0.05):
            for worker in list(pool.shared_pool()._workers):
                if worker.ready or len(kills) < 6:  # six while they start, which is no failure to start
                    os.kill(worker.process.pid, signal.SIGKILL)
                    kills.append(worker.process.pid)
                    ended.wait(0.5)

    monkeypatch.setattr(trainer_module, "text_of", right)
    args = MathGRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_steps=10_000,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=4,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        grade_timeout=60.0,
    )
    rows = [{"prompt": "x", "answer": "x^2-1"}] * 8
    run = MathGRPOTrainer(tiny(), "accuracy", args, train_dataset=Dataset.from_list(rows), callbacks=[UntilSixKills()])
    thread = threading.Thread(target=kill)
    thread.start()
    run.train()
    ended.set()
    thread.join()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, run.state.global_step + 1))
    for line in lines:
        assert line[verdict_key("correct")] + line[verdict_key("crash")] == pytest.approx(1)
    crashed, named = round(8 * sum(line[verdict_key("crash")] for line in lines)), tmp_path / "ungradable.jsonl"
    assert len(kills) >= 6
    assert crashed <= len(kills)
    rows = [json.loads(row) for row in named.read_text().splitlines()] if crashed else []
    assert [(row["verdict"], row["reason"]) for row in rows] == [("crash", "the worker died")] * crashed


def test_a_worker_that_died_while_idle_costs_no_answer(two):
    two.run([NEEDS_WORKER], timeout=5.0)
    for pid in two.pids():
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert two.run([NEEDS_WORKER], timeout=5.0)[0].verdict is Verdict.CORRECT


def test_an_interrupt_does_not_end_a_worker(two):
    pids = ready(two)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert all(alive(pid) for pid in pids)
    assert two.run([NEEDS_WORKER], timeout=5.0)[0].verdict is Verdict.CORRECT
    assert two.pids() == pids


def test_a_worker_of_a_large_parent_lives_on_after_its_job(tmp_path):
    """A parent that holds gigabytes is the rule in training; its size must not count as the worker's."""
    process = script(
        """
        from grpo_math.grading.pool import Pool
        ballast = bytearray(900_000_000)
        made = Pool(1)
        job = ("x^2-1", "(x-1)(x+1)")
        made.run([job], timeout=5.0)
        before = made.pids()
        made.run([job], timeout=5.0)
        print(before == made.pids() != [])
        made.close()
        """
    )
    assert process.communicate(timeout=60)[0].strip() == "True"


def test_the_address_space_of_a_worker_is_limited(two):
    for pid in ready(two):
        limits = Path(f"/proc/{pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max address space"))
        assert line.split()[3] == str(pool.MEMORY_BYTES)


def test_a_true_pair_that_needs_more_memory_than_the_limit_is_a_crash_and_not_wrong():
    small = Pool(1, memory=150_000_000)
    try:
        pair = (r"\sum_{i=1}^{2} i^{10^{10}}", "1+2^{10^{10}}")  # 2^(10^10) alone takes 1.25 GB
        [outcome] = small.run([pair], timeout=5.0)
        assert (outcome.verdict, outcome.reason) == (Verdict.CRASH, "out of memory")
        assert small.run([NEEDS_WORKER], timeout=5.0)[0].verdict is Verdict.CORRECT
    finally:
        small.close()


def test_four_threads_share_the_workers(two):
    results = {}

    def work(n):
        results[n] = two.run([(f"x^2-{n * n}", f"(x-{n})(x+{n})")] * 5, timeout=10.0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert {n: [str(o.verdict) for o in r] for n, r in results.items()} == {n: ["correct"] * 5 for n in range(1, 5)}
    assert len(two.pids()) <= 2


def test_the_order_of_the_rows_is_kept_and_equal_rows_are_graded_once():
    counted = []
    rows = [("x+1", "1+x"), ("x^2-4", r"\boxed{(x-2)(x+2)}"), ("2", "3"), ("x^2-4", r"\boxed{(x-2)(x+2)}")]
    grades = grade_batch(*zip(*rows, strict=True), progress=counted.append)
    assert [str(g.verdict) for g in grades] == ["correct", "correct", "wrong", "correct"]
    assert grades[1] is grades[3]
    assert sum(counted) == 4


def test_shutdown_ends_the_workers_and_grading_starts_new_ones():
    grade(NEEDS_WORKER[0], NEEDS_WORKER[1])
    pids = pool.shared_pool().pids()
    assert pids
    shutdown()
    assert gone(pids, within=2.0)
    assert grade(NEEDS_WORKER[0], NEEDS_WORKER[1]) is Verdict.CORRECT


def test_the_exact_path_starts_no_process_and_imports_neither_sympy_nor_torch():
    process = script("""
        import sys
        from grpo_math.grading import grade_batch, pool
        grade_batch(["72", r"\\frac12", "B", "(1,2)"], ["#### 72", "0.5", "The answer is (B).", "(1, 2)"])
        heavy = [name for name in ("torch", "sympy", "math_verify", "mpmath", "numpy") if name in sys.modules]
        print(heavy, pool._pool)
    """)
    assert process.communicate(timeout=60)[0].split() == ["[]", "None"]


GRADES_THEN = """
    import os, signal, sys, threading, time
    from grpo_math.grading import grade, pool
    def main():
        grade("x^2-1", "(x-1)(x+1)")
        print(*pool.shared_pool().pids(), flush=True)
        {then}
    main()
"""


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
    assert gone(pids, within=3.0), name


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that ends a process with its parent")
def test_a_busy_worker_ends_with_its_parent_at_once():
    hangs = GRADES_THEN.format(
        then="""threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        grade("42", r"\\sum_{i=1}^{10^9} \\sin(i^i)", timeout=600.0)"""
    )
    process = script(hangs, stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in process.communicate(timeout=60)[0].split()]
    assert gone(pids, within=3.0)


def test_ctrl_c_ends_a_batch_at_once_and_leaves_no_worker():
    process = script(
        GRADES_THEN.format(then='grade("42", r"\\sum_{i=1}^{10^9} \\sin(i^i)", timeout=60.0)'),
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.5)
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - started < 15
    assert errors.count("Traceback") == 1  # the user's own; no worker prints one
    assert "KeyboardInterrupt" in errors
    assert gone(pids, within=3.0)


def test_a_forked_child_starts_its_own_workers_and_leaves_the_parents_alone():
    shutdown()  # a worker that a hostile answer made large would retire in between
    grade(*NEEDS_WORKER)
    mine = set(pool.shared_pool().pids())
    child = os.fork()
    if child == 0:  # pragma: no cover - the child
        try:
            fine = grade("x^2-9", "(x-3)(x+3)") is Verdict.CORRECT and not mine & set(pool.shared_pool().pids())
            shutdown()
        finally:
            os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert grade("x^2-16", "(x-4)(x+4)") is Verdict.CORRECT
    assert mine <= set(pool.shared_pool().pids())


def test_a_worker_that_cannot_start_is_one_clear_error(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no module of that name')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = Pool(1)
    monkeypatch.setattr("grpo_math.grading.pool.sys.path", [str(tmp_path), *sys.path])
    with pytest.raises(pool.WorkerError, match="the grading worker cannot start"):
        broken.run([NEEDS_WORKER], timeout=5.0)
    broken.close()


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
from grpo_math.grading import pool
if not os.getuid():  # whom the limit does not bind
    os.setresuid(65534, 65534, 0)
limit = getattr(resource, f"RLIMIT_{sys.argv[1]}")
soft, hard = resource.getrlimit(limit)
resource.setrlimit(limit, (len(os.listdir("/proc/self/fd")) + 1 if sys.argv[1] == "NOFILE" else 0, hard))
pauses = []
def sleep(pause):
    pauses.append(pause)
    if len(pauses) == int(sys.argv[2]):
        resource.setrlimit(limit, (soft, hard))
        os.setresuid(*[os.getresuid()[2]] * 3)
pool.time.sleep = sleep
print(pool.Pool(1).run([("x^2-1", "(x-1)(x+1)")], timeout=20.0)[0].verdict, pauses)
"""


@pytest.mark.parametrize(("limit", "said"), [("NPROC", "can't start new thread"), ("NOFILE", "Too many open files")])
def test_a_system_that_gives_no_process_is_asked_again_and_then_one_clear_error(limit, said):
    command = [sys.executable, "-c", LIMITED, limit]
    again = subprocess.run([*command, "2"], cwd=ROOT, capture_output=True, text=True)
    assert again.stdout == "correct [0.5, 2.0]\n", again.stderr
    done = subprocess.run([*command, "0"], cwd=ROOT, capture_output=True, text=True)
    remedy = "raise the limit that it names (ulimit -a), or end other programs"
    assert done.stderr.splitlines()[-1].endswith(f"WorkerError: the grading worker cannot start: {said}: {remedy}")
