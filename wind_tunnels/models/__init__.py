"""Architectures for tunnels: transformers' own configs, and short models of ours that are PreTrainedModels too."""
