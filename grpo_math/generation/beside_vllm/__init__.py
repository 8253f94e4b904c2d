"""What the vLLM server's process imports of ours: this folder is on its path, and the package is not."""
