"""`grpo-math plan`: does a recipe fit these GPUs, what takes the memory, what to change, and which GPU does what.

model.py reads the shapes out of config.json, settings.py the fields of a recipe that matter, memory.py counts the bytes
by term, devices.py says who runs where, plan.py puts them together, and picture.py draws the answer. table.py is the
README's table. simulate.py answers the same from a run of the recipe's own trainer without memory (simulation/).

Does not load weights or import torch, and does not measure: figures are counted from shapes, or simulated.
"""

from grpo_math.planner.picture import picture
from grpo_math.planner.plan import choose, plan, serve_layout
from grpo_math.planner.simulate import simulate, words
from grpo_math.planner.table import MODELS, RECIPE, cells, table
from grpo_math.settings.recipe import read_recipe

__all__ = [
    "MODELS",
    "RECIPE",
    "cells",
    "choose",
    "picture",
    "plan",
    "read_recipe",
    "serve_layout",
    "simulate",
    "table",
    "words",
]
