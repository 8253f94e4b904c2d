"""Data sets, generated problems and templates -> rows of prompt and answer."""
