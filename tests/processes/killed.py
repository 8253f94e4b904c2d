"""Runs of the training program, some of which get SIGKILL at a chosen place: killed.py JOBS.json.

Each job has the ``arguments`` of grpo_math.train and, where it is to die, ``place`` and ``time``: at which of `PLACES`,
and for the how manyth time that place is met.
With ``fails`` the reward raises from that step on. Without any it runs to its end.
Torch is imported once; each job is a fork, whose exit status is printed as a line.
With ``graded_by_letters``, the verdicts of evaluations follow from the letters, because a random model is never right,
and each rank writes the metrics of its evaluations.
In several processes (RANK is set) there is one job, and rank 0 dies.
"""

import itertools
import json
import math
import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch

from grpo_math.evaluation import evaluator
from grpo_math.grading import Grade, Verdict
from grpo_math.report import finish
from grpo_math.run import checkpoints, files, resume
from grpo_math.train import program
from grpo_math.trainer import trainer as trainers
from grpo_math.trainer.trainer import MathGRPOTrainer
from grpo_math.trainer.updates import Updates


def noisy(completions, grade, **columns):
    """Draws from every generator that a reward function may use."""
    if columns["trainer_state"].global_step >= float(os.environ.get("FAILS", math.inf)):
        raise OSError(f"the judge is away ({float(torch.rand(()))}, {random.random()}, {numpy.random.random()})")
    # More for an answer that is right, or doctor would refuse the reward.
    return [
        10 * (g.verdict == "correct")
        + sum(map(ord, str(completion))) % 7
        + random.random()
        + numpy.random.random()
        + float(torch.rand(()))
        for g, completion in zip(grade, completions, strict=True)
    ]


def dies(job: dict) -> None:
    times = itertools.count(1)

    def counted(method, *args, **kwargs):
        if next(times) == job["time"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)

    for owner, name in PLACES[job["place"]]:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, method=method, **kwargs: counted(method, *args, **kwargs))


def grade_by_letters() -> None:
    def grade(golds, completions, **settings):
        right = [sum(map(ord, text)) % 2 == 0 for text in completions]
        return [Grade(Verdict.CORRECT if yes else Verdict.WRONG, None, in_format=False, reason="") for yes in right]

    def evaluate_and_write(run):
        values = evaluate_heldout(run)
        with (run.run_dir / f"heldout-{run.config.process_index}.jsonl").open("a") as file:
            file.write(json.dumps([run.trainer.state.global_step, values]) + "\n")
        return values

    evaluator.grade_batch = grade
    evaluate_heldout, program.TrainingRun.evaluate_heldout = program.TrainingRun.evaluate_heldout, evaluate_and_write


PLACES = {
    "update": [(Updates, "loss_of")],
    "checkpoint": [(MathGRPOTrainer, "_save_rng_state")],
    "sealing": [(checkpoints, "write_manifest")],
    "best.json": [(trainers, "write_json")],
    "rotation": [(MathGRPOTrainer, "store_flos")],
    "lines": [(module, "replace_text") for module in (checkpoints, files, resume)],
}


def main(job: dict) -> int:
    if "place" in job and int(os.environ.get("RANK", 0)) == 0:
        dies(job)
    if "graded_by_letters" in job:
        grade_by_letters()
    os.environ["FAILS"] = str(job.get("fails", math.inf))
    return program.main(job["arguments"])


def forked(job: dict) -> int:
    pid = os.fork()
    if pid == 0:
        with open(job["output"], "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = main(job)
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    finish.print_result = lambda *_: SimpleNamespace(plots=[], findings=[])  # half of a short run's time
    jobs = json.loads(Path(sys.argv[1]).read_text())
    if "RANK" in os.environ:
        code = main(jobs[0])
        assert code or not torch.distributed.is_initialized()
        sys.exit(code)
    for each in jobs:
        print(forked(each), flush=True)
