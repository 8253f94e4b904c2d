"""TRL's classes for mypy alone, so that settings are read without importing TRL. When a program runs they are empty."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl import GRPOConfig as GRPOConfig
    from trl import ModelConfig as ModelConfig
else:
    GRPOConfig = ModelConfig = object
