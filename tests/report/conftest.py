"""The synthetic run that the tests of the report read, and a small model."""

from small_model import script, small
from synthetic_run import quick_to_draw, run

__all__ = ["quick_to_draw", "run", "script", "small"]
