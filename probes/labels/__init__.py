"""Is a user's label linearly readable from a model's activations, beyond its controls and confounds?"""
