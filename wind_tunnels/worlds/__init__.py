"""The tasks, one per file."""
