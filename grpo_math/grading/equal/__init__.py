"""Whether an answer equals a gold answer: compare.py is the way in."""
