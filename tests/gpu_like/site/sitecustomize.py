"""In PYTHONPATH of a rehearsal: the process of `grpo-math plan --calibrate` has the pretended GPU, too."""

import sys
from pathlib import Path

if "grpo_math.train.two_steps" in sys.orig_argv:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from gpu_like import device

    device.load()
