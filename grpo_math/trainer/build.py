"""Build the trainer of a recipe from model, tokenizer, adapter and rows.

settings/rules.py and checks/ check settings, and train/program.py chooses the problems.
"""

from typing import Any

from datasets import Dataset
from trl import ModelConfig, get_peft_config, get_quantization_config

from grpo_math.generation.dtypes import fast_dtype, number_formats
from grpo_math.generation.models import explain_weight_errors, model_path, refuse_dropout_of_experts
from grpo_math.rewards.inputs import Reward
from grpo_math.run.weights import checkpoint_kinds
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.redact import without_secrets
from grpo_math.system.replaced import replaced
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.console import replace_printers
from grpo_math.trainer.trainer import MathGRPOTrainer


def build_trainer(
    config: MathGRPOConfig, model_args: ModelConfig, rows: Any, tokenizer: Any, rewards: list[Reward]
) -> MathGRPOTrainer:
    """Return the trainer of a recipe, with its weights loaded.

    ``rows``: a list of problems or a `datasets.Dataset`.
    """
    path = model_path(model_args.model_name_or_path)
    stated = {"dtype": model_args.dtype, "use_peft": model_args.use_peft, "bf16": config.bf16, "fp16": config.fp16}
    model_args.dtype = number_formats(
        RunSettings(stated), fast_dtype(config.use_cpu), has_copy=bool(checkpoint_kinds(config))
    ).dtype
    options: Any = config.model_init_kwargs or {}
    config.model_init_kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        **options,
    }
    # transformers refuses an eval_strategy without a data set, and the held-out sets are no data set of the trainer.
    with explain_weight_errors(path, options), replaced(config, eval_strategy="no"):
        try:
            trainer = MathGRPOTrainer(
                model=path,
                reward_funcs=rewards,
                args=config,
                train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
                processing_class=tokenizer,
                peft_config=get_peft_config(model_args),
                quantization_config=get_quantization_config(model_args),
            )
        except ValueError as error:
            refuse_dropout_of_experts(str(error), str(path))
            raise
    trainer.grpo_math.is_recipe_run = True
    replace_printers(trainer)
    # transformers sends the training arguments to trackers.
    config.model_init_kwargs = without_secrets(config.model_init_kwargs)
    return trainer
