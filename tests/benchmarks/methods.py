"""Methods against plain GRPO on generated problems, three seeds each: `drop_solved`, and a teacher.

    OMP_NUM_THREADS=1 python tests/benchmarks/methods.py solved|teacher FOLDER

``solved``: the adapter of ``grpo-math demo``, merged, which can add, is trained on sums, differences and products, with
and without ``drop_solved: 0.9``. ``teacher``: the same merged model teaches the base model that it was trained from,
against the quickstart's rewards at equally many steps. Each run writes FOLDER/NAME-SEED; a finished run is not
repeated. For each held-out evaluation a JSON line has the tokens sampled until then, and the accuracy of each seed. All
runs take about 40 minutes of an idle core.
"""

import json
import subprocess
import sys
from pathlib import Path

from grpo_math.problems.datasets import load_problems

SEEDS = (0, 1, 2)
COMMON = ["--config", "launch/configs/demo_cpu.yaml", "--eval_n", "0", "--heldout_every", "10", "--max_steps", "30"]
LEVELS = ("sums", "differences", "products")
ROWS = 40  # of each level, so that a run samples each problem about twice


def mixed(folder: Path) -> list[str]:
    """Write the problems of all levels; return the options that name them."""
    files = {}
    for split in ("train", "heldout"):
        rows = [row for level in LEVELS for row in list(load_problems(f"generated:{level}", split))[:ROWS]]
        files[split] = folder / f"{split}.jsonl"
        lines = [json.dumps({"problem": row["problem"], "answer": row["answer"]}) for row in rows]
        files[split].write_text("\n".join(lines))
    return ["--dataset", str(files["train"]), "--dataset_split", "train", "--eval_dataset", str(files["heldout"])]


def runs(kind: str, folder: Path) -> dict[str, list[str]]:
    """Return the options of each kind of run, by its name."""
    merged, demo = folder.parent / "merged", folder.parent / "demo"
    if not merged.exists():
        subprocess.run(["grpo-math", "demo", "--output_dir", str(demo)], check=True)
        subprocess.run(["grpo-math", "export", str(demo), "--merge", str(merged)], check=True)
    if kind == "solved":
        options = [*mixed(folder), "--model_name_or_path", str(merged)]
        return {"uniform": options, "drop_solved": [*options, "--drop_solved", "0.9"]}
    recipe = folder / "teacher.yaml"
    written = (
        Path("launch/configs/demo_cpu.yaml").read_text(encoding="utf-8").replace("rewards: [gsm8k]", "rewards: []")
    )
    recipe.write_text(written.replace("beta: 0.0", f"beta: 1.0\nkl_estimator: k1\nreference_model: {merged}"))
    return {"rewards": [], "teacher": ["--config", str(recipe)]}


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in runs(kind, folder).items():
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
