"""One run: launch, training, resume, end. `python -m grpo_math.train` is the training program."""
