"""Probes of in-context evidence: prompts of labelled words with an exact posterior."""
