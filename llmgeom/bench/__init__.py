"""Models of known truth: trained in wind tunnels, many at a time, to validate metrics."""
