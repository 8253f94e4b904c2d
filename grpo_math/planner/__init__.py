"""`grpo-math plan`: does a recipe fit these GPUs, what takes the memory, what to change, and which GPU does what.

model.py knows a model's shapes and measured memory, settings.py the fields of a recipe that matter, memory.py adds up
the bytes by term, seconds.py the time, devices.py says who runs where, plan.py puts them together, and picture.py draws
the answer. measure.py runs one layer of each kind of a model on tensors without
memory, in a process of its own.

Does not load weights, and imports torch in measure.py alone.
"""

from grpo_math.planner.picture import picture
from grpo_math.planner.plan import choose, plan, serve_layout, shipped_configs
from grpo_math.planner.seconds import card_of
from grpo_math.settings.recipe import read_recipe

__all__ = ["card_of", "choose", "picture", "plan", "read_recipe", "serve_layout", "shipped_configs"]
