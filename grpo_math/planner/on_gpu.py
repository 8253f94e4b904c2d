"""Measure a GPU, and two steps of a recipe on the GPU: `python -m grpo_math.planner.on_gpu PROMPT_TOKENS ARGUMENTS`.

calibrate.py starts this program. ARGUMENTS: `--config RECIPE --FIELD VALUE ...`. Prints a line of JSON with the rates
of the GPU, and a second line with the memory and the seconds of the recipe's largest micro-batch and of its generation.

Runs the recipe's own trainer in one process, on its own weights, which have to be on this machine. Does not run
DeepSpeed or vLLM, and evaluates, grades and saves nothing.
"""

import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import PrinterCallback
from transformers.utils import logging

from grpo_math.errors import UserError, printed
from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.run.bar import Bar
from grpo_math.settings import recipe
from grpo_math.system.gpus import of_first_gpu
from grpo_math.system.machine import GB
from grpo_math.trainer.build import trainer_of
from grpo_math.trainer.longest import dry_run
from grpo_math.trainer.recipe_settings import build as settings_from

FIRST = 8  # tokens that are generated to find out how many the time allows
GENERATING = 15.0  # seconds of generation
FIXED = (
    *("max_steps=1", "report_to=none", "save_strategy=no", "eval_strategy=no", "disable_tqdm=true"),
    *("longest_first=true", "log_completions=false", "use_cpu=false"),
)


def median_seconds(work: Callable[[], Any], runs: int = 5) -> float:
    """Return the median seconds of ``work``, after one run that is not timed."""
    seconds = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def rates() -> dict[str, float]:
    """Return TFLOP/s of matrix products in 16 and 32 bit, GB/s of copies, and microseconds of a launch."""
    answer = {}
    for name, dtype in (("tflops", torch.float16), ("float32", torch.float32)):
        side, seconds = 256, 0.0
        # Small products measure launches, and large ones take long on slow cards.
        while seconds < 0.002 and side < 16384:
            side *= 2
            a = torch.randn(side, side, device="cuda").to(dtype)
            seconds = median_seconds(lambda a=a: a @ a)
        answer[name] = 2 * side**3 / seconds / 1e12
    block, one = torch.zeros(GB // 4, dtype=torch.uint8, device="cuda"), torch.zeros(1, device="cuda")
    # A copy reads and writes.
    answer["bandwidth"] = 2 * len(block) / median_seconds(block.clone) / 1e9
    answer["launch_us"] = median_seconds(lambda: [one.add_(1) for _ in range(1000)]) * 1e3
    return answer


def outside_torch(before: int) -> int:
    """Return the bytes on the GPU that torch's allocator does not manage. ``before``: in use without this process."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved() - before)


def ready_trainer(words: list[str], prompt_tokens: int, folder: str) -> tuple[Any, Any]:
    """Return the recipe's trainer after one step on short completions, and the arguments of its generation."""
    settings = settings_from(recipe.read([*words, f"--output_dir={folder}", *(f"--{field}" for field in FIXED)]))
    config, model = settings.config, settings.model
    # An engine is not started. Its log-probs are made up with its completions.
    engine, config.use_vllm = config.use_vllm, False
    tokenizer = load_tokenizer(model_path(model.model_name_or_path), str(model.model_revision))
    text = tokenizer.decode(tokenizer(" a" * prompt_tokens)["input_ids"][: prompt_tokens - FIRST])
    rows: Any = [{"prompt": f"{number}{text}", "answer": "1"} for number in range(1024)]

    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        return [float(number % 2) for number, _ in enumerate(completions)]

    trainer: Any = trainer_of(config, model, rows, tokenizer, [reward])
    trainer.remove_callback(PrinterCallback)
    trainer.grpo_math.rollouts.grade = lambda *args: None
    token = next(token for token in range(5, 5000) if token not in trainer.eos_token_ids)
    generate, calls = trainer._generate_single_turn, []

    def completions_of(*arguments: Any) -> Any:
        calls.append(arguments)
        return [[token] * FIRST for _ in arguments[0]], [[0.0] * FIRST for _ in arguments[0]] if engine else None

    trainer._generate_single_turn, trainer.use_vllm = completions_of, engine
    # Packs the model, fills the optimizer's state, and computes the largest micro-batch for the first time.
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(printed):
        trainer.train()
    return trainer, None if engine else lambda: generate(*calls[0])


def peak() -> tuple[int, int]:
    """Return the most bytes that were allocated and reserved since the last call."""
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peaks


def update(trainer: Any) -> dict[str, Any]:
    """Compute the largest micro-batch twice. Each parameter has a gradient, as after an earlier micro-batch."""
    tokens, updates = 0, trainer.grpo_math.updates

    def loss_of(model: Any, rows: Any) -> Any:
        nonlocal tokens
        tokens = int(rows["completion_mask"].sum())
        return updates.loss_of(model, rows).loss

    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    peak()
    seconds = median_seconds(lambda: dry_run(trainer, loss_of, updates.budget, trainer.model), runs=2)
    trainer.model.zero_grad()
    return {"tokens": tokens, "seconds": seconds, "peak": peak()}


def generation(trainer: Any, generate: Callable[[], Any]) -> dict[str, Any]:
    """Generate a rollout: all its tokens, or as many as the time allows."""
    config, length = trainer.generation_config, trainer.max_completion_length
    config.max_new_tokens = config.min_new_tokens = FIRST
    affordable = int(FIRST * GENERATING / median_seconds(generate, runs=1))
    config.max_new_tokens = config.min_new_tokens = tokens = max(FIRST, min(length, affordable))
    peak()
    start = time.perf_counter()
    generate()
    torch.cuda.synchronize()
    return {"tokens": tokens, "seconds": time.perf_counter() - start, "peak": peak()}


def main(words: list[str]) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    # This process has no memory on the GPU yet.
    used = int(of_first_gpu("memory.used")) * 2**20
    answers, bar = sys.stdout, Bar(total=4, desc="calibrate", unit=" parts")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr), bar:
        print(json.dumps({**rates(), "context": outside_torch(used)}), file=answers, flush=True)
        bar.update()
        trainer, generate = ready_trainer(words[1:], int(words[0]), folder)
        bar.update()
        steps = {"training": update(trainer)}
        bar.update()
        if generate:
            steps["generation"] = generation(trainer, generate)
        bar.update()
        print(json.dumps({"steps": steps, "context": outside_torch(used)}), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, torch.OutOfMemoryError) as error:
        print(f"calibrate: {printed(error)}", file=sys.stderr)
        sys.exit(1)
