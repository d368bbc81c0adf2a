"""Statistics of clustered arrays. It imports numpy, scipy and scikit-learn, and knows nothing of models."""
