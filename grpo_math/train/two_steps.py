"""Measure a GPU, and two steps of a recipe on it: `python -m grpo_math.train.two_steps --config RECIPE ...`.

`grpo-math plan --calibrate` starts this program. Prints one line of JSON with the rates of the GPU, and a second one
with the seconds and the peak memory of the second step's generation and update.

Runs one process without DeepSpeed and vLLM. All completions have full length, and the largest micro-batch is computed
before the first step. The rewards are made up, so that every group has a signal. Nothing is kept.
"""

import io
import json
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from grpo_math.errors import UserError, printed
from grpo_math.run import metrics
from grpo_math.settings import recipe
from grpo_math.system.gpus import visible_gpus
from grpo_math.train.program import TrainingRun, build_settings
from grpo_math.trainer.largest_batch import longest_prompt

FIXED = (
    *("max_steps=2", "eval_n=0", "heldout_every=0", "save_strategy=no", "report_to=none", "disable_tqdm=true"),
    *("logging_steps=1", "longest_first=true", "log_completions=false", "use_cpu=false", "use_vllm=false"),
    "rewards=grpo_math.train.two_steps:alternating",
)


def alternating(completions: list[Any], **columns: Any) -> list[float]:
    """Return rewards that differ within each group."""
    return [float(number % 2) for number, _ in enumerate(completions)]


def rates() -> dict[str, float]:
    """Return TFLOP/s of matrix products in 16 and 32 bit, GB/s of copies, and microseconds to launch a kernel."""
    side = 64 * torch.cuda.get_device_properties(0).multi_processor_count
    a = torch.randn(side, side, device="cuda")
    tensors = {"a": a, "b": a.half(), "c": a.repeat(4, 1), "d": a[0, :1].clone()}
    lines = ("b @ b", "a @ a", "c.clone()", "d.add_(1)")
    half, full, copy, launch = (Timer(line, globals=tensors).blocked_autorange().median for line in lines)
    flops, moved = 2 * side**3 / 1e12, 2 * 4 * tensors["c"].numel() / 1e9  # a copy reads and writes
    return {"tflops": flops / half, "float32": flops / full, "bandwidth": moved / copy, "launch_us": launch * 1e6}


def outside_torch(before: int) -> int:
    """Return the bytes on the GPU that torch's allocator does not manage. ``before``: in use without this process."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved() - before)


def two_steps(run: TrainingRun) -> dict[str, Any]:
    """Train, and return the longest prompt, and the seconds and the peak of each phase of the last step."""
    torch.cuda.empty_cache()  # the allocator would keep the memory of `rates`, and count it as reserved
    kwargs: Any = run.config.generation_kwargs or {}
    run.config.generation_kwargs = {**kwargs, "min_new_tokens": run.config.max_completion_length}
    run.prepare()
    trainer: Any = run.trainer
    generate = trainer._generate_single_turn
    phases: dict[str, Any] = {}

    def measured(*arguments: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        answer = generate(*arguments)
        phases["generation"] = {"seconds": time.perf_counter() - started, "peak": peak()}
        torch.cuda.reset_peak_memory_stats()
        return answer

    trainer._generate_single_turn = measured
    trainer.train()
    updates = [line[metrics.SECONDS_UPDATE] for line in trainer.state.log_history if metrics.SECONDS_UPDATE in line]
    phases["training"] = {"seconds": updates[-1], "peak": peak()}
    return {"prompt": len(longest_prompt(trainer)), "phases": phases}


def peak() -> tuple[int, int]:
    """Return the most bytes of tensors, and the most bytes that the allocator reserved."""
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def main(words: list[str]) -> None:
    if not torch.cuda.is_available():
        raise UserError("nvidia-smi lists a GPU that torch does not see: install torch for CUDA")
    # This process has no memory on the GPU yet.
    before, answers = visible_gpus()[0].used_mb * 2**20, sys.stdout
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        read = recipe.read_and_set_env([*words, f"--output_dir={folder}/run", *(f"--{field}" for field in FIXED)])
        run = TrainingRun(build_settings(read), Path(folder, "run"))
        for measure in (rates, lambda: two_steps(run)):
            print(json.dumps({**measure(), "context": outside_torch(before)}), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {printed(error)}")
