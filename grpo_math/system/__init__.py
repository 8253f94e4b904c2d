"""The system around a run: its files, processes, signals, streams, GPUs, network, secrets, and code of the user."""
