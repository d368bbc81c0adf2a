"""The tasks, one a file."""
