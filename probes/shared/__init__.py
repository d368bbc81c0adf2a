"""Measures and steps that several probes share."""
