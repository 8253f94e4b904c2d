"""Does each loss learn? Three losses, with and without the standard deviation, with and without KL, three seeds each.

    python tests/benchmarks/learning.py [--jobs 1] [--seeds 0 1 2] [--only grpo_clip/std/no_kl] [--results FILE]

The demo's recipe (SmolLM2-135M-Instruct, LoRA, sums of numbers), with the sum written out, cut to a budget that is the
same for all: STEPS steps of PROMPTS prompts x 8 completions. The held-out sums are the same for every run, and the
untrained model answers them once, greedily. Each run is a process of its own; a finished one is one line of the results
file, and is not done again: what was interrupted goes on with the same command, and a file of another budget is
refused. Then a table: for each setting the mean over seeds of the accuracy (right and in the format) before and after,
and the difference, paired over all problems of all seeds, with its 95% bootstrap interval. The interval is over
problems: how far the seeds lie apart stands beside it.

Does not test anything and draws no plot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_math.evaluation.stats import paired_bootstrap

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, HELD_OUT, LEARNING_RATE, TEMPLATE = 16, 4, 128, 5e-4, "gsm8k"
BUDGET = {"steps": STEPS, "prompts": PROMPTS, "held_out": HELD_OUT, "learning_rate": LEARNING_RATE}
LOSSES = {
    "no_baseline": ("none", "reinforce"),
    "reinforce_with_baseline": ("group_mean", "reinforce"),
    "grpo_clip": ("group_mean", "clip"),
}
SCALES = {"std": "group", "no_std": "none"}
KL_WEIGHTS = {"no_kl": 0.0, "kl": 0.04}
NAMES = ["/".join(parts) for parts in itertools.product(LOSSES, SCALES, KL_WEIGHTS)]
UNTRAINED = "untrained"


def arguments(name: str, seed: int, folder: str) -> list[str]:
    """The settings of one run, as the training program takes them."""
    loss, scale, kl = name.split("/")
    baseline, surrogate = LOSSES[loss]
    changed = {
        "baseline": baseline,
        "surrogate": surrogate,
        "scale_rewards": SCALES[scale],
        "beta": KL_WEIGHTS[kl],
        "seed": seed,
        "max_steps": STEPS,
        "dtype": "auto",
        "prompt_template": TEMPLATE,
        "max_completion_length": 16,
        "per_device_train_batch_size": PROMPTS * 8,
        "learning_rate": LEARNING_RATE,
        "eval_n": 0,
        "heldout_every": 0,
        "log_completions": "false",
        "output_dir": folder,
    }
    recipe = ["--config", str(ROOT / "launch/configs/demo_cpu.yaml")]
    return recipe + [word for field, value in changed.items() for word in (f"--{field}", str(value))]


def run(name: str, seed: int, output: Path) -> None:
    """One run in this process, to a file: which held-out problems were right, and how the training rewards went."""
    from grpo_math import evaluate
    from grpo_math.problems.datasets import load_problems
    from grpo_math.train.program import main as train

    adapter, rewards = None, []
    with tempfile.TemporaryDirectory() as folder:
        if name != UNTRAINED:
            run_dir = Path(folder) / "run"
            if code := train(arguments(name, seed, str(run_dir))):
                sys.exit(code)
            adapter = str(run_dir / "adapter")
            rewards = [json.loads(line)["reward"] for line in (run_dir / "history.jsonl").read_text().splitlines()]
        rows = load_problems("generated:sums", "heldout", template=TEMPLATE, limit=HELD_OUT)
        results = evaluate("embedded", rows, adapter=adapter, max_new_tokens=16, batch_size=64, progress=False)
    line = {
        "setting": name,
        "seed": seed,
        "budget": BUDGET,
        "right": [int(row["category"] == "correct") for row in results["rows"]],
        "train_reward": [round(reward, 4) for reward in rewards],
        "cpu_seconds": round(time.process_time(), 1),
        "versions": results["versions"],
    }
    output.write_text(json.dumps(line), encoding="utf-8")


def in_a_process(name: str, seed: int) -> dict[str, Any]:
    """`run` in a process of its own, silent: its line, or a RuntimeError with the last thing it said."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "line.json"
        command = [sys.executable, __file__, "--run", name, "--seeds", str(seed), "--results", str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"{name}, seed {seed}, ended with {done.returncode}: {last}")
        return json.loads(output.read_text(encoding="utf-8"))


def read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(setting, seed) -> its line."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if any(line["budget"] != BUDGET for line in lines):
        sys.exit(f"error: {path} holds runs of another budget than {BUDGET}: name another --results")
    return {(line["setting"], line["seed"]): line for line in lines}


def missing(done: dict[tuple[str, int], Any], names: list[str], seeds: list[int]) -> list[tuple[str, int]]:
    """What is still to run, the untrained model first and then seed by seed."""
    wanted = [(UNTRAINED, 0), *((name, seed) for seed in seeds for name in names)]
    return [run for run in wanted if run not in done]


def table(done: dict[tuple[str, int], dict[str, Any]], names: list[str], seeds: list[int]) -> Iterator[str]:
    """One line for each setting that has at least one of the seeds."""
    before = done[UNTRAINED, 0]["right"]
    yield f"| loss | std | KL | seeds | before | after | difference, {len(before)} sums a seed | by seed |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in names:
        afters = [done[name, seed]["right"] for seed in seeds if (name, seed) in done]
        if not afters:
            continue
        pair = paired_bootstrap(before * len(afters), [flag for after in afters for flag in after])
        each = ", ".join(f"{100 * (fmean(after) - fmean(before)):+.1f}" for after in afters)
        loss, scale, kl = name.split("/")
        yield (
            f"| {loss} | {SCALES[scale]} | {KL_WEIGHTS[kl]:g} | {len(afters)} | {fmean(before):.1%} "
            f"| {fmean(map(fmean, afters)):.1%} "
            f"| {100 * pair.difference:+.1f} points [{100 * pair.lo:+.1f}, {100 * pair.hi:+.1f}] | {each} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("learning.jsonl"), help="one line for each finished run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="LOSS/SCALE/KL", help="some settings"
    )
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at a time, one thread each")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # what the processes of this program are called with
    options = parser.parse_args()
    if options.run:
        run(options.run, options.seeds[0], options.results)
        return 0
    done = read(options.results)
    todo = missing(done, options.only, options.seeds)
    print(f"{len(todo)} runs to do, {len(done)} done in {options.results}", flush=True)

    def one(job: tuple[str, int]) -> tuple[tuple[str, int], dict[str, Any] | RuntimeError]:
        try:
            return job, in_a_process(*job)
        except RuntimeError as error:
            return job, error

    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for job, line in pool.map(one, todo):
            if isinstance(line, RuntimeError):
                failed += 1
                print(f"error: {line}", flush=True)
                continue
            done[job] = line
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{job[0]} seed {job[1]}: {fmean(line['right']):.1%}, {line['cpu_seconds']:.0f} CPU s", flush=True)
    if (UNTRAINED, 0) in done:
        print("\n".join(table(done, options.only, options.seeds)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
