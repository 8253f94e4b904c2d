"""`python -m grpo_math.train`: the training program."""

import logging
import os
import sys

from grpo_math.run.machine import SLEEPING_THREADS

if __name__ == "__main__":
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it suggests a kernel from the Hub
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        os.environ.setdefault(*SLEEPING_THREADS)
    from grpo_math.train.program import main

    sys.exit(main())
