"""One run: launched, trained, gone on with, ended. `python -m grpo_math.train` is the training program."""
