"""Rewards -> advantages -> loss: pure functions of tensors and rows, and what they log. Imports no trainer."""
