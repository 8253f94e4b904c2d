"""Prompts -> completions, by transformers or vLLM, and the adapter's way to the vLLM server."""
