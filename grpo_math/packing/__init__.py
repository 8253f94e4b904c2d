"""Rows of completions -> micro-batches -> packed rows -> log-probs: fewer tokens, and the same gradient."""
