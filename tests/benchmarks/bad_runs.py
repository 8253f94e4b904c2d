"""Real bad runs and real healthy ones: does the diagnosis say what was done to them, and nothing of the others?

    python tests/benchmarks/bad_runs.py [--only NAME ...] [--folder bad_runs] [--save]

Each run is the demo's recipe (SmolLM2-135M-Instruct, LoRA, sums of numbers) with the sum written out, shortened,
through the real training program, with one thing done to it. Then its history is diagnosed as in training, every tenth
step and at the end, and a table says what was found, and at which step first. ``expected`` is what the cause must show;
``also`` what is true of such a run too and may be shown; anything else is a false finding. A finished run is not run
again, one that was cut off is; ``--save`` writes what the checks read of each history to tests/cases/real_runs, where a
fast test diagnoses it.

Does not test anything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_math.checks.diagnosis import diagnose
from grpo_math.checks.series import evaluation_line
from grpo_math.report.run_dir import read_run
from grpo_math.run import metrics

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases" / "real_runs"
EVERY = 10  # steps, as in training
DEMO: dict[str, Any] = {
    "max_steps": 41,
    "dtype": "auto",
    "prompt_template": "gsm8k",
    "max_completion_length": 16,
    "per_device_train_batch_size": 16,  # 2 prompts x 8 completions
    "learning_rate": 5e-4,
    "eval_n": 0,
    "heldout_every": 0,
    "log_completions": False,
}
# What checks/diagnosis.py reads of a run.
READ_METRICS = {
    *(metrics.STEP, metrics.LOSS, metrics.REWARD, metrics.REWARD_MIN, metrics.REWARD_MAX, metrics.ACCURACY),
    *(metrics.HELDOUT_ACCURACY, metrics.HELDOUT_IN_FORMAT, metrics.HELDOUT_N, metrics.ADVANTAGE_STD),
    *(
        metrics.DEGENERATE,
        metrics.ALL_RIGHT,
        metrics.ALL_WRONG,
        metrics.KL,
        metrics.APPROX_KL,
        metrics.ENTROPY,
        metrics.CLIP_REGION,
        metrics.GRAD_NORM,
    ),
    *(metrics.LEARNING_RATE, metrics.TRUNCATED, metrics.verdict_key("uncheckable"), metrics.verdict_key("no_answer")),
}
PER_REWARD = re.compile(metrics.reward_key(r"\w+"))
READ_SETTINGS = (
    *("learning_rate", "max_completion_length", "use_peft", "rewards", "beta", "max_grad_norm", "grade_timeout"),
    *("num_iterations", "steps_per_generation", "gradient_accumulation_steps", "logging_steps", "curriculum"),
    *("resample_groups", "reference_refresh_steps", "sync_ref_model", "save_strategy", "save_steps"),
    "save_total_limit",
)
ONE_PROMPT = {"per_device_train_batch_size": 8}


@dataclass(frozen=True)
class BadRun:
    """``what`` was done to the demo's recipe, as settings; ``{folder}`` in a setting is where `prepare` writes."""

    what: str
    settings: dict[str, Any]
    expected: frozenset[str]
    also: frozenset[str]


def _bad(what: str, expected: str, also: str = "", **settings: Any) -> BadRun:
    return BadRun(what, settings, frozenset(expected.split()), frozenset(also.split()))


RUNS: dict[str, BadRun] = {
    "rate_zero": _bad("learning_rate: 0", "adapter_not_moving", learning_rate=0.0, max_steps=12),
    "wrong_eos": _bad(
        "EOS of tokenizer and generation_config is `endoftext`; the model ends its turns with `im_end`",
        "eos_mismatch",
        model_name_or_path="{folder}/inputs/wrong_eos",
        max_steps=12,
    ),
    "attention_dropout": _bad(
        "attention_dropout 0.1 in the model's config, beta: 0.04",
        "kl_not_zero_at_start",
        model_name_or_path="{folder}/inputs/attention_dropout",
        beta=0.04,
        max_steps=3,
    ),
    "too_short": _bad(
        "max_completion_length: 8; the worked example takes 14",
        "truncation reward_stuck_low",
        max_completion_length=8,
        max_steps=22,
    ),
    "rate_far_too_high": _bad(
        "learning_rate: 5e-3, beta: 0.001", "collapse", **ONE_PROMPT, learning_rate=5e-3, beta=0.001, max_steps=20
    ),
    "many_updates": _bad(
        "num_iterations: 8, learning_rate: 2e-3",
        "clipping learning_rate_too_high",
        num_iterations=8,
        learning_rate=2e-3,
        max_steps=24,
    ),
    "rate_too_high": _bad(
        "learning_rate: 2e-3", "collapse heldout_worse", "learning_rate_too_high", learning_rate=2e-3, eval_n=64
    ),
    "easy_set": _bad(
        "difficulty_band: [1, 1] at temperature: 0.3, rewards: [accuracy], learning_rate: 1e-5",
        "groups_too_easy",
        "reward_stuck_high",
        **ONE_PROMPT,
        rewards="accuracy",
        temperature=0.3,
        difficulty_band="1.0 1.0",
        dataset_limit=32,
        learning_rate=1e-5,
        max_steps=22,
    ),
    "hard_set": _bad(
        "quotients of numbers of four and two digits, max_completion_length: 24",
        "reward_stuck_low",
        "truncation groups_too_hard",
        **ONE_PROMPT,
        dataset="{folder}/inputs/quotients.jsonl",
        max_completion_length=24,
        temperature=0.7,
        max_steps=22,
    ),
    "wrong_format": _bad(
        "rewards: [r1_zero], whose format the prompt does not ask for",
        "reward_stuck_low",
        **ONE_PROMPT,
        rewards="r1_zero",
        max_steps=11,
    ),
    "uncheckable_answers": _bad(
        "one problem in four is a root, and grade_timeout: 0.001",
        "uncheckable_answers",
        **ONE_PROMPT,
        dataset="{folder}/inputs/roots.jsonl",
        grade_timeout=0.001,
        max_steps=22,
    ),
    "healthy_demo": _bad(
        "nothing, in as many steps as the demo makes",
        "",
        max_steps=60,
        per_device_train_batch_size=64,
        learning_rate=2e-4,
        eval_n=256,
        heldout_every=25,
        log_completions=True,
    ),
    "healthy_dr_grpo": _bad(
        "nothing: loss_type: dr_grpo, scale_rewards: none, seed 2",
        "",
        loss_type="dr_grpo",
        scale_rewards="none",
        learning_rate=2e-4,
        seed=2,
    ),
    "healthy_kl": _bad(
        "nothing: loss_type: grpo, beta: 0.04, seed 3", "", loss_type="grpo", beta=0.04, learning_rate=2e-4, seed=3
    ),
    "healthy_reinforce": _bad(
        "nothing: surrogate: reinforce, baseline: leave_one_out, seed 4",
        "",
        surrogate="reinforce",
        baseline="leave_one_out",
        learning_rate=2e-4,
        seed=4,
    ),
    "healthy_seed_5": _bad("nothing: seed 5", "", learning_rate=2e-4, seed=5),
    "two_sets": _bad(
        "differences as well as sums, learning_rate: 3e-4, seed 5 (meant to be healthy: it did not learn)",
        "flat_reward entropy_collapse",
        dataset="generated:sums,differences",
        learning_rate=3e-4,
        seed=5,
    ),
    "rate_too_low": _bad(
        "learning_rate: 1e-7, beta: 0.04",
        "flat_reward",
        "learning_rate_too_low truncation",
        **ONE_PROMPT,
        learning_rate=1e-7,
        beta=0.04,
    ),
    "format_alone": _bad(
        "rewards: [format_soft], quotients",
        "format_without_accuracy",
        "reward_stuck_high groups_too_hard truncation",
        **ONE_PROMPT,
        dataset="{folder}/inputs/quotients.jsonl",
        max_completion_length=24,
        rewards="format_soft",
        max_steps=62,
    ),
}


def prepare(folder: Path) -> None:
    """The problem files, and the copies of the embedded model whose small files are wrong."""
    from grpo_math.generation.embedded import embedded_model

    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    def write(name: str, rows: list[tuple[str, str]]) -> None:
        lines = [json.dumps({"problem": problem, "answer": answer}) + "\n" for problem, answer in rows]
        (folder / name).write_text("".join(lines), encoding="utf-8")

    pairs = [(rng.randint(31, 99), rng.randint(31, 99)) for _ in range(256)]
    write("quotients.jsonl", [(f"What is {a * b} / {b}?", str(a)) for a, b in pairs])
    small = [(rng.randint(1, 28), rng.randint(1, 28)) for _ in range(256)]
    rows = [(f"What is {a} + {b}?", str(a + b)) for a, b in small]
    rows[::4] = [(f"What is the square root of {a * a * 2}?", rf"{a}\sqrt{{2}}") for a, _ in small[::4]]
    write("roots.jsonl", rows)

    def copy(name: str, changes: dict[str, dict[str, Any]]) -> None:
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in embedded_model().iterdir():
            if path.name in changes:
                content = json.loads(path.read_text(encoding="utf-8")) | changes[path.name]
                (target / path.name).write_text(json.dumps(content), encoding="utf-8")
            else:
                (target / path.name).symlink_to(path.resolve())

    eos = {"eos_token_id": 0, "pad_token_id": 0}
    token = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    copy("wrong_eos", {"config.json": eos, "generation_config.json": eos, "tokenizer_config.json": token})
    copy("attention_dropout", {"config.json": {"attention_dropout": 0.1}})


def settings_of(name: str) -> dict[str, Any]:
    return DEMO | RUNS[name].settings


def command(name: str, folder: Path) -> list[str]:
    words = [sys.executable, "-m", "grpo_math.train", "--config", str(ROOT / "launch/configs/demo_cpu.yaml")]
    for setting, value in {**settings_of(name), "output_dir": f"{{folder}}/{name}"}.items():
        words += [f"--{setting}", *str(value).replace("{folder}", str(folder)).split(" ")]
    return words


def train(name: str, folder: Path) -> bool:
    """One run, unless it has finished with these settings; what it said goes to NAME.log, CPU seconds to done.json."""
    run_dir, done = folder / name, folder / name / "done.json"
    if done.exists():
        if json.loads(done.read_text())["settings"] != settings_of(name):
            sys.exit(f"error: {run_dir} holds a run of other settings: delete it, or name another --folder")
        return True
    shutil.rmtree(run_dir, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # glibc gives freed memory back at once, which costs a third of the time on a CPU.
    environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30), "MALLOC_TOP_PAD_": str(256 << 20)}
    before = cpu_seconds()
    with open(folder / f"{name}.log", "w", encoding="utf-8") as log:
        code = subprocess.run(command(name, folder), stdout=log, stderr=log, env=environment).returncode
    if code:
        print(f"error: {name} ended with {code}: see {log.name}", file=sys.stderr, flush=True)
        return False
    shutil.rmtree(run_dir / "adapter", ignore_errors=True)
    seconds = round(cpu_seconds() - before)
    done.write_text(json.dumps({"settings": settings_of(name), "cpu_seconds": seconds}), encoding="utf-8")
    return True


def cpu_seconds() -> float:
    """CPU time of the processes that this one has waited for, and of those that they have."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines_of(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """History with the evaluations before and after it, and the settings."""
    run = read_run(run_dir)
    last = int(run.history[-1][metrics.STEP])
    before, after = (evaluation_line(*end) for end in ((0, run.before), (last, run.after)))
    return [*before, *run.history, *after], run.config


def findings_by_step(lines: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, int]:
    """Warnings and errors -> the step at which each is seen first, asked every `EVERY` steps and at the end."""
    found: dict[str, int] = {}
    last = int(lines[-1][metrics.STEP])
    for step in [*range(EVERY, last, EVERY), last]:
        for finding in diagnose([line for line in lines if line[metrics.STEP] <= step], config):
            if finding.level != "info":
                found.setdefault(finding.check, step)
    return found


def read_case(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A saved run: its first line (run, what, settings, findings by step), and its history."""
    head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return head, lines


def save(name: str, folder: Path) -> None:
    """What the checks read of a run, rounded to 5 digits, to `CASES`."""
    lines, config = lines_of(folder / name)
    head = {
        "run": name,
        "what": RUNS[name].what,
        "settings": {setting: config[setting] for setting in READ_SETTINGS if setting in config},
        "findings": findings_by_step(lines, config),
    }
    kept = [
        {key: float(f"{value:.5g}") for key, value in line.items() if key in READ_METRICS or PER_REWARD.fullmatch(key)}
        for line in lines
    ]
    CASES.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in [head, *kept])
    (CASES / f"{name}.jsonl").write_text(text, encoding="utf-8")


def judge(name: str, found: set[str]) -> str:
    run = RUNS[name]
    missed, false = run.expected - found, found - run.expected - run.also
    words = [f"missed {', '.join(sorted(missed))}"] if missed else []
    words += [f"false {', '.join(sorted(false))}"] if false else []
    return "; ".join(words) or "right"


def table(names: list[str], folder: Path) -> Iterator[str]:
    yield "| what was done to the demo's recipe | steps | found, at step | | CPU s |"
    yield "|---|---|---|---|---|"
    for name in names:
        lines, config = lines_of(folder / name)
        found = findings_by_step(lines, config)
        seconds = json.loads((folder / name / "done.json").read_text())["cpu_seconds"] or "-"
        words = ", ".join(f"`{check}` {step}" for check, step in found.items()) or "nothing"
        yield f"| {RUNS[name].what} | {lines[-1][metrics.STEP]:g} | {words} | {judge(name, set(found))} | {seconds} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("bad_runs"))
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help="some runs")
    parser.add_argument("--save", action="store_true", help="also write tests/cases/real_runs")
    options = parser.parse_args()
    folder = options.folder.resolve()
    prepare(folder / "inputs")
    finished: list[str] = []
    for number, name in enumerate(options.only, 1):
        print(f"{number} of {len(options.only)}: {name}", file=sys.stderr, flush=True)
        finished += [name] if train(name, folder) else []
    for name in finished if options.save else ():
        save(name, folder)
    print("\n".join(table(finished, folder)))
    return int(finished != options.only)


if __name__ == "__main__":
    sys.exit(main())
