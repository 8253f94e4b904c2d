"""The update of stock TRL against ours, on the same recorded rollouts, in one process.

    python tests/benchmarks/update_phase.py [--models embedded,qwen2-small] [--shapes gsm8k,short] [--runs 5] [--json]

A stock `GRPOTrainer` and a `MathGRPOTrainer` get the same weights, the same settings and one recorded rollout in place
of generation and scoring. What is left of a step is the update: arranging the rows, forward and backward of every
micro-batch, and the optimizer. It runs inside each trainer's own ``train()`` and is measured in CPU seconds of the
process, or on a GPU in seconds, synchronised.

The runs of the two alternate after two untimed steps each. The first step compares the two gradients, and the second
step counts tokens and memory. If the gradients differ by more than `TOLERANCE`, the speed says nothing. The learning
rate moves no weight, so that every step sees the same weights. Our dry run of the longest rows is off: the dry run
belongs to no update.

Does not measure generation, grading, or several processes.
"""

import argparse
import json
import math
import os
import re
import statistics
import tempfile
import warnings
from collections import Counter
from functools import partial
from itertools import product
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, PrinterCallback, Qwen2Config, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from grpo_math import MathGRPOConfig, MathGRPOTrainer
from grpo_math.generation.dtypes import fast_dtype
from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.packing import altered, attention
from grpo_math.trainer.step_cost import measure_steps

QWEN2_SMALL = "qwen2-small"  # a random model of Qwen2.5's shape, 43M parameters
OURS = partial(MathGRPOConfig, longest_first=False)
ABOVE = re.compile(r".*/(?:site-packages|tests)/|.*/(?=grpo_math/)")  # of a path of a line
GROUP = 8  # completions of a prompt, and rows of a micro-batch
SIGMA = 0.6  # of the logarithm of a completion's length
# Relative difference of the two gradients. In bfloat16 TRL's own gradient is off float32's by some per cent.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}


class Shape(NamedTuple):
    """Groups of `GROUP` completions of up to ``longest`` tokens, of prompts of ``prompt`` tokens each.

    ``mean`` is the mean length as a share of ``longest``; 1 makes all completions equally long. In the first
    ``degenerate`` groups all advantages are zero.
    """

    prompt: int
    longest: int
    mean: float
    groups: int = 4
    degenerate: int = 0


SHAPES = {
    "gsm8k": Shape(prompt=128, longest=256, mean=1 / 3),
    "short": Shape(prompt=66, longest=16, mean=1 / 2),
    "math": Shape(prompt=128, longest=1024, mean=1 / 3),
    "degenerate": Shape(prompt=128, longest=256, mean=1 / 3, groups=5, degenerate=2),
    "equal": Shape(prompt=128, longest=256, mean=1),
    "one_token_prompt": Shape(prompt=1, longest=256, mean=1),
}


def completion_lengths(shape: Shape) -> list[int]:
    r"""Lengths of a shape's completions, group after group, in a random order.

    They are the quantiles :math:`\exp(\sigma \Phi^{-1}((i + 1/2) / n))`, :math:`\sigma` = `SIGMA`, of a log-normal
    distribution, scaled to the mean and limited to 1 and ``longest``.

    >>> lengths = completion_lengths(SHAPES["gsm8k"])
    >>> len(lengths), min(lengths), max(lengths), sum(lengths) / len(lengths)
    (32, 20, 256, 85.34375)
    >>> set(completion_lengths(SHAPES["equal"]))
    {256}
    """
    n = shape.groups * GROUP
    quantiles = [statistics.NormalDist(0, SIGMA).inv_cdf((i + 0.5) / n) for i in range(n)]
    lengths, scale = [1] * n, 1.0
    while statistics.mean(lengths) < shape.mean * shape.longest:  # the limits move the mean
        scale *= 1.001
        lengths = [min(shape.longest, max(1, round(scale * math.exp(x)))) for x in quantiles]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return [lengths[i] for i in order]


def rollout(shape: Shape, vocabulary: int) -> dict[str, Tensor]:
    """A recorded rollout, as `GRPOTrainer._generate_and_score_completions` returns it for one process.

    >>> batch = rollout(Shape(prompt=3, longest=4, mean=0.5, groups=2, degenerate=1), vocabulary=50)
    >>> {name: tuple(value.shape) for name, value in batch.items() if value.dim()}
    {'prompt_ids': (16, 3), 'prompt_mask': (16, 3), 'completion_ids': (16, 4), 'completion_mask': (16, 4), \
'advantages': (16,)}
    >>> batch["num_items_in_batch"] == batch["completion_mask"].sum(), batch["advantages"][:8].any()
    (tensor(True), tensor(False))
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(completion_lengths(shape))
    rows = len(lengths)
    prompts = torch.randint(2, vocabulary, (shape.groups, shape.prompt), generator=generator)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    completions = torch.randint(2, vocabulary, mask.shape, generator=generator)
    advantages = torch.randn(shape.groups, GROUP, generator=generator)
    advantages -= advantages.mean(dim=1, keepdim=True)
    advantages[: shape.degenerate] = 0
    return {
        "prompt_ids": prompts.repeat_interleave(GROUP, dim=0),
        "prompt_mask": torch.ones(rows, shape.prompt, dtype=torch.long),
        "completion_ids": completions.masked_fill(mask == 0, 0),
        "completion_mask": mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": mask.sum(),
    }


class Contestant(TrainerCallback):
    """A trainer with recorded rollouts. Measures the ``seconds``, the ``tokens`` and the ``peak`` bytes of its last
    step, and the ``gradient`` if the step was started with it: copies of gradients would raise the peak."""

    tokens = 0

    def __init__(self, kind: Any, config: Any, shape: Shape, model: Any, lora_r: int, folder: str) -> None:
        adapter = LoraConfig(r=lora_r or 1, lora_alpha=2 * lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
        cpu = not torch.cuda.is_available()  # a GPU would else compute float32 weights in bfloat16, as TRL's default
        # A hook of a script would switch packing off.
        altered.LIBRARIES = (*altered.LIBRARIES, __name__.partition(".")[0])
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.trainer = kind(
            model=model,
            reward_funcs=lambda completions, **columns: [],  # rollouts are recorded
            args=config(
                use_cpu=cpu,
                bf16=not cpu and model.dtype == torch.bfloat16,
                output_dir=folder,
                max_steps=1,
                per_device_train_batch_size=GROUP,
                gradient_accumulation_steps=shape.groups,
                num_generations=GROUP,
                max_completion_length=shape.longest,
                learning_rate=1e-30,  # moves no weight; MathGRPOConfig refuses 0
                max_grad_norm=0.0,
                beta=0.0,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * shape.groups),
            processing_class=load_tokenizer(model_path("embedded")),  # a trainer takes one; no text is read here
            peft_config=adapter if lora_r else None,
        )
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(self)
        set_seed(1)
        for name, parameter in self.trainer.model.named_parameters():
            if "lora_B" in name:  # zeros, by which nothing would reach the gradient of lora_A
                torch.nn.init.normal_(parameter, std=0.01)

    def step(self, batch: dict[str, Tensor], *, gradient: bool = False) -> None:
        """Run one optimizer step on ``batch``."""
        device, self._wants_gradient = self.trainer.accelerator.device, gradient
        self.trainer._generate_and_score_completions = lambda inputs: {k: v.to(device) for k, v in batch.items()}
        torch.manual_seed(0)  # TRL shuffles the rows: alike for both
        [phases] = measure_steps(self.trainer)
        cost = phases["update"]
        self.seconds = cost.seconds if device.type == "cuda" else cost.cpu_seconds
        self.peak = cost.peak - cost.start

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tokens += (args[0] if args else kwargs["input_ids"]).numel()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tokens = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._wants_gradient:
            parts = [p.grad.detach().flatten().float() for p in kwargs["model"].parameters() if p.grad is not None]
            self.gradient = torch.cat(parts).cpu()


def _load(name: str, dtype: torch.dtype) -> Any:
    set_seed(0)
    if name == QWEN2_SMALL:
        sizes: Any = {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1408, "tie_word_embeddings": True}
        config = Qwen2Config(**sizes, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(model_path(name), dtype=dtype, trust_remote_code=False)


def contestants(model: str, shape: Shape, dtype: torch.dtype, lora_r: int, folder: str) -> list[Contestant]:
    """Make TRL's trainer and ours, with the same weights."""
    kinds = ((GRPOTrainer, GRPOConfig), (MathGRPOTrainer, OURS))
    return [Contestant(kind, config, shape, _load(model, dtype), lora_r, folder) for kind, config in kinds]


def waits_by_line(contestant: Contestant, batch: dict[str, Tensor]) -> Counter[str]:
    """Run one step, and count how often the CPU waits for the GPU, by the line that waits. Empty without CUDA."""
    # The pretended GPU runs on a build without CUDA.
    cuda = torch.version.cuda is not None and torch.cuda.is_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            contestant.step(batch)
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return Counter(f"{ABOVE.sub('', warning.filename)}:{warning.lineno}" for warning in waits)


def bench_update(model: str, shape: Shape, *, runs: int = 5, dtype: str = "auto", lora_r: int = 16) -> dict[str, Any]:
    """What the update of a shape takes, stock TRL and ours; ``ratio`` is TRL / ours, the median of paired runs.

    ``model`` is what `model_path` takes, or `QWEN2_SMALL`. ``lora_r`` 0 trains all weights. Gradient checkpointing is
    on, as in TRL's own defaults. Bytes are the peak of what the update allocates, beyond what is held before it.
    """
    precision = getattr(torch, fast_dtype() if dtype == "auto" else dtype)
    disable_progress_bar()  # of loading weights, many times over
    warnings.simplefilter("ignore", FutureWarning)  # of transformers' own renamings
    attention.kernels_used.clear()
    with tempfile.TemporaryDirectory() as folder:
        both = contestants(model, shape, precision, lora_r, folder)
        batch = rollout(shape, both[0].trainer.model.config.vocab_size)
        for contestant in both:
            contestant.step(batch, gradient=True)
        waits_trl, waits_ours = (waits_by_line(contestant, batch).total() for contestant in both)
        for contestant in both:
            contestant.step(batch)
        trl, ours = ((contestant.tokens, contestant.peak, contestant.gradient) for contestant in both)
        seconds = []
        for contestant in both * runs:
            contestant.step(batch)
            seconds.append(contestant.seconds)
    ratios = [a / b for a, b in zip(seconds[::2], seconds[1::2], strict=True)]
    difference = ((ours[2] - trl[2]).norm() / trl[2].norm()).item()
    return {
        "model": model,
        "dtype": str(precision).removeprefix("torch."),
        "lora_r": lora_r,
        "runs": runs,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "tolerance": TOLERANCE[precision],
        "same": difference <= TOLERANCE[precision],
        "tokens_trl": trl[0],
        "tokens_ours": ours[0],
        "seconds_trl": statistics.median(seconds[::2]),
        "seconds_ours": statistics.median(seconds[1::2]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "kernels": sorted(attention.kernels_used),
        "waits_trl": waits_trl,
        "waits_ours": waits_ours,
        "peak_bytes_trl": trl[1],
        "peak_bytes_ours": ours[1],
        "difference": difference,
        "shape": {**shape._asdict(), "num_generations": GROUP},
    }


LINE = (  # of a terminal: TRL's figure before ours
    "{model} {dtype} {name}: {ratio:.2f}x as fast ({seconds_trl:.2f} / {seconds_ours:.2f} s), tokens {tokens_trl:,} / "
    "{tokens_ours:,}, peak {peak_bytes_trl:,} / {peak_bytes_ours:,} bytes, gradients off by {difference:.1e}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=f"embedded,{QWEN2_SMALL}")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object a model and shape")
    options = parser.parse_args()
    for model, name in product(options.models.split(","), options.shapes.split(",")):
        # One at a time: an aborted run has printed something.
        results = {"name": name, **bench_update(model, SHAPES[name], runs=options.runs)}
        print(json.dumps(results) if options.json else LINE.format(**results), flush=True)
        assert results["same"], "the gradients differ: the ratio says nothing"


if __name__ == "__main__":
    main()
