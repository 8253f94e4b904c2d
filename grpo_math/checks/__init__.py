"""The checks of a run, its data and its rewards: the doctor before a run, the diagnosis in and after it.

Each yields `Finding`s (errors.py). Only the self-test, and the checks with a tokenizer, import torch.
"""
