"""Probes that edit activations: ablation and patching."""
