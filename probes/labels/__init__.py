"""Is a label of the user's own linearly readable from a model's activations, beyond its controls and confounds?"""
