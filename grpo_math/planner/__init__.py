"""`grpo-math plan`: whether a recipe fits these GPUs, what uses the memory, what to change, and what each GPU does.

model.py reads a model's shapes and measured memory. settings.py reads the fields of a recipe that affect memory.
memory.py has the bytes of each term. devices.py assigns GPUs to the policy and vLLM. memory_plan.py combines these and
decides whether a recipe fits. remedies.py changes settings until it does. plan.py reads the recipe and the machine, and
picture.py writes the answer. measure.py runs layers of each kind of a model on tensors without memory, in a separate
process, with layers.py and fake.py.

Loads no weights. Only that process imports torch.
"""

from grpo_math.planner.cards import TABLES, find_card
from grpo_math.planner.picture import picture
from grpo_math.planner.plan import choose, plan, serve_layout, unplanned_layout

__all__ = ["TABLES", "choose", "find_card", "picture", "plan", "serve_layout", "unplanned_layout"]
