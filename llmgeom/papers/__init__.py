"""The papers' printed numbers and ours: the runs for each, and their results."""
