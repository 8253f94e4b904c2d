"""A recipe that was read -> `Settings`: `TrainArguments`, `MathGRPOConfig` and TRL's `ModelConfig` made of it.

Does not read the recipe (recipe.py does), nor check what two settings mean together (conflicts.py).
"""

import os
import re
from dataclasses import dataclass
from typing import Any

from trl import ModelConfig, TrlParser

from grpo_math.errors import ConfigError, UserError
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.arguments import TrainArguments
from grpo_math.settings.batch import plan
from grpo_math.settings.fields import OURS
from grpo_math.settings.recipe import Recipe
from grpo_math.trainer.config import MathGRPOConfig

CLASSES: list[Any] = [TrainArguments, MathGRPOConfig, ModelConfig]


@dataclass(frozen=True)
class Settings:
    """All that a run takes from its recipe and its command line, which are read once."""

    arguments: TrainArguments
    config: MathGRPOConfig
    model: ModelConfig
    values: dict[str, Any]  # every field, as the recipe states it or by default
    given: set[str]  # the fields that are stated
    argv: list[str]


class Parser(TrlParser):
    """TRL's parser, fed with settings that recipe.py has read and checked one by one; what is refused is one line."""

    def __init__(self) -> None:
        usage = "grpo-math train --config RECIPE.yaml [--FIELD VALUE ...]"  # argparse's own is 300 lines long
        super().__init__(CLASSES, prog="grpo_math.train", usage=usage, allow_abbrev=False)
        self.set_defaults(**OURS)
        self.given: set[str] = set()

    def error(self, message: str) -> Any:
        raise ValueError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The settings before TRL's dataclasses are made of them: `batch.plan` fills in the three that it solves."""
        settings, unknown = super().parse_known_args(args, namespace)
        batch = plan(vars(settings), self.given, int(os.environ.get("WORLD_SIZE", 1)))
        settings.per_device_train_batch_size, settings.gradient_accumulation_steps = batch.rows, batch.steps
        return settings, unknown

    def parse(self, read: Recipe) -> Settings:
        """Raises the first problem of the recipe, or the one line of what a class refuses."""
        deepspeed_config(read.sound().values, None)  # refuses a file that is not there
        os.environ.update(read.env)
        self.given = read.given
        self.set_defaults(**read.stated())
        try:
            arguments, config, model = self.parse_args_into_dataclasses(args=[])
        except UserError:
            raise
        except (ValueError, TypeError, OSError, KeyError, ImportError, RuntimeError) as error:  # of TRL's own classes
            file = error.filename if isinstance(error, OSError) else None
            if name := next((name for name in self.given if file and read.values[name] == file), None):
                reason = f"cannot be read ({str(error).partition('] ')[2].partition(':')[0]})"
                raise ConfigError(name, file, reason, "give the path of a JSON file, or a mapping") from None
            said = " ".join(str(error).split())
            named = [name for name in self.given if re.search(rf"(?<!\w){name}(?!\w)", said)]
            if name := max(named, key=len, default=None):
                raise ConfigError(name, read.values[name], f"is refused ({said})", "give another value") from None
            raise UserError(f"{said}: change that setting") from None
        if arguments.curriculum != "none":
            if "shuffle_dataset" in self.given and config.shuffle_dataset:
                why = f"contradicts curriculum={arguments.curriculum}"
                raise ConfigError("shuffle_dataset", True, why, "leave one of them out")
            config.shuffle_dataset = False
        return Settings(arguments, config, model, read.values, read.given, read.argv)
