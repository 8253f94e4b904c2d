"""Compare an answer with a gold answer. The entry point is compare.py."""
