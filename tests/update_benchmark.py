"""Measure the update of stock TRL against ours, on the same recorded rollouts, in one process.

A stock `GRPOTrainer` and a `MathGRPOTrainer` get the same weights, the same settings and one recorded rollout in place
of generation and scoring. What is left of a step is the update: arranging the rows, forward and backward of every
micro-batch, and the optimizer. It runs inside each trainer's own ``train()`` and is measured in CPU seconds of the
process, or on a GPU in seconds, synchronised.

The runs of the two alternate after one untimed step each. That step counts tokens and memory and compares the two
gradients: where they differ by more than `TOLERANCE`, the speed says nothing. The
learning rate is 0, so that every step sees the same weights.

Does not measure generation, grading, or several processes.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from grpo_math.generation.models import fast_dtype, model_path
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

QWEN2_SMALL = "qwen2-small"  # a random model of Qwen2.5's shape, 43M parameters
GROUP = 8  # completions of a prompt, and rows of a micro-batch
SIGMA = 0.6  # of the logarithm of a completion's length
# Relative difference of the two gradients. In bfloat16 TRL's own gradient is off float32's by some per cent.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


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


def completion_lengths(shape: Shape, seed: int = 0) -> list[int]:
    r"""Lengths of a shape's completions, group after group, in an order drawn by ``seed``.

    They are the quantiles :math:`\exp(\sigma \Phi^{-1}((i + 1/2) / n))`, :math:`\sigma` = `SIGMA`, of a log-normal
    distribution, scaled to the wanted mean and cut at 1 and at ``longest``: every seed has the same lengths.

    >>> lengths = completion_lengths(SHAPES["gsm8k"])
    >>> len(lengths), min(lengths), max(lengths), sum(lengths) / len(lengths)
    (32, 20, 256, 85.34375)
    >>> set(completion_lengths(SHAPES["equal"]))
    {256}
    """
    n = shape.groups * GROUP
    expected = shape.mean * shape.longest
    raw = [statistics.NormalDist(0, SIGMA).inv_cdf((i + 0.5) / n) for i in range(n)]
    if shape.mean >= 1:
        return [shape.longest] * n

    def scaled(scale: float) -> list[int]:
        return [min(shape.longest, max(1, round(scale * 2.718281828**x))) for x in raw]

    low, high = 0.0, float(shape.longest)
    for _ in range(40):  # the cut moves the mean, so the scale is found by halving
        middle = (low + high) / 2
        low, high = (middle, high) if statistics.mean(scaled(middle)) < expected else (low, middle)
    lengths = scaled(high)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return [lengths[i] for i in order]


def rollout(shape: Shape, vocabulary: int, seed: int = 0) -> dict[str, Tensor]:
    """A recorded rollout, as `GRPOTrainer._generate_and_score_completions` returns it for one process.

    >>> batch = rollout(Shape(prompt=3, longest=4, mean=0.5, groups=2, degenerate=1), vocabulary=50)
    >>> {name: tuple(value.shape) for name, value in batch.items() if value.dim()}
    {'prompt_ids': (16, 3), 'prompt_mask': (16, 3), 'completion_ids': (16, 4), 'completion_mask': (16, 4), \
'advantages': (16,)}
    >>> batch["num_items_in_batch"] == batch["completion_mask"].sum(), batch["advantages"][:8].any()
    (tensor(True), tensor(False))
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(completion_lengths(shape, seed))
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


class Meter(TrainerCallback):
    """What one optimizer step takes: ``seconds``, and, where ``deep``, ``tokens``, ``peak`` bytes and ``gradient``."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.deep = device, False
        self.seconds, self.tokens, self.peak, self.gradient = 0.0, 0, 0, torch.empty(0)

    def watch(self, model: torch.nn.Module) -> None:
        """Count the tokens that reach ``model``."""

        def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.tokens += (args[0] if args else kwargs["input_ids"]).numel()

        model.register_forward_pre_hook(count, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tokens = 0
        if self.deep and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
        elif self.deep:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            )
            self._profiler.__enter__()
        self._started = self._now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.deep:
            parts = [p.grad.detach().flatten().float() for p in kwargs["model"].parameters() if p.grad is not None]
            self.gradient = torch.cat(parts).cpu()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self._now() - self._started
        if self.deep and self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated() - self._held
        elif self.deep:
            self._profiler.__exit__(None, None, None)
            self.peak = _peak(self._profiler)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


def _peak(profiler: Any) -> int:
    """Most bytes that the CPU allocator had given out at once since the profile began."""
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate((change for _, change in changes), initial=0))


class Contestant:
    """A trainer whose rollouts are given, and its meter."""

    def __init__(self, kind: Any, config: Any, shape: Shape, model: Any, lora_r: int, **settings: Any) -> None:
        # The smallest tokenizer that a trainer takes: no text is read here.
        words = Tokenizer(WordLevel({"<pad>": 0, "x": 1}, unk_token="x"))
        ends = {"pad_token": "<pad>", "eos_token": "<pad>", "padding_side": "left"}
        adapter: dict[str, Any] = {"lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        self.meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.meter.watch(model)
        cpu = self.meter.device.type == "cpu"  # a GPU would else compute float32 weights in bfloat16, as TRL's default
        self.trainer = kind(
            model=model,
            reward_funcs=_no_reward,
            args=config(
                use_cpu=cpu,
                bf16=not cpu and model.dtype == torch.bfloat16,
                **settings,
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
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **ends),
            peft_config=LoraConfig(r=lora_r, lora_alpha=2 * lora_r, **adapter) if lora_r else None,
        )
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(self.meter)
        set_seed(1)
        for name, parameter in self.trainer.model.named_parameters():
            if "lora_B" in name:  # zeros, by which nothing would reach the gradient of lora_A
                torch.nn.init.normal_(parameter, std=0.01)

    def step(self, batch: dict[str, Tensor], deep: bool = False) -> Meter:
        """One optimizer step on ``batch``."""
        device = self.meter.device
        self.trainer._generate_and_score_completions = lambda inputs: {k: v.to(device) for k, v in batch.items()}
        self.meter.deep = deep
        torch.manual_seed(0)  # TRL shuffles the rows: alike for both
        self.trainer.train()
        return self.meter


def _no_reward(completions: list[Any], **columns: Any) -> list[float]:
    raise AssertionError("rollouts are recorded")


def _load(name: str, dtype: torch.dtype) -> Any:
    set_seed(0)
    if name == QWEN2_SMALL:
        sizes: Any = {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1408, "tie_word_embeddings": True}
        config = Qwen2Config(**sizes, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(model_path(name), dtype=dtype, trust_remote_code=False)


def bench_update(
    model: str = "embedded",
    shapes: Sequence[str] | dict[str, Shape] = tuple(SHAPES),
    *,
    runs: int = 5,
    dtype: str = "auto",
    lora_r: int = 16,
    gradient_checkpointing: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """What the update of each shape takes, stock TRL and ours; ``ratio`` is TRL / ours, the median of paired runs.

    ``model`` is what `model_path` takes, or `QWEN2_SMALL`. ``lora_r`` 0 trains all weights. Gradient
    checkpointing is on, as in TRL's own defaults. Bytes are the peak of what the update allocates, beyond what is held
    before it.
    """
    if not isinstance(shapes, dict):
        shapes = {name: SHAPES[name] for name in shapes}
    torch_dtype = getattr(torch, fast_dtype() if dtype == "auto" else dtype)
    settings: dict[str, Any] = {"lora_r": lora_r, "gradient_checkpointing": gradient_checkpointing}
    results = []
    disable_progress_bar()  # of loading weights, many times over
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers' own renamings
        for name, shape in shapes.items():
            results.append({"name": name, **_compare(shape, model, torch_dtype, settings, runs, seed)})
    return {
        "model": model,
        "dtype": str(torch_dtype).removeprefix("torch."),
        **settings,
        "runs": runs,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "tolerance": TOLERANCE[torch_dtype],
        "same": all(result["difference"] <= TOLERANCE[torch_dtype] for result in results),
        "shapes": results,
    }


def _compare(
    shape: Shape, model: str, dtype: torch.dtype, settings: dict[str, Any], runs: int, seed: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        both = [
            Contestant(kind, config, shape, _load(model, dtype), output_dir=folder, **settings)
            for kind, config in ((GRPOTrainer, GRPOConfig), (MathGRPOTrainer, MathGRPOConfig))
        ]
        batch = rollout(shape, both[0].trainer.model.config.vocab_size, seed)
        seen, seconds = [], []
        for contestant in both:
            meter = contestant.step(batch, deep=True)
            seen.append((meter.tokens, meter.peak, meter.gradient))
        for contestant in both * runs:
            seconds.append(contestant.step(batch).seconds)
    (tokens_trl, peak_trl, gradient_trl), (tokens_ours, peak_ours, gradient_ours) = seen
    ratios = [a / b for a, b in zip(seconds[::2], seconds[1::2], strict=True)]
    return {
        "tokens_trl": tokens_trl,
        "tokens_ours": tokens_ours,
        "seconds_trl": statistics.median(seconds[::2]),
        "seconds_ours": statistics.median(seconds[1::2]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "peak_bytes_trl": peak_trl,
        "peak_bytes_ours": peak_ours,
        "difference": ((gradient_ours - gradient_trl).norm() / gradient_trl.norm()).item(),
        "shape": {**shape._asdict(), "num_generations": GROUP},
    }


def table(results: dict[str, Any]) -> str:
    """The results as lines for a terminal."""
    clock = "CPU s" if results["device"] == "cpu" else "s"
    trained = f"LoRA r {results['lora_r']}" if results["lora_r"] else "all weights"
    head = f"{results['model']}, {results['dtype']}, {trained}"
    lines = [
        f"{head}, {results['device']} ({results['threads']} threads), median of {results['runs']} interleaved runs",
        f"{'shape':<17}{'tokens TRL':>11}{'ours':>8}{'':>7}{clock + ' TRL':>10}{'ours':>8}{'ratio':>8}"
        f"{'peak MB TRL':>13}{'ours':>7}{'gradient':>10}",
    ]
    for r in results["shapes"]:
        lines.append(
            f"{r['name']:<17}{r['tokens_trl']:>11,}{r['tokens_ours']:>8,}{r['tokens_trl'] / r['tokens_ours']:>6.2f}x"
            f"{r['seconds_trl']:>10.2f}{r['seconds_ours']:>8.2f}{r['ratio']:>7.2f}x"
            f"{r['peak_bytes_trl'] / 1e6:>13,.0f}{r['peak_bytes_ours'] / 1e6:>7,.0f}{r['difference']:>10.1e}"
        )
    if not results["same"]:
        lines.append(f"The gradients differ by more than {results['tolerance']:g}: the ratios say nothing.")
    return "\n".join(lines)
