"""Activations on disk: content-hashed shards, their keys, and several processes that fill them."""
