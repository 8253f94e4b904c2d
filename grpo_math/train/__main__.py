"""`python -m grpo_math.train`: signals are handled while torch and the other packages are imported, and the recipe's
environment variables are set before."""

import json
import os
import signal
import sys
from contextlib import suppress

from grpo_math.errors import UserError, printed
from grpo_math.settings import recipe
from grpo_math.system.gpus import use_first_gpu
from grpo_math.system.machine import SLEEPING_THREADS
from grpo_math.system.signals import STOPPING, end_at_once, handling
from grpo_math.system.streams import quiet
from grpo_math.train.layout import INHERITED
from grpo_math.trainer import contract

if __name__ == "__main__":
    quiet()
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        os.environ.setdefault(*SLEEPING_THREADS)
    with handling((signal.SIGINT, *STOPPING), end_at_once):
        with suppress(UserError):  # `main` reads the recipe again, and prints the error
            settings = recipe.read_and_set_env(sys.argv[1:]).settings
            spreads = "device_map" in (settings.model_init_kwargs or {})
            if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not (settings.use_cpu or spreads):
                use_first_gpu()
        try:
            contract.refuse()
        except UserError as error:
            print(f"error: {printed(error)}", file=sys.stderr)
            sys.exit(2)
        from grpo_math.train.program import main

    sys.exit(main(sys.argv[1:], **json.loads(os.environ.pop(INHERITED, "{}"))))
