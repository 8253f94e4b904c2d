"""`python -m grpo_math.train`: signals are handled while torch and the other packages are imported."""

import logging
import os
import sys

from grpo_math.run.machine import SLEEPING_THREADS
from grpo_math.run.signals import STOPPING, end_at_once, handling

if __name__ == "__main__":
    # bitsandbytes suggests a kernel from the Hub.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        os.environ.setdefault(*SLEEPING_THREADS)
    with handling(STOPPING, end_at_once):
        from grpo_math.train.program import main

    sys.exit(main(sys.argv[1:]))
