"""Convert a recipe that was read to `Settings`: `RunSettings`, `MathGRPOConfig` and TRL's `ModelConfig`.

settings/recipe.py reads the recipe.
"""

import os
import re
from argparse import SUPPRESS
from dataclasses import dataclass, fields
from typing import Any

from trl import ModelConfig, TrlParser

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.vllm_server import answer_seconds
from grpo_math.problems.from_recipe import evaluation_settings
from grpo_math.problems.prompts import recipe_template
from grpo_math.settings import rules
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.batch import resolve_batch
from grpo_math.settings.fields import OURS
from grpo_math.settings.own import ProgramFields
from grpo_math.settings.recipe import Recipe
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.reading import Unreadable
from grpo_math.trainer.config import MathGRPOConfig

CLASSES: tuple[Any, ...] = (ProgramFields, MathGRPOConfig, ModelConfig)


@dataclass(frozen=True)
class Settings:
    """The settings of a run, and the classes of the trainer and of TRL that are made from them.

    ``run`` has the values that the run uses; ``recipe.settings`` those that the user gave.
    """

    run: RunSettings
    config: MathGRPOConfig
    model: ModelConfig
    recipe: Recipe


def build(read: Recipe) -> Settings:
    """Construct the classes from a recipe.

    Raises the recipe's first problem, or one line with the message of a class of TRL or transformers.
    """
    requested = read.raise_first_problem().settings
    deepspeed_config(requested.deepspeed, None)  # rejects a missing file
    # The check of the recipe prints these warnings once. Here each process would print them.
    rules.logger.disabled = True
    try:
        batch = resolve_batch(requested, int(os.environ.get("WORLD_SIZE", 1)))
        template = recipe_template(requested.values())
        derived = evaluation_settings(requested)
        derived |= {"per_device_train_batch_size": batch.rows, "gradient_accumulation_steps": batch.steps}
        # While TRL waits for completions on the main process, the other processes wait for it in a collective.
        if requested.generation == "server" and not requested.sends_adapter and not requested.requested("ddp_timeout"):
            derived["ddp_timeout"] = int(answer_seconds(batch.rollout * requested.max_completion_length))
        values = {**OURS, **requested.explicit_values(), **derived}
        config, model = (
            kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
            for kind in CLASSES[1:]
        )
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            raise Unreadable(error, error.filename) from None
        message = " ".join(str(error).split())
        mentioned = [name for name in requested.explicit if re.search(rf"(?<!\w){name}(?!\w)", message)]
        if name := max(mentioned, key=len, default=None):
            raise ConfigError(name, getattr(requested, name), f"is refused ({message})", "give another value") from None
        raise UserError(f"{message}: change that setting") from None
    finally:
        rules.logger.disabled = False
    # config.yaml states the template and the format that the run used, not None.
    run = requested.derived(**derived, prompt_template=template.name, answer_format=template.answer_format)
    return Settings(run, config, model, read)


def print_help() -> None:
    """Print every field with its meaning, TRL's and transformers' too."""
    parser = TrlParser(
        list(CLASSES),
        prog="grpo_math.train",
        # argparse's own usage has 300 lines.
        usage="grpo-math train --config RECIPE.yaml [--FIELD VALUE ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(**OURS)
    listed = set[str]()
    for action in parser._actions:
        # TrlParser adds a spelling with hyphens, and --no_FIELD, which is --FIELD false here.
        action.option_strings = [word for word in action.option_strings if "-" not in word[2:]]
        action.help = SUPPRESS if action.dest in listed else action.help
        listed.add(action.dest)
    parser.print_help()
