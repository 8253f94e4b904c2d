"""Code for the vLLM server's process: this folder is on its path, and the package grpo_math is not."""
