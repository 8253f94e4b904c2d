"""Convert a recipe that was read to `Settings`: `TrainArguments`, `MathGRPOConfig` and TRL's `ModelConfig`.

settings/recipe.py reads the recipe.
"""

import os
import re
from argparse import SUPPRESS
from dataclasses import dataclass, fields
from typing import Any

from trl import ModelConfig, TrlParser

from grpo_math.errors import ConfigError, UserError
from grpo_math.problems.from_recipe import evaluation_settings
from grpo_math.settings import rules
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.arguments import TrainArguments
from grpo_math.settings.batch import plan
from grpo_math.settings.fields import OURS
from grpo_math.settings.recipe import Recipe
from grpo_math.system.reading import Unreadable
from grpo_math.trainer.config import MathGRPOConfig

CLASSES: tuple[Any, ...] = (TrainArguments, MathGRPOConfig, ModelConfig)


@dataclass(frozen=True)
class Settings:
    """All settings of a run's recipe and command line, which are read once, and their classes."""

    arguments: TrainArguments
    config: MathGRPOConfig
    model: ModelConfig
    recipe: Recipe


def build(read: Recipe) -> Settings:
    """Construct the classes from a recipe.

    Raises the recipe's first problem, or one line with the message of a class of TRL or transformers.
    """
    deepspeed_config(read.raise_first_problem().values, None)  # rejects a missing file
    values = {**OURS, **read.explicit_values()}
    # The check of the recipe prints these warnings once. Here each process would print them.
    rules.logger.disabled = True
    try:
        batch = plan(read.values, read.explicit, int(os.environ.get("WORLD_SIZE", 1)))
        values |= evaluation_settings(read.values)
        values |= {"per_device_train_batch_size": batch.rows, "gradient_accumulation_steps": batch.steps}
        arguments, config, model = (
            kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
            for kind in CLASSES
        )
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            raise Unreadable(error, error.filename) from None
        message = " ".join(str(error).split())
        mentioned = [name for name in read.explicit if re.search(rf"(?<!\w){name}(?!\w)", message)]
        if name := max(mentioned, key=len, default=None):
            raise ConfigError(name, read.values[name], f"is refused ({message})", "give another value") from None
        raise UserError(f"{message}: change that setting") from None
    finally:
        rules.logger.disabled = False
    return Settings(arguments, config, model, read)


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
