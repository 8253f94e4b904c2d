"""The files of a run: who writes them, what each contains, and when they are complete."""
