"""The system around a run: its processes, signals, streams, GPUs and network."""
