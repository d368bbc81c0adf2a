"""Probes of answers in wind tunnels, scored against the exact posterior."""
