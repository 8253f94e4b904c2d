"""Python reads this first where tests/launching.py starts it: the packages of the extras are not there.

peft and TRL import them wherever they are installed, which takes a quarter of a program's start.
"""

import sys

sys.modules.update(dict.fromkeys(("bitsandbytes", "trackio", "wandb")))
