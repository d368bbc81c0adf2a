"""Statistics of arrays with clusters: numpy, scipy and scikit-learn only, nothing of a model."""
