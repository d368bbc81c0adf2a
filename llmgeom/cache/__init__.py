"""Activations on disk: content-hashed shards, their keys, and their capture by several processes."""
