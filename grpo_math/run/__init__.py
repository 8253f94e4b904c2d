"""The files, logs and signals of a run. Every other package may use this one."""
