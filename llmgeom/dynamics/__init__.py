"""Training dynamics: when attention, values and answers settle, over snapshots and seeds."""
