"""A model on problems -> results, intervals, comparisons."""
