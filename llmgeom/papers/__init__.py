"""The papers' printed numbers and ours: what is run for each, and what comes of it."""
