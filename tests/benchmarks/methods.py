"""A teacher against plain GRPO on generated problems, three seeds each.

    OMP_NUM_THREADS=1 python tests/benchmarks/methods.py FOLDER

The adapter of ``grpo-math demo``, merged, teaches the base model that it was trained from, against the quickstart's
rewards at equally many steps. Each run writes FOLDER/NAME-SEED; a finished run is not
repeated. For each held-out evaluation a JSON line has the tokens sampled until then, and the accuracy of each seed. All
runs take about 40 minutes of an idle core.
"""

import json
import subprocess
import sys
from pathlib import Path

SEEDS = (0, 1, 2)
COMMON = ["--config", "launch/configs/demo_cpu.yaml", "--eval_n", "0", "--heldout_every", "10", "--max_steps", "30"]


def runs(folder: Path) -> dict[str, list[str]]:
    """Return the options of each kind of run, by its name."""
    merged, demo = folder.parent / "merged", folder.parent / "demo"
    if not merged.exists():
        subprocess.run(["grpo-math", "demo", "--output_dir", str(demo)], check=True)
        subprocess.run(["grpo-math", "export", str(demo), "--merge", str(merged)], check=True)
    teacher = ["--method", "on_policy_distillation", "--kl_estimator", "k1", "--reference_model", str(merged)]
    return {"rewards": [], "teacher": teacher}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in runs(folder).items():
        seen: dict[int, list[list[float]]] = {}
        for seed in SEEDS:
            run = folder / f"{name}-{seed}"
            words = [*COMMON, *options, "--seed", str(seed), "--output_dir", str(run)]
            subprocess.run(["grpo-math", "train", *words], check=True)
            lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
            tokens = 0.0
            for line in lines:
                tokens = line.get("num_tokens", tokens)
                if "heldout/accuracy" in line:
                    seen.setdefault(int(line["step"]), []).append([tokens, line["heldout/accuracy"]])
        for step, values in seen.items():
            print(json.dumps({"run": name, "step": step, "tokens_and_accuracy": values}), flush=True)


if __name__ == "__main__":
    main()
