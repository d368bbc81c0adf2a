"""Changes over the snapshots of a training."""

SEEDS = 5  # fewer training runs give an interval too wide for a verdict
