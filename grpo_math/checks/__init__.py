"""The checks of a run, its data and its rewards: the doctor before a run, the diagnosis in and after it.

Each yields `Finding`s (errors.py). Imports no torch.
"""
