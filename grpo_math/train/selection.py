"""Which problems are trained on, in which order, and whether they are enough for a step.

Does not measure pass rates: evaluation/pass_rates.py does.
"""

from typing import Any

from trl import ModelConfig

from grpo_math.evaluation.toolbox import Toolbox
from grpo_math.problems import difficulty
from grpo_math.settings.arguments import TrainArguments
from grpo_math.settings.batch import Batch
from grpo_math.trainer.config import MathGRPOConfig


def way_of_measuring(
    train_args: TrainArguments, config: MathGRPOConfig, model_args: ModelConfig, tools: Toolbox | None = None
) -> dict[str, Any]:
    """What a pass rate depends on, apart from the problem."""
    revision = "" if model_args.model_revision == "main" else f"@{model_args.model_revision}"
    return {
        "model": f"{model_args.model_name_or_path}{revision}",
        "template": train_args.template,
        "temperature": config.temperature,
        "max_tokens": config.max_completion_length or 512,
        "samples": train_args.difficulty_samples,
        **({"tools": tools.stated} if tools else {}),
    }


def by_difficulty(
    rows: list[dict[str, Any]],
    rates: difficulty.Rates,
    train_args: TrainArguments,
    config: MathGRPOConfig,
    main_process: bool,
) -> list[dict[str, Any]]:
    """The rows to train on, in their order."""
    if train_args.difficulty_band is not None:
        rows, line = difficulty.in_band(rows, rates, *train_args.difficulty_band)
        if main_process:
            print(line, flush=True)
        batch_of(config).refuse_few(len(rows), "difficulty_band", train_args.difficulty_band)
    return difficulty.easy_to_hard(rows, rates) if train_args.curriculum == "easy_to_hard" else rows


def batch_of(config: MathGRPOConfig) -> Batch:
    settings: Any = config  # TRL's types say None where its own __post_init__ has filled in a number
    return Batch(
        generations=settings.num_generations,
        processes=settings.world_size,
        rows=settings.per_device_train_batch_size,
        steps=settings.gradient_accumulation_steps,
        rollout=settings.generation_batch_size,
    )
