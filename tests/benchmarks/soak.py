"""Does a long run grow? A day's steps of a tiny model, with what the process holds written down on the way.

    python tests/benchmarks/soak.py [--steps 20000] [--every 100] [--folder FOLDER] [-- MORE SETTINGS]

Trains a random Llama of two layers on generated sums with the real training program: a checkpoint every 500 steps, two
of them kept. A reward function of this file has a grading worker compare an answer in every step, has one that hangs
ended twice in a thousand, and writes a line every EVERY steps: the memory of the process and of the processes that it
started, its open files, threads and children, and the files that lie in the run directory (completions/ aside, which
has one file a step), in the temporary folder and, made by these processes, in /dev/shm. Then a table: the median of
each figure in the run's second, third and last quarter, and the growth per 1,000 steps. Exit code 1 where something
grew (`grown`).

tests/run/test_soak.py runs it short. Does not say how fast a step is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from launching import ROOT, TINY

from grpo_math import Verdict, grade
from grpo_math.grading.workers import shared_pool

MEMORY = 1 << 20  # bytes per 1,000 steps that are no leak
HANGS = ("42", r"\sum_{i=1}^{10^9} \sin(i^i)")
SETTINGS = [*TINY, "--report_to=none", "--rewards", "accuracy", "soak:measured", "--save_steps=500"]
SETTINGS += ["--save_total_limit=2", "--disable_tqdm=true"]


def measured(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
    """A reward that differs within a group, and, every SOAK_EVERY steps, a line of the file SOAK_FILE."""
    step = trainer_state.global_step
    assert grade("x^2+2x+1", rf"\boxed{{(x+1)^2+{step}-{step}}}") is Verdict.CORRECT
    if step % 500 == 250:
        assert shared_pool().run([HANGS], 0.5)[0].verdict is Verdict.UNCHECKABLE
    if step % int(os.environ["SOAK_EVERY"]) == 0:
        line = {"step": step, **holds(Path(os.environ["SOAK_RUN"]))}
        with open(os.environ["SOAK_FILE"], "a") as file:
            file.write(json.dumps(line) + "\n")
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def holds(run_dir: Path) -> dict[str, int]:
    """What this process holds: bytes of memory, and numbers of the rest."""
    children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    shared = tuple(f"torch_{pid}_" for pid in (os.getpid(), *children))  # as torch names them
    kept = [path for path in run_dir.rglob("*") if "completions" not in path.parts]
    return {
        "memory": _resident(os.getpid()),
        "memory of children": sum(map(_resident, children)),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children),
        "files of the run": len(kept),
        "temporary files": len(list(Path(tempfile.gettempdir()).rglob("*"))),
        "shared memory": len([name for name in os.listdir("/dev/shm") if name.startswith(shared)]),
    }


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # it ended
        return 0


def run(folder: Path, steps: int, interval: int, more: list[str]) -> list[dict[str, int]]:
    """Train, and return the lines that were written."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    lines = folder / "soak.jsonl"
    extra = {"SOAK_EVERY": str(interval), "SOAK_FILE": str(lines), "SOAK_RUN": str(folder / "run")}
    paths = [str(ROOT), str(ROOT / "tests/benchmarks"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    extra["TMPDIR"] = str(folder / "tmp")
    environment = {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "grpo_math.train", "--model_name_or_path", _model(folder / "model")]
    command += ["--output_dir", str(folder / "run"), f"--max_steps={steps}", *SETTINGS, *more]
    with open(folder / "log", "ab") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    return [json.loads(line) for line in lines.read_text().splitlines()]


def _model(folder: Path) -> str:
    """A Llama of two layers whose tokens are the bytes, so that a step is quick."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **ids, vocab_size=len(tokens)))
    model.generation_config.eos_token_id = list(range(2, len(tokens), 8))  # lengths differ
    model.save_pretrained(folder)
    return str(folder)


def quarters(lines: list[dict[str, int]], name: str) -> list[float]:
    """The median of the second, the third and the last quarter: the first is the start."""
    size = len(lines) // 4
    return [median(line[name] for line in lines[size * i : size * (i + 1)]) for i in (1, 2, 3)]


def grown(lines: list[dict[str, int]]) -> list[str]:
    """What the last quarter has more of than the second: memory beyond MEMORY, and any number that rose twice.

    >>> held = [{"step": 10 * i, "memory": 5 << 20, "open files": 20 + (i > 2) + i % 2} for i in range(16)]
    >>> grown(held), grown([{**line, "open files": line["step"] // 20} for line in held])
    ([], ['open files'])
    """
    results, thousands = [], (lines[-1]["step"] - lines[0]["step"]) / 2 / 1000
    for name in [name for name in lines[0] if name != "step"]:
        second, third, last = quarters(lines, name)
        leaks = (last - second) / thousands > MEMORY if name.startswith("memory") else second < third < last
        results += [name] * leaks
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    extra, more = parser.parse_known_args()
    folder = extra.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    lines = run(folder, extra.steps, extra.every, [word for word in more if word != "--"])
    grew, thousands = grown(lines), (lines[-1]["step"] - lines[0]["step"]) / 2 / 1000
    print(f"{lines[-1]['step']} steps, {len(lines)} lines in {folder / 'soak.jsonl'}")
    for name in [name for name in lines[0] if name != "step"]:
        second, third, last = quarters(lines, name)
        slope = (last - second) / thousands
        output = f"{name:18} {second:14,.0f} {third:14,.0f} {last:14,.0f} {slope:+12,.0f}"
        print(output + "  GREW" * (name in grew))
    return bool(grew)


if __name__ == "__main__":
    sys.exit(main())
